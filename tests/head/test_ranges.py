"""Every function where a type ends: losses of any size in float16, logits to 1,000.

Both tests are of single numbers that a type cannot hold, and run on a GPU too.
"""

import dataclasses
import re

import jax
import numpy as np
import pytest

import jaxmem
from tests.helpers import crossing
from tests.helpers.cases import full, slow
from tests.helpers.crossing import Setting, check, problem
from tests.helpers.functions import FUNCTIONS
from tests.helpers.tolerance import STATS_EPSILON

pytestmark = pytest.mark.usefixtures("quick_compilation", "on_one_device")

LOSSES = [name for name in FUNCTIONS if "_loss" in name]
GRADIENTS = {"trained": None, "frozen": "frozen", "blocks": jaxmem.Recompute(2)}
HALF = Setting(("float16", "float16"), std=3.0, columns=300)


SIZES = {
    "large": (1e30, 1e30), "small": (2.0**-20, 2.0**-20), "scaled": (1.0, 2.0**12),
}  # fmt: skip
CASES = [
    ("token_loss", "large", "trained"), ("token_loss", "scaled", "trained"),
    full("token_loss", "small", "trained"),
    *(full("token_loss", "large", x) for x in ("frozen", "blocks")),
    *(slow("token_loss", size, "blocks") for size in ("small", "scaled")),
    *(slow(name, size, gradient)
      for name in LOSSES if name != "token_loss"
      for size in SIZES for gradient in ("trained", "frozen")),
]  # fmt: skip


def values_of(cases):
    """The cases without their tiers."""
    return [getattr(x, "values", x) for x in cases]


@pytest.mark.parametrize("name, size, gradient", CASES)
def test_float16_with_losses_of_any_size(name, size, gradient):
    """65,504 is float16's largest number, and 6e-8 its least."""
    change = {"size": SIZES[size], "gradient": GRADIENTS[gradient]}
    check(name, dataclasses.replace(HALF, **change))


@pytest.mark.gpu
@pytest.mark.parametrize("name, size, gradient", values_of(CASES))
def test_float16_on_a_gpu(name, size, gradient):
    test_float16_with_losses_of_any_size(name, size, gradient)


def large(kind):
    """Operands of logits without rounding error, and of a teacher's near them.

    A product with the inverse of a temperature that is rounded for some uses of a logit
    and not for others, as by a compiler that contracts a product and a difference,
    makes probabilities that do not add up to 1: by 4e-5, with two logits of 900.
    The difference of two heads' logits loses what is small beside them.
    """
    p, rng = problem(LARGE), np.random.default_rng(0)
    n, v = len(p["hidden"]), len(p["W"])
    if kind == "std 100":
        h = np.pad(rng.integers(-8, 9, (n, 8)) * 3.0, ((0, 0), (0, 1)))
        W = np.pad(rng.integers(-8, 9, (v, 8)) / 2.0, ((0, 0), (0, 1)))
        other = W + rng.integers(-1, 2, W.shape) / 64
        # As much for each column: another normaliser, the same distribution.
        h[:, -1], other[:, -1] = 1, -800
    else:
        h, W, other = (np.zeros((m, 9)) for m in (n, v, v))
        h[:, 0] = float(kind.split()[-1]) * (1 + np.arange(n) / 64)
        W[:, 0], other[:, 0] = rng.choice([-1.0, 1.0], (2, v))
    numbers = {"hidden": h, "W": W, "teacher_hidden": h, "teacher_W": other}
    numbers["logits"] = h @ W.T
    return p | {k: np.float32(x) for k, x in numbers.items()}


LARGE = Setting(mask="none", bias=False, softcap=False, padded=False, columns=300)
# A probability of given columns underflows, whose ForwardKL is then infinite.
UNSCALED = [
    name for name in FUNCTIONS if not re.search("scaled|ForwardKL columns", name)
]  # fmt: skip
FIRST = "token_stats", "divergence ReverseKL teacher"


def check_results(name, setting, p):
    """Each result against float64, with twice the error of the materialised one."""
    results, near = (
        crossing.run(x, name, setting, (), p)[0] for x in (jaxmem, crossing.reference)
    )
    want = crossing.exact(name, setting, p, results)[0]
    for got, other, x in zip(*map(jax.tree.leaves, (results, near, want)), strict=True):
        crossing.assert_as_good(got, lambda x=other: x, x, STATS_EPSILON, name)


LARGE_CASES = [
    *(full(name, "scalar") for name in FIRST),
    *(slow(name, "scalar") for name in UNSCALED if name not in FIRST),
    *(slow(name, "token") for name in UNSCALED),
]  # fmt: skip


@pytest.mark.parametrize("name, temperature", LARGE_CASES)
def test_logits_of_hundreds_over_a_temperature(name, temperature):
    setting = dataclasses.replace(LARGE, temperature=temperature)
    with jax.default_matmul_precision("highest"):
        for kind in ("signs of 40", "signs of 900", "std 100"):
            p = large(kind)
            if temperature == "token":
                p["temperature"] = np.linspace(0.7, 3, len(p["hidden"]), dtype="f")
            check_results(name, setting, p)


@pytest.mark.gpu
@pytest.mark.parametrize("name, temperature", values_of(LARGE_CASES))
def test_logits_of_hundreds_on_a_gpu(name, temperature):
    test_logits_of_hundreds_over_a_temperature(name, temperature)


BF16 = Setting(
    ("bfloat16", "bfloat16"), tokens=(300,), chunk=128, depth=64, columns=5000
)


@pytest.mark.gpu
@pytest.mark.parametrize("gradient", [None, "frozen"])
@pytest.mark.parametrize("name", [x for x in FUNCTIONS if "divergence" in x])
def test_divergences_on_a_gpu(name, gradient):
    check(name, dataclasses.replace(BF16, gradient=gradient))
