"""Mutation testing: flip an operator, a constant or a condition; some test must fail.

    python -m tests.mutants --count 48 --out benchmarks/results/mutants_cpu.csv

Mutants are drawn from the functions of the modules below, the same ones for a seed,
and each is tested in a copy of the tree by the tests that mirror its module: by those
that `.ci/run` runs, and if all of them pass, by those marked slow. A mutant that slow
tests alone kill says that one of them should not be slow; of one that survives, a test
is missing, or the mutant computes the same.
"""

import argparse
import ast
import copy
import csv
import os
import pathlib
import queue
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent import futures
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parent.parent

# Module to the tests that are to kill its mutants, the likeliest first.
OF_LOOPS = (
    "tests/head/test_functions.py",
    "tests/head/verbs/test_api.py",
    "tests/head/backends/test_xla.py",
)
MODULES = {
    "jaxmem/head/maths/row_stats.py": ("tests/head/maths/test_row_stats.py", *OF_LOOPS),
    "jaxmem/head/maths/backend_operands.py": (
        "tests/head/maths/test_backend_operands.py",
        *OF_LOOPS,
    ),
    "jaxmem/head/maths/checks.py": ("tests/head/maths/test_checks.py",),
    "jaxmem/head/backends/xla.py": OF_LOOPS,
    "jaxmem/head/maths/scaling.py": OF_LOOPS,
    "jaxmem/heads/verbs.py": ("tests/heads/test_methods.py", "tests/heads"),
    "jaxmem/packing/plan.py": ("tests/packing",),
    "jaxmem/losses/policy.py": ("tests/losses",),
    "jaxmem/losses/sequences.py": ("tests/losses",),
    "jaxmem/losses/ratios.py": ("tests/losses",),
    "jaxmem/checkpoints/architectures.py": ("tests/checkpoints",),
    "jaxmem/checkpoints/names.py": ("tests/checkpoints",),
    "jaxmem/checkpoints/tensors.py": ("tests/checkpoints",),
}
OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip


class Mutant(NamedTuple):
    """One change of one function."""

    module: str
    function: str
    before: str
    after: str
    source: str  # of the whole module, changed
    lines: range  # of the statement in the unchanged module


def main() -> None:
    """Draw mutants, test each, print those that survive, write all as CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument(
        "--module", action="append", choices=MODULES, help="of those drawn, these only"
    )
    arguments = parser.parse_args()
    each = {module: [*mutants(module)] for module in MODULES}
    drawn = draw(each, arguments.count, arguments.seed)
    drawn = [x for x in drawn if x.module in (arguments.module or MODULES)]
    with (
        tempfile.TemporaryDirectory() as folder,
        futures.ThreadPoolExecutor(arguments.jobs) as pool,
    ):
        trees = queue.SimpleQueue()
        for number in range(arguments.jobs):
            tree = pathlib.Path(folder) / str(number)
            shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", "runs"))
            trees.put(tree)
        rows = list(pool.map(lambda mutant: row_of(mutant, trees), drawn))
    killed = sum(row[-2] == "killed" for row in rows)
    print(f"{killed} of {len(rows)} killed")
    if arguments.out:
        with arguments.out.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(
                ("module", "function", "before", "after", "verdict", "seconds")
            )
            writer.writerows(rows)


def draw(each: dict[str, list], count: int, seed: int) -> list:
    """As many from each module's list, as far as it has any."""
    rng = random.Random(seed)
    for found in each.values():
        rng.shuffle(found)
    drawn = []
    while len(drawn) < count and any(each.values()):
        drawn += [found.pop() for found in each.values() if found]
    return drawn[:count]


def mutants(module: str, root: pathlib.Path = ROOT) -> Iterator[Mutant]:
    """Every change of an expression that one of the module's functions computes."""
    tree = ast.parse((root / module).read_text("utf-8"))
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            yield from mutants_of(tree, module, function)


def mutants_of(tree, module, function: ast.FunctionDef) -> Iterator[Mutant]:
    """Every change of an expression that this function of a module computes."""
    for node in computed(function):
        yield from changed(tree, module, function, node)


def computed(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Nodes of the body, without docstring, annotations and what is raised."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    waiting = list(body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.Raise, ast.FunctionDef, ast.JoinedStr)):
            continue
        yield node
        waiting += [
            child
            for name, value in ast.iter_fields(node)
            if name not in ("annotation", "returns")
            for child in (value if isinstance(value, list) else [value])
            if isinstance(child, ast.AST)
        ]


def changed(tree, module, function, node) -> Iterator[Mutant]:
    """The module with the node changed, for each way there is."""
    before = _text(node)
    for undo in _changes(node):
        after, source = _text(node), ast.unparse(tree)
        lines = lines_around(function, node)
        yield Mutant(module, function.name, before, after, source, lines)
        undo()


def _text(node):
    """The source of an expression, or of a statement's condition."""
    return ast.unparse(node.test if isinstance(node, ast.If) else node)


def lines_around(function, node) -> range:
    """Lines of the innermost statement around a node, without the body of a block."""
    statements = [
        x
        for x in ast.walk(function)
        if isinstance(x, ast.stmt) and x.lineno <= node.lineno <= (x.end_lineno or 0)
    ]
    inner = max(statements, key=lambda x: (x.lineno, -(x.end_lineno or 0)))
    body = getattr(inner, "body", None)
    end = body[0].lineno if body else (inner.end_lineno or 0) + 1
    return range(inner.lineno, max(end, inner.lineno + 1))


def _changes(node):
    """Change the node in place; yields what takes the change back."""
    if isinstance(node, (ast.BinOp, ast.BoolOp)) and type(node.op) in OPERATORS:
        old = node.op
        node.op = OPERATORS[type(old)]()
        yield lambda: setattr(node, "op", old)
    if isinstance(node, ast.Compare) and type(node.ops[0]) in OPERATORS:
        old = copy.copy(node.ops)
        node.ops[0] = OPERATORS[type(old[0])]()
        yield lambda: setattr(node, "ops", old)
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        value = node.value
        node.value = value + 1
        yield lambda: setattr(node, "value", value)
    if isinstance(node, (ast.If, ast.IfExp)):
        test = node.test
        node.test = ast.UnaryOp(ast.Not(), test)
        yield lambda: setattr(node, "test", test)


def row_of(mutant: Mutant, trees: queue.SimpleQueue) -> tuple:
    """The record of a mutant, which is tested in a tree that no other uses."""
    tree, start = trees.get(), time.monotonic()
    try:
        verdict = verdict_of(mutant, tree)
    finally:
        trees.put(tree)
    row = *mutant[:4], verdict, round(time.monotonic() - start)
    print(*row, sep="  ", flush=True)
    return row


def verdict_of(mutant: Mutant, tree: pathlib.Path) -> str:
    """The result of the tests in a copy of the tree with the mutant in it."""
    path = tree / mutant.module
    original = path.read_text("utf-8")
    path.write_text(mutant.source, "utf-8")
    try:
        if _fails(tree, mutant.module, "not slow"):
            return "killed"
        slow = _fails(tree, mutant.module, "slow")
        return "killed by slow tests" if slow else "survived"
    finally:
        path.write_text(original, "utf-8")


def _fails(tree, module, marked):
    command = [sys.executable, "-m", "pytest", "-x", "-n", "0", "-m", marked]
    try:
        done = subprocess.run(
            [*command, *MODULES[module]],
            cwd=tree,
            env=os.environ | {"PYTHONPATH": str(tree)},
            capture_output=True,
            timeout=900,
        )
    except subprocess.TimeoutExpired:
        return True
    return done.returncode not in (0, 5)  # 5: none is marked so


if __name__ == "__main__":
    main()
