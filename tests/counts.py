"""Count parameters, imports and words against their goals, and lines by room.

    python -m tests.counts

Prints a table of counts, the goals of CONTRIBUTING.md and the places that miss them.
Then it prints the lines of each room of the package, of tests and of benchmarks, which
have no goal: they show growth. Exit status: 0 if every goal is met, 1 otherwise.
"""

import ast
import collections
import functools
import graphlib
import inspect
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

import jaxmem
from jaxmem import losses
from jaxmem.heads import linen, nnx
from tests.helpers import layers

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "jaxmem"
# Verbs that take a loss, a function of statistics.
OF_LOSSES = ("token_loss", "divergence_loss")
WORDS = (
    r'"""(?:Of|Likewise|The same|Trace the same)\b', r"\bone entry a token\b",
    r"token_stats tells as", r"with everything made again", r"the step names nothing",
    r"left as it is:", r"one process is told the address", r"share out a rollout",
    r"moments under way",
)  # fmt: skip


class Count(NamedTuple):
    """A count, its upper limit, and the places that exceed it."""

    what: str
    count: int
    goal: int
    where: str = ""


def counts() -> Iterator[Count]:
    """Every count of the table."""
    yield from _parameters()
    yield _branches_on_configs()
    yield _upward()
    yield _circles()
    yield _words()


# --------------------------------------------------------------- signatures


def _parameters() -> Iterator[Count]:
    of_verbs = {name: _size(getattr(jaxmem, name)) for name in _functions(jaxmem)}
    yield Count("parameters of logprobs", of_verbs.pop("logprobs"), 11)
    of_losses = {name: of_verbs.pop(name) for name in OF_LOSSES if name in of_verbs}
    yield _largest("parameters of a verb", of_verbs, 12)
    of_losses |= {f"losses.{n}": _size(getattr(losses, n)) for n in _functions(losses)}
    for module in (linen, nnx):
        for name, made in inspect.getmembers(module, inspect.isclass):
            if made.__module__ == module.__name__ and not name.startswith("_"):
                of_losses[f"{module.__name__}.{name}"] = _size(made)
    yield _largest("parameters of a loss or a constructor", of_losses, 18)


def _functions(module) -> list[str]:
    names = (name for name in dir(module) if not name.startswith("_"))
    forwards = layers.FORWARDS
    names = [name for name in names if f"{module.__name__}.{name}" not in forwards]
    return [name for name in names if inspect.isfunction(getattr(module, name))]


def _size(function) -> int:
    if inspect.isclass(function):  # a metaclass can hide the signature of __init__
        return len(inspect.signature(function.__init__).parameters) - 1
    return len(inspect.signature(function).parameters)


def _largest(what: str, sizes: dict[str, int], goal: int) -> Count:
    above = [f"{name} {size}" for name, size in sizes.items() if size > goal]
    return Count(what, max(sizes.values()), goal, ", ".join(above))


# ------------------------------------------------------------------ sources


@functools.cache
def _trees() -> dict[pathlib.Path, ast.Module]:
    return {path: layers.tree_of(path) for path in PACKAGE.rglob("*.py")}


def _branches_on_configs() -> Count:
    """`isinstance` of a config that another module defines."""
    found = []
    for path, tree in _trees().items():
        own = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or ast.unparse(node.func) != "isinstance":
                continue
            kinds = re.findall(r"\w*Config\b", ast.unparse(node.args[1]))
            if set(kinds) - own:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    what = "isinstance on a config class of another module"
    return Count(what, len(found), 0, ", ".join(found))


def lines() -> dict[str, int]:
    """Lines of Python by room of the package, and of tests and benchmarks."""
    rooms = collections.Counter()
    for folder in ("jaxmem", "tests", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            room = path.relative_to(ROOT).parts[:2] if folder == "jaxmem" else [folder]
            rooms["/".join(room)] += path.read_bytes().count(b"\n")
    return dict(sorted(rooms.items()))


def _upward() -> Count:
    found = list(layers.upward())
    return Count("imports upward", len(found), 0, ", ".join(found))


def _circles() -> Count:
    graph = {
        module: {target for target, _ in layers.own_imports(module)} - {module}
        for module in layers.MODULES
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return Count("circles of imports", 1, 0, " ".join(error.args[1]))
    return Count("circles of imports", 0, 0)


def _words() -> Count:
    """Sentences without a subject, and private metaphors."""
    pattern = re.compile("|".join(WORDS))
    places = [
        f"{path.relative_to(ROOT)}:{number}"
        for folder, suffix in (("jaxmem", "py"), ("configs", "gin"))
        for path in sorted((ROOT / folder).rglob(f"*.{suffix}"))
        for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1)
        if pattern.search(line)
    ]
    return Count("words that are to go", len(places), 0, ", ".join(places))


def main() -> int:
    """Print the table."""
    table = list(counts())
    for what, count, goal, where in table:
        print(f"{what:52} {count:>7,} of at most {goal:>6,}  {where}")
    for room, number in lines().items():
        print(f"{f'lines of {room}':52} {number:>7,}")
    return int(any(row.count > row.goal for row in table))


if __name__ == "__main__":
    sys.exit(main())
