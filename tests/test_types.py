"""What a type checker reports of a user's script, and what an editor completes."""

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
from jaxmem import remat

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
"""


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


@pytest.mark.parametrize(
    "name", ["functional", "losses", "packing", "remat", "sharding"]
)
def test_a_package_shows_its_public_names_only(name):
    """`jaxmem.losses.` completes to functions and classes, and to no module."""
    package = getattr(jaxmem, name)
    public = [item for item in dir(package) if not item.startswith("_")]
    assert public and all(hasattr(package, item) for item in public)
    modules = [m for m in public if isinstance(getattr(package, m), types.ModuleType)]
    assert not modules


def test_the_package_shows_its_public_names_only():
    names = {name for name in dir(jaxmem) if not name.startswith("_")}
    assert {"logprobs", "losses", "sharding", "remat", "plan"} <= names
    assert not names & {"backends", "core", "functional", "kernels"}
