"""compute-sanitizer over a small call of every kernel: no bad access, no race."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

# Every kernel once, over ragged rows and a ragged vocabulary: logits made again, in one
# launch and in several, and a loss known inside.
PROGRAM = """
import jax, jax.numpy as jnp, jaxmem

def total(h, W, y, chunk=128, **options):
    stats = jaxmem.token_stats(h, W, y, chunk, implementation="hopper", **options)
    return jnp.sum(stats.logprob + stats.entropy)

def loss(h, W, y):
    of_token = lambda stats: stats.logprob + stats.entropy
    return jaxmem.token_loss(of_token, h, W, y, chunk=128, implementation="hopper")[0]

def launches(h, W, y):
    return total(h, W, y, chunk=64)

keys = jax.random.split(jax.random.key(0), 3)
h = jax.random.normal(keys[0], (300, 128), jnp.bfloat16)
W = jax.random.normal(keys[1], (1000, 128), jnp.bfloat16)
y = jax.random.randint(keys[2], (300,), -1, 1000)
for f in (total, loss, launches):
    gradients = jax.jit(jax.grad(f, (0, 1)))(h, W, y)
    assert all(bool(jnp.isfinite(x).all()) for x in gradients)
print("computed")
"""

OURS = ["--kernel-name", "kernel_substring=mosaic"]  # racecheck fails in some of XLA's
# Both take a minute; a tool that hangs is a failure that says so.
LIMIT = ["timeout", "--kill-after=10", "300"]
CLEAN = {
    "memcheck": "ERROR SUMMARY: 0 errors",
    "racecheck": "RACECHECK SUMMARY: 0 hazards",
}


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_kernels_are_clean(tool):
    program = shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin"
    )
    if program is None:
        pytest.skip("needs compute-sanitizer, of the CUDA toolkit")
    made = subprocess.run(
        [*LIMIT, program, f"--tool={tool}", *OURS, sys.executable, "-c", PROGRAM],
        env=os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        cwd=Path(__file__).parents[3],  # where jaxmem need not be installed
        capture_output=True,
        text=True,
    )
    assert "computed" in made.stdout, made.stdout + made.stderr
    assert CLEAN[tool] in made.stdout, made.stdout
