"""The layers of the package, and its imports."""

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "jaxmem"
# Lowest first: a package imports itself and those of the lines above. Two on one line
# do not import each other.
LAYERS = (
    ("_version",),
    ("base",),
    ("devices",),
    ("remat", "packing"),
    ("head",),
    ("losses", "sharding"),
    ("heads",),
    ("integrations", "models"),
    ("checkpoints",),
    ("data",),
    ("train",),
    ("score",),
    ("generate", "planning"),
    ("evaluate", "serve"),
    ("commands",),
    ("__main__",),
)
HEIGHTS = {name: height for height, names in enumerate(LAYERS) for name in names}
# Old paths of public modules, for one minor version. Nothing here imports them.
FORWARDS = ("jaxmem.offload", "jaxmem.cli", "jaxmem.train.report")


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@functools.cache
def tree_of(path):
    return ast.parse(path.read_text("utf-8"), str(path))


def place_of(path, line):
    return f"{path.relative_to(ROOT)}:{line}"


@functools.cache
def nodes_of(path):
    return list(ast.walk(tree_of(path)))


@functools.cache
def imports_of(path):
    """(dotted name, place) of each import, anywhere in the file.

    What a package names for type checkers is not imported when it runs.
    """
    found = []
    checkers = {
        child
        for node in nodes_of(path)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for child in node.body
        if path.name == "__init__.py"
    }
    for node in nodes_of(path):
        if node in checkers:
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{place_of(path, node.lineno)}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        found += [(name, place_of(path, node.lineno)) for name in names]
    return found


def is_in(name, package):
    return name == package or name.startswith(f"{package}.")


@functools.cache
def own_imports(module):
    """(module, place) of each import of this package by a module."""
    imports = []
    for name, place in imports_of(MODULES[module]):
        if is_in(name, "jaxmem"):
            target = name if name in MODULES else name.rpartition(".")[0]
            assert target in MODULES, f"{place}: {name} is not a module"
            imports.append((target, place))
    return imports


def layer_of(module):
    return module.split(".")[1]


def upward():
    """Places of imports that are not from below."""
    for module in MODULES.keys() - {"jaxmem", *FORWARDS}:
        for target, place in own_imports(module):
            if not is_below(target, module):
                yield f"{place}: {module} imports {target}"


def is_below(target, module):
    if target in FORWARDS:
        return False
    if target == "jaxmem":  # the package itself, which imports public functions
        return HEIGHTS[layer_of(module)] > HEIGHTS["sharding"]
    if layer_of(target) == layer_of(module):
        return True
    return HEIGHTS[layer_of(target)] < HEIGHTS[layer_of(module)]
