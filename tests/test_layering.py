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

from tests.helpers.layers import (
    FORWARDS,
    HEIGHTS,
    MODULES,
    ROOT,
    imports_of,
    is_in,
    layer_of,
    nodes_of,
    own_imports,
    place_of,
    upward,
)

MAX_PARAMETERS = 7  # but of public functions, whose keywords are documentation

# What these modules export is public: functions, and the methods of classes.
PUBLIC = (
    "jaxmem jaxmem.head jaxmem.heads.linen jaxmem.heads.nnx jaxmem.losses "
    "jaxmem.remat.offload jaxmem.packing jaxmem.remat jaxmem.sharding"
).split()

# The head and all that other trainers use of it. It never imports the application.
LIBRARY = "base devices remat packing head losses sharding heads integrations".split()

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
    "datasets": ("jaxmem.data.remote", "jaxmem.data.records"),
    "fsspec": ("jaxmem.data.remote",),
    "huggingface_hub": ("jaxmem.base.hub",),
    "jinja2": ("jaxmem.data.template_sandbox",),
    "jsonschema": ("jaxmem.data.verifiers",),
    "lm_eval": ("jaxmem.evaluate",),
    "math_verify": ("jaxmem.data.math_grader",),
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
        "jaxmem.serve",
    ),
    "wandb": ("jaxmem.train.output.wandb_writer",),
}


SOURCES = [
    path
    for folder in ("jaxmem", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
]


def _functions(path):
    return [node for node in nodes_of(path) if isinstance(node, ast.FunctionDef)]


def test_every_module_has_a_layer():
    modules = {module for module in MODULES if "." in module} - {*FORWARDS}
    assert {layer_of(module) for module in modules} == HEIGHTS.keys()


def test_imports_only_from_below():
    assert not list(upward())


def test_library_never_imports_the_application():
    application = HEIGHTS.keys() - {*LIBRARY, "_version"}
    for module in MODULES.keys() - {"jaxmem", *FORWARDS}:
        if layer_of(module) in LIBRARY:
            targets = {layer_of(t) for t, _ in own_imports(module) if t != "jaxmem"}
            assert not targets & application, module


def test_forwards_have_every_public_name():
    for module in FORWARDS:
        with pytest.warns(DeprecationWarning, match="is deprecated"):
            sys.modules.pop(module, None)
            forward = importlib.import_module(module)
        (target,) = {name for name, _ in own_imports(module)}
        names = {
            name: item
            for name, item in vars(importlib.import_module(target)).items()
            if getattr(item, "__module__", None) == target and name[0] != "_"
        }
        assert names and names.items() <= vars(forward).items(), module


def test_own_modules_keep_their_names():
    for path in SOURCES:
        for node in nodes_of(path):
            if isinstance(node, ast.ImportFrom) and is_in(node.module, "jaxmem"):
                for alias in node.names:
                    renamed = alias.asname not in (None, alias.name)
                    is_module = f"{node.module}.{alias.name}" in MODULES
                    place = place_of(path, node.lineno)
                    assert not (renamed and is_module), f"{place}: {alias.name}"


def test_no_circle():
    """Among modules; imports inside functions and of types count, too."""
    graph = {
        module: {target for target, _ in own_imports(module) if target != module}
        for module in MODULES
    }
    graphlib.TopologicalSorter(graph).prepare()


def test_rules_name_no_backend():
    """A rule gets its loops with the call, so that any backend can run it."""
    shared = {
        f"jaxmem.head.backends.{x}" for x in ("choose", "protocol", "vocab_groups")
    }
    for module in MODULES:
        if is_in(module, "jaxmem.head.verbs") or is_in(module, "jaxmem.head.maths"):
            for target, place in own_imports(module):
                named = is_in(target, "jaxmem.head.backends") and target not in shared
                assert not named and not is_in(target, "jaxmem.head.kernels"), place


def test_no_private_name_of_another_package():
    for module, path in MODULES.items():
        for name, place in imports_of(path):
            parts = name.split(".")
            if parts[0] != "jaxmem" or parts[:2] == ["jaxmem", layer_of(module + ".")]:
                continue
            private = [p for p in parts[2:] if _is_private(p)]
            assert not private, f"{place}: {name}"
        others = _names_of_other_packages(module, path)
        for node in nodes_of(path):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                private = node.value.id in others and _is_private(node.attr)
                assert not private, f"{place_of(path, node.lineno)}: {node.attr}"


def _is_private(name):
    return name.startswith("_") and name != "__version__"


def _names_of_other_packages(module, path):
    """The names by which a file knows modules of this project's other packages."""
    here = ".".join(module.split(".")[:2])
    return {
        alias.asname or alias.name
        for node in nodes_of(path)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if (name := f"{node.module}.{alias.name}") in MODULES and not is_in(name, here)
    }


def test_third_parties_only_where_allowed():
    for module, path in MODULES.items():
        for name, place in imports_of(path):
            top = name.partition(".")[0]
            if top in sys.stdlib_module_names or top == "jaxmem":
                continue
            third_parties = [key for key in ALLOWED_IN if is_in(name, key)]
            assert third_parties or top in ALLOWED_EVERYWHERE, f"{place}: {name}"
            for key in third_parties:
                assert any(is_in(module, package) for package in ALLOWED_IN[key]), (
                    f"{place}: {name} may not be imported in {module}"
                )


def test_no_private_jax():
    for path in SOURCES:
        for name, place in imports_of(path):
            assert not is_in(name, "jax._src"), f"{place}: {name}"
            assert not is_in(name, "jaxlib"), f"{place}: {name}"
            removed = "jax.experimental.pallas.triton"  # jax is to
            assert not is_in(name, removed), f"{place}: {name}"
        for node in nodes_of(path):
            is_private = isinstance(node, ast.Attribute) and node.attr == "_src"
            assert not is_private, f"{place_of(path, node.lineno)}: ._src"


def test_tests_share_helpers_alone():
    """No file imports a test file or a conftest: what tests share is in helpers."""
    for path in [*(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py")]:
        for name, place in imports_of(path):
            modules = name.split(".") if is_in(name, "tests") else []
            shared = [x for x in modules if x.startswith("test_") or x == "conftest"]
            assert not shared, f"{place}: {name}"


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
            place = place_of(path, node.lineno)
            assert len(names) <= MAX_PARAMETERS, f"{place}: {node.name}: {names}"


def test_import_is_light_and_has_offload():
    heavy = [*ALLOWED_IN.keys() - {"jax.experimental"}, "jax.experimental.pallas"]
    program = (
        "import sys, jaxmem, jaxmem.heads; "
        f"print([name for name in {sorted(heavy)} if name in sys.modules]); "
        "jaxmem.remat.offload.park"
    )
    process = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert process.stdout.strip() == "[]"
