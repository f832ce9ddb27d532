"""Names and words that a reader meets in the package."""

import ast
import collections
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "jaxmem"
# One API for each of Flax's module systems; a program imports one of them.
SHARED_CLASS_NAMES = {"LMHead"}


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
