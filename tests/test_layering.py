"""The layers of the package, its imports of third parties, and its parameters."""

import ast
import functools
import graphlib
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "jaxmem"

MAX_PARAMETERS = 7  # but of public functions, whose keywords are documentation

# What these modules export is public: functions, and the methods of classes.
PUBLIC = (
    "jaxmem jaxmem.head jaxmem.heads.linen jaxmem.heads.nnx jaxmem.losses "
    "jaxmem.remat.offload jaxmem.packing jaxmem.remat jaxmem.sharding"
).split()

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
    ("evaluate",),
    ("commands",),
    ("__main__",),
)
HEIGHTS = {name: height for height, names in enumerate(LAYERS) for name in names}
# The head and all that other trainers use of it. It never imports the application.
LIBRARY = "base devices remat packing head losses sharding heads integrations".split()
# Old paths of public modules, for one minor version. Nothing here imports them.
FORWARDS = ("jaxmem.offload", "jaxmem.cli", "jaxmem.train.report")

# Third parties, and the packages or modules that may import them.
ALLOWED_EVERYWHERE = {"jax", "numpy"}
ALLOWED_IN = {
    "flax": (
        "jaxmem.heads",
        "jaxmem.models",
        "jaxmem.checkpoints",
        "jaxmem.train",
        "jaxmem.planning.scoring",
        "jaxmem.integrations",
    ),
    "gin": ("jaxmem.train.configuration",),
    "grain": ("jaxmem.data",),
    "jax.experimental": (  # Pallas is in it
        "jaxmem.head.kernels",
        "jaxmem.models.kernels",
        "jaxmem.head.maths.partition",
        "jaxmem.devices",
        "jaxmem.models.kv_cache",  # layouts
    ),
    "datasets": ("jaxmem.data.remote",),
    "fsspec": ("jaxmem.data.remote",),
    "jinja2": ("jaxmem.data.template_sandbox",),
    "jsonschema": ("jaxmem.data.verifiers",),
    "lm_eval": ("jaxmem.evaluate",),
    "matplotlib": ("jaxmem.train", "jaxmem.planning.picture"),
    "optax": ("jaxmem.models", "jaxmem.train"),
    "orbax": ("jaxmem.train",),
    "pyarrow": ("jaxmem.score", "jaxmem.data.records"),
    "referencing": ("jaxmem.data.verifiers",),
    "rich": (
        "jaxmem.train",
        "jaxmem.score",
        "jaxmem.generate",
        "jaxmem.commands.cli",
    ),
    "safetensors": ("jaxmem.checkpoints",),
    "tensorboardX": ("jaxmem.train",),
    "tokenizers": (
        "jaxmem.checkpoints",
        "jaxmem.data",
        "jaxmem.train",
        "jaxmem.generate",
    ),
    "wandb": ("jaxmem.train.output.wandb_writer",),
}


def _module(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_module(path): path for path in sorted(PACKAGE.rglob("*.py"))}
SOURCES = [
    path
    for folder in ("jaxmem", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
]


@functools.cache
def _tree(path):
    return ast.parse(path.read_text("utf-8"), str(path))


def _place(path, line):
    return f"{path.relative_to(ROOT)}:{line}"


@functools.cache
def _nodes(path):
    return list(ast.walk(_tree(path)))


@functools.cache
def _imports(path):
    """(dotted name, place) of each import, anywhere in the file.

    What a package names for type checkers is not imported when it runs.
    """
    found = []
    checkers = {
        child
        for node in _nodes(path)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for child in node.body
        if path.name == "__init__.py"
    }
    for node in _nodes(path):
        if node in checkers:
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{_place(path, node.lineno)}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        found += [(name, _place(path, node.lineno)) for name in names]
    return found


def _functions(path):
    return [node for node in _nodes(path) if isinstance(node, ast.FunctionDef)]


def _is_in(name, package):
    return name == package or name.startswith(f"{package}.")


@functools.cache
def _own_imports(module):
    """(module, place) of each import of this package by a module."""
    imports = []
    for name, place in _imports(MODULES[module]):
        if _is_in(name, "jaxmem"):
            target = name if name in MODULES else name.rpartition(".")[0]
            assert target in MODULES, f"{place}: {name} is not a module"
            imports.append((target, place))
    return imports


def _layer(module):
    return module.split(".")[1]


def test_every_module_has_a_layer():
    modules = {module for module in MODULES if "." in module} - {*FORWARDS}
    assert {_layer(module) for module in modules} == HEIGHTS.keys()


def test_imports_only_from_below():
    assert not list(upward())


def upward():
    """Places of imports that are not from below."""
    for module in MODULES.keys() - {"jaxmem", *FORWARDS}:
        for target, place in _own_imports(module):
            if not _is_below(target, module):
                yield f"{place}: {module} imports {target}"


def _is_below(target, module):
    if target in FORWARDS:
        return False
    if target == "jaxmem":  # the package itself, which imports public functions
        return HEIGHTS[_layer(module)] > HEIGHTS["sharding"]
    if _layer(target) == _layer(module):
        return True
    return HEIGHTS[_layer(target)] < HEIGHTS[_layer(module)]


def test_the_library_never_imports_the_application():
    application = HEIGHTS.keys() - {*LIBRARY, "_version"}
    for module in MODULES.keys() - {"jaxmem", *FORWARDS}:
        if _layer(module) in LIBRARY:
            targets = {_layer(t) for t, _ in _own_imports(module) if t != "jaxmem"}
            assert not targets & application, module


def test_forwards_have_every_public_name():
    for module in FORWARDS:
        with pytest.warns(DeprecationWarning, match="is deprecated"):
            sys.modules.pop(module, None)
            forward = importlib.import_module(module)
        (target,) = {name for name, _ in _own_imports(module)}
        names = {
            name: item
            for name, item in vars(importlib.import_module(target)).items()
            if getattr(item, "__module__", None) == target and name[0] != "_"
        }
        assert names and names.items() <= vars(forward).items(), module


def test_own_modules_keep_their_names():
    for path in SOURCES:
        for node in _nodes(path):
            if isinstance(node, ast.ImportFrom) and _is_in(node.module, "jaxmem"):
                for alias in node.names:
                    renamed = alias.asname not in (None, alias.name)
                    is_module = f"{node.module}.{alias.name}" in MODULES
                    place = _place(path, node.lineno)
                    assert not (renamed and is_module), f"{place}: {alias.name}"


def test_no_circle():
    """Among modules; imports inside functions and of types count, too."""
    graph = {
        module: {target for target, _ in _own_imports(module) if target != module}
        for module in MODULES
    }
    graphlib.TopologicalSorter(graph).prepare()


def test_no_private_name_of_another_package():
    for module, path in MODULES.items():
        for name, place in _imports(path):
            parts = name.split(".")
            if parts[0] != "jaxmem" or parts[:2] == ["jaxmem", _layer(module + ".")]:
                continue
            private = [p for p in parts[2:] if _is_private(p)]
            assert not private, f"{place}: {name}"
        others = _names_of_other_packages(module, path)
        for node in _nodes(path):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                private = node.value.id in others and _is_private(node.attr)
                assert not private, f"{_place(path, node.lineno)}: {node.attr}"


def _is_private(name):
    return name.startswith("_") and name != "__version__"


def _names_of_other_packages(module, path):
    """The names by which a file knows modules of this project's other packages."""
    here = ".".join(module.split(".")[:2])
    return {
        alias.asname or alias.name
        for node in _nodes(path)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if (name := f"{node.module}.{alias.name}") in MODULES and not _is_in(name, here)
    }


def test_third_parties_only_where_allowed():
    for module, path in MODULES.items():
        for name, place in _imports(path):
            top = name.partition(".")[0]
            if top in sys.stdlib_module_names or top == "jaxmem":
                continue
            third_parties = [key for key in ALLOWED_IN if _is_in(name, key)]
            assert third_parties or top in ALLOWED_EVERYWHERE, f"{place}: {name}"
            for key in third_parties:
                assert any(_is_in(module, package) for package in ALLOWED_IN[key]), (
                    f"{place}: {name} may not be imported in {module}"
                )


def test_no_private_jax():
    for path in SOURCES:
        for name, place in _imports(path):
            assert not _is_in(name, "jax._src"), f"{place}: {name}"
            assert not _is_in(name, "jaxlib"), f"{place}: {name}"
            removed = "jax.experimental.pallas.triton"  # jax is to
            assert not _is_in(name, removed), f"{place}: {name}"
        for node in _nodes(path):
            is_private = isinstance(node, ast.Attribute) and node.attr == "_src"
            assert not is_private, f"{_place(path, node.lineno)}: ._src"


def test_no_file_is_named_utils():
    assert not [path for path in SOURCES if path.name == "utils.py"]


@functools.cache
def _public_functions():
    """(file, line) of every public function's first decorator or `def`."""
    places = set()
    for module in map(importlib.import_module, PUBLIC):
        for name, item in vars(module).items():
            if name.startswith("_") or not callable(item):
                continue
            methods = inspect.getmembers(item, inspect.isfunction)
            is_class = inspect.isclass(item)
            for function in [f for _, f in methods] if is_class else [item]:
                code = getattr(inspect.unwrap(function), "__code__", None)
                if code is not None:
                    places.add((Path(code.co_filename), code.co_firstlineno))
    return places


def test_few_parameters():
    """Options of a verb travel as one object below the public function."""
    for path in MODULES.values():
        for node in _functions(path):
            line = min(n.lineno for n in [node, *node.decorator_list])
            if (path, line) in _public_functions():
                continue
            a = node.args
            names = [x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
            names = [name for name in names if name not in ("self", "cls")]
            place = _place(path, node.lineno)
            assert len(names) <= MAX_PARAMETERS, f"{place}: {node.name}: {names}"


def test_import_is_light():
    heavy = [*ALLOWED_IN.keys() - {"jax.experimental"}, "jax.experimental.pallas"]
    program = (
        "import sys, jaxmem, jaxmem.heads; "
        f"print([name for name in {sorted(heavy)} if name in sys.modules])"
    )
    process = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert process.stdout.strip() == "[]"
