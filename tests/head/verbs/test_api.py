"""One suite for every backend: outputs and gradients against the float64 oracle.

Tolerance: the error against float64 is at most twice that of the materialised path in
the same type, plus an epsilon a type.
"""

import jax
import numpy as np
import pytest

import jaxmem
from tests.helpers import oracle
from tests.helpers.cases import CASES, slow
from tests.helpers.token_stats import (
    check,
    cotangents,
    outputs_and_gradients,
)

pytestmark = pytest.mark.usefixtures("quick_compilation", "on_one_device")


@pytest.fixture(params=["xla"])
def implementation(request):
    return request.param


# The quick one has no option; a test below has all of them, in 16 bits.
@pytest.mark.parametrize(
    "name", [x if x == "all logits about -120" else slow(x) for x in CASES]
)
def test_outputs_and_gradients(name, implementation):
    case = CASES[name]
    check(case.make(), implementation, case.chunk)


@pytest.mark.parametrize(
    "asked", [slow("logprob"), "entropy", slow("logsumexp"), slow("sum_pi_squared")]
)
def test_gradient_of_each_output_alone(asked, implementation):
    problem = CASES["ordinary"].make()
    g = {asked: cotangents(len(problem.y))[asked]}

    def ours(h, W):
        stats = jaxmem.token_stats(h, W, problem.y, 64, implementation=implementation)
        return stats._asdict()

    _, got = outputs_and_gradients(ours, g, problem.h, problem.W)
    _, want = oracle.head(*problem, g)
    for have, need in zip(got, want, strict=False):
        np.testing.assert_allclose(have, need, atol=3e-6 * np.abs(need).max())


def test_is_argmax_counts_ties(implementation):
    h = np.ones((3, 1), np.float32)
    W = np.array([[1.0], [2.0], [2.0], [0.0]], np.float32)
    y = np.array([0, 1, 2], np.int32)
    stats = jaxmem.token_stats(
        h, jaxmem.Head(W, layout="vd"), y, implementation=implementation
    )
    assert stats.is_argmax.tolist() == [False, True, True]


@pytest.mark.slow
def test_tokens_that_the_bias_rules_out(implementation):
    h, W, y = CASES["ordinary"].make()
    bias = np.where(np.arange(len(W)) % 2, -np.inf, 0).astype(np.float32)
    kept = jaxmem.token_stats(h, W[::2], y // 2, 64, implementation=implementation)
    ruled = jaxmem.token_stats(
        h, jaxmem.Head(W, bias=bias), y // 2 * 2, 64, implementation=implementation
    )
    for a, b in zip(ruled, kept, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
    dh = jax.grad(
        lambda h: jaxmem.token_stats(
            h, jaxmem.Head(W, bias=bias), y // 2 * 2, 64, implementation=implementation
        ).entropy.sum()
    )(h)
    assert np.isfinite(dh).all()


def test_x64_mode_leaves_float32_alone(implementation):
    h, W, y = CASES["ordinary"].make()
    want = jaxmem.token_stats(h, W, y, 64, implementation=implementation)
    with jax.enable_x64(True):
        got = jaxmem.token_stats(
            h, W, y.astype(np.int64), 64, temperature=np.float64(1.0),
            implementation=implementation,
        )  # fmt: skip
        for a, b in zip(got, want, strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)


def test_more_logits_than_an_int32_can_count(implementation):
    """N · V = 2³³: only the last rows are active, so that it takes no time."""
    n, v = 2**17, 2**16 + 1
    rng = np.random.default_rng(0)
    h = rng.standard_normal((n, 1), np.float32)
    W = rng.standard_normal((v, 1), np.float32)
    y = np.full(n, -1, np.int32)
    y[-5:] = v - 1
    got = jaxmem.logprobs(h, W, y, 8, implementation=implementation)
    z = h[-5:].astype(np.float64) @ W.T.astype(np.float64)
    want = z[:, -1] - np.log(np.exp(z).sum(1))
    np.testing.assert_allclose(got[-5:], want, rtol=1e-6)
    assert not got[:-5].any()
