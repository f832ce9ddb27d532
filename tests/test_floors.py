"""The floors of the house: what may import what, and how large anything may grow."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "jaxmem"

MAX_FUNCTION_LINES = 60  # signature and docstring not counted
MAX_FILE_LINES = 450

# A module imports from lower floors only; within a floor, only from those above it in
# this table.
FLOORS = {
    "jaxmem._version": 0,
    "jaxmem._shipped": 0,
    "jaxmem._report": 0,
    "jaxmem.timing": 0,
    "jaxmem._stats": 0,
    "jaxmem._shards": 0,
    "jaxmem._spec": 0,
    "jaxmem._spread": 0,
    "jaxmem._sampled": 0,
    "jaxmem._xla": 1,
    "jaxmem._sampled_xla": 1,
    "jaxmem._loss": 1,
    "jaxmem.kernels": 1,
    "jaxmem.kernels.tiles": 1,
    "jaxmem.kernels.active": 1,
    "jaxmem.kernels.blocks": 1,
    "jaxmem.kernels.padding": 1,
    "jaxmem.kernels.tuned": 1,
    "jaxmem.kernels.ring": 1,
    "jaxmem.kernels.logits": 1,
    "jaxmem.kernels.forward": 1,
    "jaxmem.kernels.dlogits": 1,
    "jaxmem.kernels.kept": 1,
    "jaxmem.kernels.products": 1,
    "jaxmem.kernels.sampled_select": 1,
    "jaxmem.kernels.sampled_products": 1,
    "jaxmem.kernels.hopper": 1,
    "jaxmem.kernels.sampled": 1,
    "jaxmem.kernels.tuning": 1,
    "jaxmem._backends": 2,
    "jaxmem._vjp": 2,
    "jaxmem._head": 3,
    "jaxmem._token_loss": 3,
    "jaxmem._rule": 3,
    "jaxmem._divergence": 3,
    "jaxmem._selected": 3,
    "jaxmem._ratios": 4,
    "jaxmem._sequences": 4,
    "jaxmem._policy": 4,
    "jaxmem.losses": 4,
    "jaxmem._mismatch": 4,
    "jaxmem.packing": 4,
    "jaxmem.sharding": 4,
    "jaxmem._remat_policy": 4,
    "jaxmem._traced": 4,
    "jaxmem._fit": 4,
    "jaxmem.remat": 4,
    "jaxmem.offload": 4,
    "jaxmem": 4,
    "jaxmem.bench": 4,
    "jaxmem.heads": 4,
    "jaxmem.heads._verbs": 4,
    "jaxmem.heads.linen": 4,
    "jaxmem.heads.nnx": 4,
    "jaxmem.train": 5,
    "jaxmem.train._checks": 5,
    "jaxmem.train.processes": 5,
    "jaxmem.train.mesh": 5,
    "jaxmem.train.ulysses": 5,
    "jaxmem.train.cache": 5,
    "jaxmem.train.positions": 5,
    "jaxmem.train.lora": 5,
    "jaxmem.train.layers": 5,
    "jaxmem.train.model": 5,
    "jaxmem.train.sampling": 5,
    "jaxmem.train.optimizer": 5,
    "jaxmem.checkpoints.architectures": 5,
    "jaxmem.checkpoints.tensors": 5,
    "jaxmem.checkpoints.names": 5,
    "jaxmem.checkpoints.adapters": 5,
    "jaxmem.checkpoints.vocabulary": 5,
    "jaxmem.checkpoints.weights": 5,
    "jaxmem.checkpoints": 5,
    "jaxmem.train.tasks": 5,
    "jaxmem.train.vocabulary": 5,
    "jaxmem.train.data": 5,
    "jaxmem.train.streams": 5,
    "jaxmem.train.memory": 5,
    "jaxmem.train.checkpoint": 5,
    "jaxmem.train.program": 5,
    "jaxmem.train.metrics": 5,
    "jaxmem.train.loop": 5,
    "jaxmem.train.starting": 5,
    "jaxmem.train.sft": 5,
    "jaxmem.train.rollouts": 5,
    "jaxmem.train.policy": 5,
    "jaxmem.train.policy_program": 5,
    "jaxmem.train.grpo": 5,
    "jaxmem.train.config": 5,
    "jaxmem.integrations._head": 4,
    "jaxmem.integrations._replace": 4,
    "jaxmem.integrations.tunix": 4,
    "jaxmem.integrations.maxtext": 4,
    "jaxmem.integrations.skyrl": 4,
    "jaxmem.integrations.easydel": 4,
    "jaxmem.integrations": 4,
    "jaxmem.score.windows": 5,
    "jaxmem.score.journal": 5,
    "jaxmem.score.summary": 5,
    "jaxmem.score.run": 5,
    "jaxmem.score": 5,
    "jaxmem.cli": 6,
    "jaxmem.__main__": 7,
}

# Third parties and the rooms that may import them; a room is a module or a package.
EVERYWHERE = {"jax", "numpy"}
ROOMS = {
    "flax": (
        "jaxmem.heads",
        "jaxmem.train",
        "jaxmem.checkpoints",
        "jaxmem.integrations",
    ),
    "gin": ("jaxmem.train.config",),
    "grain": ("jaxmem.train",),
    "jax.experimental": ("jaxmem.kernels", "jaxmem._spread"),  # pallas among it
    "matplotlib": ("jaxmem.train",),
    "optax": ("jaxmem.train",),
    "orbax": ("jaxmem.train",),
    "pyarrow": ("jaxmem.score",),
    "rich": ("jaxmem.train", "jaxmem.score"),
    "safetensors": ("jaxmem.checkpoints",),
    "tensorboardX": ("jaxmem.train",),
    "tokenizers": ("jaxmem.train", "jaxmem.checkpoints"),
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


def _tree(path):
    return ast.parse(path.read_text("utf-8"), str(path))


def _imports(tree):
    """(dotted name, line) of all that is imported, wherever in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno


def _is_in(name, room):
    return name == room or name.startswith(f"{room}.")


def _only_for_types(tree):
    """Lines below `if TYPE_CHECKING:`, which nothing executes."""
    return {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
        for statement in node.body
        for line in range(statement.lineno, statement.end_lineno + 1)
    }


def test_every_module_has_a_floor():
    assert set(MODULES) == set(FLOORS)


@pytest.mark.parametrize("module", MODULES)
def test_imports_only_from_below(module):
    order = list(FLOORS)
    rank = {name: (floor, order.index(name)) for name, floor in FLOORS.items()}
    tree = _tree(MODULES[module])
    skipped = _only_for_types(tree)
    for name, line in _imports(tree):
        if not _is_in(name, "jaxmem") or line in skipped:
            continue
        target = name if name in MODULES else name.rpartition(".")[0]
        assert target in MODULES, f"line {line}: {name} is not a module"
        assert rank[target] < rank[module], f"line {line}: {name} is not below {module}"


@pytest.mark.parametrize("module", MODULES)
def test_third_parties_stay_in_their_rooms(module):
    for name, line in _imports(_tree(MODULES[module])):
        top = name.partition(".")[0]
        if top in sys.stdlib_module_names or top == "jaxmem":
            continue
        guests = [guest for guest in ROOMS if _is_in(name, guest)]
        assert guests or top in EVERYWHERE, f"line {line}: {name} has no room"
        for guest in guests:
            assert any(_is_in(module, room) for room in ROOMS[guest]), (
                f"line {line}: {name} may not be imported in {module}"
            )


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_private_jax(path):
    for name, line in _imports(_tree(path)):
        assert not _is_in(name, "jax._src"), f"line {line}: {name}"
        assert not _is_in(name, "jaxlib"), f"line {line}: {name}"
    for node in ast.walk(_tree(path)):
        is_private = isinstance(node, ast.Attribute) and node.attr == "_src"
        assert not is_private, f"line {node.lineno}: ._src"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_short_files_of_short_functions(path):
    assert path.name != "utils.py"
    assert len(path.read_text("utf-8").splitlines()) <= MAX_FILE_LINES
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            length = body[-1].end_lineno - body[0].lineno + 1 if body else 0
            assert length <= MAX_FUNCTION_LINES, f"{node.name}: {length} lines"


def test_import_is_light():
    heavy = [*ROOMS.keys() - {"jax.experimental"}, "jax.experimental.pallas"]
    program = (
        "import sys, jaxmem; "
        f"print([name for name in {sorted(heavy)} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"
