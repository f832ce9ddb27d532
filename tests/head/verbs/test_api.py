"""One suite for every backend: outputs and gradients against the float64 oracle.

Tolerance: the error against float64 is at most twice that of the materialised path in
the same type, plus an epsilon a type.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from tests.helpers import oracle
from tests.helpers.cases import CASES, Case, slow
from tests.helpers.rounding import assert_equal_up_to_order
from tests.helpers.token_stats import (
    FLOATS,
    OPTIONS,
    check,
    cotangents,
    outputs_and_gradients,
)
from tests.helpers.tolerance import error

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


@pytest.mark.parametrize("name", ["flat", "peaked", "a third masked"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.slow
def test_sixteen_bit_inputs(name, dtype, implementation):
    check(CASES[name].make(), implementation, dtype=dtype)


def options_and_layouts():
    """Every option at once, and each alone, in both layouts."""
    for names in ([*OPTIONS], *([name] for name in OPTIONS)):
        for layout in ("vd", "dv"):
            yield names, layout


@pytest.mark.parametrize("names, layout", list(options_and_layouts()), ids=str)
@pytest.mark.slow
def test_options_and_layouts(names, layout, implementation):
    options = {k: v for name in names for k, v in OPTIONS[name].items()}
    problem = Case(70, 33, 130, std=3.0).make()
    problem = problem._replace(y=problem.y % 100)
    check(problem, implementation, layout=layout, **options)


@pytest.mark.slow
def test_temperature_of_each_token(implementation):
    problem = CASES["a third masked"].make()
    temperature = np.linspace(0.3, 3, len(problem.y), dtype=np.float32)
    check(problem, implementation, temperature=temperature)


def test_sixteen_bit_inputs_with_every_option(implementation):
    problem = Case(70, 33, 130, std=3.0).make()
    check(
        problem._replace(y=problem.y % 100), implementation, dtype="bfloat16",
        layout="dv", softcap=5.0, temperature=0.7, vocab_size=100,
        bias=OPTIONS["bias"]["bias"],
    )  # fmt: skip


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


@pytest.mark.slow
def test_verbs_agree(implementation):
    h, W, y = CASES["ordinary"].make()
    stats = jaxmem.token_stats(h, W, y, implementation=implementation)
    run = {"implementation": implementation}
    lp = jaxmem.logprobs(h, W, y, **run)
    np.testing.assert_allclose(lp, stats.logprob, rtol=1e-6)
    np.testing.assert_allclose(jaxmem.entropy(h, W, **run), stats.entropy, rtol=1e-6)
    logits = jnp.matmul(h, W.T)
    from_logits = jaxmem.token_stats_from_logits(logits, y, **run)
    for a, b in zip(from_logits, stats, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
    lp = jaxmem.logprobs_from_logits(logits, y, **run)
    np.testing.assert_allclose(lp, from_logits.logprob, rtol=1e-6)


def test_is_argmax_counts_ties(implementation):
    h = np.ones((3, 1), np.float32)
    W = np.array([[1.0], [2.0], [2.0], [0.0]], np.float32)
    y = np.array([0, 1, 2], np.int32)
    stats = jaxmem.token_stats(
        h, jaxmem.Head(W, layout="vd"), y, implementation=implementation
    )
    assert stats.is_argmax.tolist() == [False, True, True]


@pytest.mark.slow
def test_any_leading_shape(implementation):
    h, W, y = Case(24, 16, 300).make()
    flat = jaxmem.logprobs(h, W, y, implementation=implementation)
    for shape in ((2, 3, 4), (24, 1), (1, 24)):
        got = jaxmem.logprobs(
            h.reshape(*shape, 16), W, y.reshape(shape), implementation=implementation
        )
        np.testing.assert_array_equal(got, flat.reshape(shape))
    scalar = jaxmem.logprobs(h[0], W, y[0], implementation=implementation)
    assert scalar.shape == ()
    np.testing.assert_allclose(scalar, flat[0], rtol=1e-6)


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_no_tokens(shape, implementation):
    W = np.ones((5, 4), np.float32)

    def total(h, W):
        y = jnp.zeros(shape, jnp.int32)
        stats = jaxmem.token_stats(h, W, y, implementation=implementation)
        assert all(field.shape == shape for field in stats)
        return sum(field.sum() for field in stats[:4])

    value, (dh, dW) = jax.value_and_grad(total, (0, 1))(jnp.zeros((*shape, 4)), W)
    assert value == 0 and dh.shape == (*shape, 4) and not dW.any()


@pytest.mark.slow
def test_masked_tokens_give_exactly_nothing(implementation):
    h, W, y = CASES["ordinary"].make()
    where = np.arange(len(y)) % 4 == 0
    h[~where] = np.nan

    def stats(h, W):
        return jaxmem.token_stats(
            h, W, y, 64, where=where, implementation=implementation
        )

    def total(h, W):
        return sum(jnp.sum(jnp.cos(field)) for field in stats(h, W)[:4])

    for field in stats(h, W):
        assert not field[~where].any() and np.isfinite(field[where]).all()
    dh, dW = jax.grad(total, (0, 1))(h, W)
    assert not dh[~where].any() and np.isfinite(dW).all() and dh[where].any()
    kept = jax.grad(lambda W: total_of(h[where], W, y[where], implementation))(W)
    np.testing.assert_allclose(dW, kept, atol=1e-5)


def total_of(h, W, y, implementation):
    stats = jaxmem.token_stats(h, W, y, 64, implementation=implementation)
    return sum(jnp.sum(jnp.cos(field)) for field in stats[:4])


def test_all_tokens_masked_is_zero(implementation):
    h, W, y = CASES["ordinary"].make()

    def loss(h, W):
        lp = jaxmem.logprobs(
            h, W, y, where=np.zeros(len(y), bool), implementation=implementation
        )
        return lp.sum()

    value, gradients = jax.value_and_grad(loss, (0, 1))(h, W)
    assert value == 0 and not any(g.any() for g in gradients)


@pytest.mark.slow
def test_invalid_label_is_nan_alone(implementation):
    h, W, y = CASES["ordinary"].make()
    y = y.copy()
    y[7] = len(W)

    @jax.jit
    def run(h, y):
        return jaxmem.token_stats(h, W, y, 64, implementation=implementation)

    stats = run(h, y)
    assert np.isnan(stats.logprob[7]) and not stats.is_argmax[7]
    assert np.isfinite(np.delete(stats.logprob, 7)).all()
    assert all(np.isfinite(field).all() for field in stats[1:])
    dh = jax.grad(lambda h: run(h, y).logprob.sum())(h)
    assert np.isnan(dh[7]).all() and np.isfinite(np.delete(dh, 7, 0)).all()
    unused = jax.grad(lambda h: run(h, y).logprob[:7].sum())(h)
    assert np.isfinite(unused).all()
    assert np.isfinite(jax.grad(lambda h: run(h, y).entropy.sum())(h)).all()


def test_nan_row_stays_alone(implementation):
    h, W, y = CASES["ordinary"].make()
    h[5] = np.nan
    stats = jaxmem.token_stats(h, W, y, 64, implementation=implementation)
    assert np.isnan(stats.logprob[5])
    assert np.isfinite(np.delete(stats.logprob, 5)).all()


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


@pytest.mark.slow
def test_vocabulary_padding_changes_rounding_only(implementation):
    """The product with a larger W may sum in another order."""
    h, W, y = CASES["ordinary"].make()
    padded = np.concatenate([W, np.full((123, W.shape[1]), 9.0, np.float32)])
    want = jaxmem.token_stats(h, W, y, 64, implementation=implementation)
    got = jaxmem.token_stats(
        h, jaxmem.Head(padded, vocab_size=len(W)), y, 64, implementation=implementation
    )
    assert_equal_up_to_order(got, want, h, W)
    dW = jax.grad(lambda W: total_of_padded(h, W, y, 517, implementation))(padded)
    assert not dW[len(W) :].any() and dW[: len(W)].any()


def total_of_padded(h, W, y, vocab_size, implementation):
    stats = jaxmem.token_stats(
        h, jaxmem.Head(W, vocab_size=vocab_size), y, 64, implementation=implementation
    )
    return sum(jnp.sum(jnp.cos(field)) for field in stats[:4])


@pytest.mark.slow
def test_float64_stays_float64(implementation):
    with jax.enable_x64(True):
        h, W, y = (x.astype(np.float64) if x.dtype == np.float32 else x
                   for x in CASES["ordinary"].make())  # fmt: skip
        g = {k: v.astype(np.float64) for k, v in cotangents(len(y)).items()}

        def ours(h, W):
            stats = jaxmem.token_stats(h, W, y, 64, implementation=implementation)
            return stats._asdict()

        made, gradients = outputs_and_gradients(ours, g, jnp.asarray(h), jnp.asarray(W))
        exact, exact_gradients = oracle.head(h, W, y, g)
        for name in FLOATS:
            assert made[name].dtype == jnp.float64
            assert error(made[name], exact[name]) < 1e-13
        for got, want in zip(gradients, exact_gradients, strict=False):
            assert error(got, want) < 1e-13


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
