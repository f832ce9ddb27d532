"""Names and words that a reader meets in the package."""

import ast
import collections
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "jaxmem"
# One API for each of Flax's module systems; a program imports one of them.
SHARED_CLASS_NAMES = {"LMHead"}
# A docstring's first line names the result or the action, not a question about it.
UNCLEAR_FIRST_WORDS = set(
    "What Whether Which Those Where When How Of That Likewise".split()
)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def _module_level_classes():
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef):
                yield node.name, str(path.relative_to(PACKAGE))


def test_class_names_are_unique():
    modules = collections.defaultdict(list)
    for name, module in _module_level_classes():
        modules[name].append(module)
    repeated = {name: paths for name, paths in modules.items() if len(paths) > 1}
    assert repeated.keys() == SHARED_CLASS_NAMES, repeated


def test_docstrings_name_a_result_or_an_action_first():
    unclear = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            text = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
            if text and text.split()[0].rstrip(",") in UNCLEAR_FIRST_WORDS:
                unclear.append(f"{path.name}: {text.splitlines()[0]}")
    assert not unclear
