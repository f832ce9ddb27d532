"""Names and words that a reader meets in the package, its tests and benchmarks."""

import ast
import collections
from pathlib import Path

import pytest

from jaxmem.train import configuration
from tests.helpers import layers

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "jaxmem"
# One API for each of Flax's module systems; a program imports one of them.
SHARED_CLASS_NAMES = {"LMHead"}
# A docstring's first line names the result or the action, not a question about it.
UNCLEAR_FIRST_WORDS = set(
    "What Whether Which Those Where When How Of That Likewise".split()
)
UNCLEAR_BEGINNINGS = ("The same ",)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def _module_level_classes():
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in layers.tree_of(path).body:
            if isinstance(node, ast.ClassDef):
                yield node.name, str(path.relative_to(PACKAGE))


def test_class_names_are_unique():
    modules = collections.defaultdict(list)
    for name, module in _module_level_classes():
        modules[name].append(module)
    repeated = {name: paths for name, paths in modules.items() if len(paths) > 1}
    assert repeated.keys() == SHARED_CLASS_NAMES, repeated


def _is_unclear(text):
    first_word = text.split()[0].rstrip(",:")
    return first_word in UNCLEAR_FIRST_WORDS or text.startswith(UNCLEAR_BEGINNINGS)


@pytest.mark.parametrize("folder", ["jaxmem", "tests", "benchmarks"])
def test_docstrings_name_a_result_or_an_action_first(folder):
    unclear = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in layers.nodes_of(path):
            text = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
            if text and _is_unclear(text):
                unclear.append(f"{path.name}: {text.splitlines()[0]}")
    assert not unclear


def test_keys_are_described_by_their_subject():
    """A user reads one line of `jaxmem train --keys`, not the lines above it."""
    lines = [x for x in configuration.describe_keys() if not x.startswith("# ")]
    descriptions = [line.partition("  # ")[2].partition("; ")[2] for line in lines]
    assert len(descriptions) > 200
    unclear = [x for x in descriptions if _is_unclear(x[:1].upper() + x[1:])]
    assert not unclear
