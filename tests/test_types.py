"""Reports of a type checker on a user's script, and completions of an editor."""

import ast
import importlib.util
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest

import jaxmem

ROOT = Path(__file__).parent.parent
SCRIPT = """
import jax
import jax.numpy as jnp

import jaxmem
from jaxmem import generate, remat

h, W, y = jnp.ones((2, 8)), jnp.ones((4, 8)), jnp.array([0, 3])
mesh = jax.make_mesh((1, 1), ("data", "tensor"))

jaxmem.logprobs(h, W, y, chunk="auto", implementation="hopper")
jaxmem.logprobs(h, W, y, chunk="bogus")  # mistake

sharded = jaxmem.sharding.parallel(jaxmem.logprobs, mesh, vocab="tensor")
sharded(h, jaxmem.Head(W, softcap=30.0, layout="vd"), y).mean()
sharded(h, jaxmem.Head(W, softcap="30"), y)  # mistake
sharded(h, W, y, softcap=30.0)  # mistake

remat.name(h, "mlp_up").astype(jnp.bfloat16)
remat.name(h, "mlp_up").no_such_method()  # mistake

jaxmem.log_probs(h, W, y)  # mistake
jaxmem.logprobs(h, W, y, implementation="cuda")  # mistake
jaxmem.remat.presets  # mistake
jaxmem.remat.preset("save_block")
jaxmem.plan
jaxmem.integrations.status()
jaxmem.integrations.tunix.applied()
jaxmem.integrations.tunix.aply(chunck=3)  # mistake
jaxmem.integrations.tunix.apply(chunck=3)  # mistake
jaxmem.integrations.tunics  # mistake
jaxmem.heads.nnx.LMHead
jaxmem.heads.linnen  # mistake
print(jaxmem.models.config, jaxmem.data.tasks, jaxmem.train.jobs, jaxmem.score.score)
jaxmem.models.confg  # mistake
jaxmem.data.taks  # mistake
jaxmem.train.job  # mistake
jaxmem.score.sccore  # mistake
generate.Generator
generate.Generater  # mistake
"""


@pytest.mark.full
def test_pyright_reports_exactly_the_mistakes(tmp_path):
    if importlib.util.find_spec("pyright") is None:
        pytest.skip("pyright is not installed; it comes with the extra `dev`")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, "utf-8")
    config = {"extraPaths": [str(ROOT)], "typeCheckingMode": "basic"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config), "utf-8")
    process = subprocess.run(
        [sys.executable, "-m", "pyright", "--outputjson", "--project", str(tmp_path),
         "--pythonpath", sys.executable],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    diagnostics = json.loads(process.stdout)["generalDiagnostics"]
    reported = {d["range"]["start"]["line"]: d["message"] for d in diagnostics}
    lines = SCRIPT.split("\n")
    mistakes = [i for i, line in enumerate(lines) if line.endswith("# mistake")]
    assert sorted(reported) == mistakes, reported


def names_of_checkers(block):
    """Names that the imports of a block define, and no others."""
    assert all(isinstance(node, ast.ImportFrom) for node in block)
    return sorted(alias.asname or alias.name for node in block for alias in node.names)


def lazy_names(block):
    """Names that a package serves by `imports.lazy`."""
    (assignment,) = block
    call = assignment.value
    names = [argument.value for argument in call.args[1:]]
    return [*names, *(keyword.arg for keyword in call.keywords)]


LAZY = [
    path
    for path in sorted((ROOT / "jaxmem").rglob("__init__.py"))
    if "imports.lazy(" in path.read_text("utf-8")
]


@pytest.mark.parametrize("path", LAZY, ids=lambda path: path.parent.name)
def test_type_checker_knows_each_lazy_name(path):
    """It must see no `__getattr__`, by which each unknown name would be `Any`."""
    body = ast.parse(path.read_text("utf-8")).body
    (branch,) = (node for node in body if isinstance(node, ast.If))
    assert ast.unparse(branch.test) == "typing.TYPE_CHECKING"
    eager = [node for node in body if isinstance(node, ast.ImportFrom)]
    known = {alias.name for node in eager for alias in node.names}
    lazy = set(lazy_names(branch.orelse)) - known
    assert names_of_checkers(branch.body) == sorted(lazy)
    module = importlib.import_module(".".join(path.relative_to(ROOT).parent.parts))
    assert lazy <= set(dir(module)) and "TYPE_CHECKING" not in dir(module)


@pytest.mark.parametrize("name", ["head", "losses", "packing", "remat", "sharding"])
def test_package_shows_its_public_names_only(name):
    """`jaxmem.losses.` completes to functions and classes, and to no module."""
    package = getattr(jaxmem, name)
    public = [item for item in dir(package) if not item.startswith("_")]
    assert public and all(hasattr(package, item) for item in public)
    modules = [m for m in public if isinstance(getattr(package, m), types.ModuleType)]
    assert not modules


def test_jaxmem_shows_its_public_names_only():
    names = {name for name in dir(jaxmem) if not name.startswith("_")}
    assert {"logprobs", "losses", "sharding", "remat", "plan"} <= names
    assert not names & {"base", "commands", "maths", "verbs"}
