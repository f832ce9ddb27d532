"""The mismatch report against numpy, over counts where a percentile is hard."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem.losses.mismatch import MismatchReport

report = jax.jit(jaxmem.mismatch_report)
SHAPE = (2, 150)


def expected(train, rollout):
    delta = np.asarray(train, np.float64) - np.asarray(rollout, np.float64)
    return MismatchReport(
        tokens=delta.size,
        mean=np.abs(delta).mean(),
        p95=np.percentile(np.abs(delta), 95),
        max=np.abs(delta).max(),
        outside_1_25=((np.exp(delta) > 1.25) | (np.exp(delta) < 1 / 1.25)).mean(),
        outside_2=((np.exp(delta) > 2) | (np.exp(delta) < 0.5)).mean(),
        k1=-delta.mean(),
        k3=(np.exp(delta) - 1 - delta).mean(),
        p50=np.percentile(np.abs(delta), 50),
        p99=np.percentile(np.abs(delta), 99),
        inside_strict=((np.exp(delta) >= 0.999) & (np.exp(delta) <= 1.002)).mean(),
        inside_1_01=((np.exp(delta) >= 0.99) & (np.exp(delta) <= 1.01)).mean(),
    )


@pytest.fixture(scope="module")
def logprobs():
    rng = np.random.default_rng(0)
    train = -rng.exponential(1, SHAPE).astype(np.float32)
    return train, (train + rng.normal(0, 0.4, SHAPE)).astype(np.float32)


# 21 and 101 tokens have a 95th percentile without interpolation.
@pytest.mark.parametrize("count", [1, 2, 20, 21, 22, 101, 102, 299, 300])
def test_report_of_the_tokens_that_count(count, logprobs):
    train, rollout = (x.copy() for x in logprobs)
    where = np.random.default_rng(count).permutation(np.arange(300) < count)
    where = where.reshape(SHAPE)
    train[~where], rollout[~where] = np.nan, np.inf
    got = report(train, rollout, where)
    for name, a, b in zip(
        got._fields, got, expected(train[where], rollout[where]), strict=True
    ):
        assert a.shape == ()
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-7, err_msg=name)


def test_mismatch_numbers_differ(logprobs):
    got = report(*logprobs)
    assert 0 < got.outside_2 < got.outside_1_25 < 1
    assert got.p50 < got.mean < got.p95 < got.p99 < got.max
    near = report(logprobs[0], logprobs[0] + (logprobs[1] - logprobs[0]) / 40)
    assert 0 < near.inside_strict < near.inside_1_01 < 1 - near.outside_1_25


@pytest.mark.parametrize(
    ("ratio", "strict", "wide"),
    [(1, 1, 1), (1.0019, 1, 1), (1.0021, 0, 1), (0.9991, 1, 1), (0.9989, 0, 1)]
    + [(1.0099, 0, 1), (1.0101, 0, 0), (0.9901, 0, 1), (0.9899, 0, 0)],
)
def test_retention_by_band(ratio, strict, wide):
    got = report(np.float32([np.log(ratio)]), np.zeros(1, np.float32))
    assert (got.inside_strict, got.inside_1_01) == (strict, wide)


def test_bands_are_symmetric_and_closed():
    delta = np.log([1.25, 1 / 1.25, 1.26, 1 / 1.26, 1.99, 1 / 1.99, 2.01, 1 / 2.01])
    got = report(delta.astype(np.float32) * np.float32(1 - 1e-6), np.zeros(8))
    assert (got.outside_1_25, got.outside_2) == (6 / 8, 2 / 8)


def test_types_where_promotion_is_strict(logprobs):
    train, rollout = logprobs
    with jax.numpy_dtype_promotion("strict"):
        made = jax.eval_shape(
            jaxmem.mismatch_report, train, rollout.astype(jnp.bfloat16)
        )
    assert {x.dtype for x in made[1:]} == {jnp.dtype(jnp.float32)}


def test_mismatch_of_equal_sampler_is_zero(logprobs):
    train, _ = logprobs
    got = report(train, train)
    assert got.tokens == 300 and got.inside_strict == got.inside_1_01 == 1
    assert not any(np.any(x) for x in got[1:-2])


@pytest.mark.parametrize("shape", [SHAPE, (0,), (3, 0)])
def test_mismatch_of_no_tokens_is_zero(shape):
    nan = np.full(shape, np.nan)
    assert not any(np.any(x) for x in report(nan, nan, np.zeros(shape, bool)))


def test_mismatch_shows_broken_token(logprobs):
    train, rollout = (x.copy() for x in logprobs)
    train[0, 3] = np.nan
    got = report(train, rollout)
    assert all(np.isnan(x) for x in (got.mean, got.p50, got.p95, got.max, got.k1))
    whole = report(*logprobs)
    assert got.outside_2 > whole.outside_2
    assert got.inside_1_01 <= whole.inside_1_01
    train[0, 3] = -1000.0
    got = report(train, rollout)
    assert all(np.isfinite(x) for x in got)
    got = report(np.full(3, -np.inf), np.float32([-1, -1, -1]))
    assert got.mean == got.p95 == got.max == np.inf


def test_errors():
    two = jnp.zeros(2)
    with pytest.raises(
        ValueError, match=r"^rollout_logp must have one entry per token"
    ):
        jaxmem.mismatch_report(two, jnp.zeros(3))
    with pytest.raises(TypeError, match="^where must be boolean, got float32"):
        jaxmem.mismatch_report(two, two, two)
    with pytest.raises(ValueError, match="^where must broadcast to the tokens"):
        jaxmem.mismatch_report(two, two, jnp.zeros(3, bool))
