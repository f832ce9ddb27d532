"""The algebra: parts of a vocabulary merge in any order, and the derivative is one."""

import functools

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.head.maths import row_stats

hypothesis.settings.register_profile(
    "tests", deadline=None, max_examples=40, derandomize=True
)
hypothesis.settings.load_profile("tests")

pytestmark = pytest.mark.usefixtures("quick_compilation")

ROWS = 3
SUMS = ("sum_others", "sum_shifted", "sum_squares")
of_tile = jax.jit(lambda z, labels: row_stats.of_tile(z, labels)[0])
merge = jax.jit(row_stats.merge)
merge_tree = jax.jit(row_stats.merge_tree)
finish = jax.jit(row_stats.finish)

logits = st.floats(-200, 200, width=32, allow_subnormal=False) | st.just(-np.inf)


@st.composite
def tiles(draw, count):
    """`count` tiles of four columns, and labels somewhere in them."""
    z = draw(hnp.arrays(np.float32, (count, ROWS, 4), elements=logits))
    labels = draw(hnp.arrays(np.int32, ROWS, elements=st.integers(0, 4 * count - 1)))
    return [of_tile(part, labels - 4 * i) for i, part in enumerate(z)], z, labels


def assert_close(a, b, rtol=3e-5):
    """Assert equal bits of maxima and labels; sums may differ by their rounding."""
    np.testing.assert_array_equal(a.max, b.max)
    np.testing.assert_array_equal(a.label_logit, b.label_logit)
    for name in SUMS:
        np.testing.assert_allclose(
            getattr(a, name), getattr(b, name), rtol=rtol, atol=1e-30, err_msg=name
        )


@hypothesis.given(tiles(2))
def test_merge_is_commutative(drawn):
    (a, b), *_ = drawn
    assert_close(merge(a, b), merge(b, a), rtol=1e-6)


@hypothesis.given(tiles(3))
def test_merge_is_associative(drawn):
    (a, b, c), *_ = drawn
    assert_close(merge(merge(a, b), c), merge(a, merge(b, c)))


@hypothesis.given(tiles(8))
def test_merge_tree_equals_merges_of_pairs(drawn):
    """The tree merges pairs of neighbours first."""
    parts, _, _ = drawn
    stacked = row_stats.Stats(*(jnp.stack(x) for x in zip(*parts, strict=True)))
    while len(parts) > 1:
        parts = [merge(*parts[i : i + 2]) for i in range(0, len(parts), 2)]
    assert_close(merge_tree(stacked), parts[0], rtol=1e-6)


@hypothesis.given(tiles(1))
def test_empty_is_the_identity(drawn):
    (a,), *_ = drawn
    nothing = row_stats.empty((ROWS,), jnp.float32)
    for x, y in zip(merge(a, nothing), a, strict=True):
        np.testing.assert_array_equal(x, y)


def test_merging_nothing_with_nothing_is_nothing():
    nothing = row_stats.empty((ROWS,), jnp.float32)
    for x, y in zip(merge(nothing, nothing), nothing, strict=True):
        np.testing.assert_array_equal(x, y)


@hypothesis.given(tiles(3))
def test_parts_merge_to_the_whole(drawn):
    (a, b, c), z, labels = drawn
    whole = of_tile(np.concatenate(list(z), axis=1), labels)
    assert_close(merge(merge(a, b), c), whole)


@hypothesis.given(tiles(2))
def test_outputs_keep_their_bounds(drawn):
    (a, b), z, labels = drawn
    hypothesis.assume(np.isfinite(z).any(axis=(0, 2)).all())
    made = finish(merge(a, b), np.ones(ROWS, bool))
    assert (made.logprob <= 0).all()
    assert (made.entropy >= -1e-6).all() and (made.entropy <= np.log(8) + 1e-5).all()
    assert (made.sum_pi_squared <= 1 + 1e-5).all()
    assert (made.sum_pi_squared >= 1 / 8 - 1e-5).all()


FIELDS = row_stats.Cotangents._fields


@functools.partial(jax.jit, static_argnums=0)
def by_rule(fields, z, labels, g):
    made = row_stats.finish(row_stats.of_tile(z, labels)[0], labels >= 0)
    asked = row_stats.Cotangents(*(g[k] if k in fields else None for k in FIELDS))
    return row_stats.dlogits(z, labels, made, asked)


@jax.jit
@jax.grad
def by_autodiff(z, labels, g):
    ln_p = jax.nn.log_softmax(z)
    p, lse = jnp.exp(ln_p), jax.nn.logsumexp(z, axis=1)
    made = (ln_p[jnp.arange(5), labels], -jnp.sum(p * ln_p, 1), lse, jnp.sum(p * p, 1))
    return sum(jnp.sum(g[k] * x) for k, x in zip(FIELDS, made, strict=True))


@pytest.mark.parametrize("std", [0.0, 1.0, 20.0])
@pytest.mark.parametrize("asked", [*((x,) for x in FIELDS), FIELDS], ids="-".join)
def test_dlogits_is_the_derivative_of_the_outputs(asked, std):
    rng = np.random.default_rng(0)
    z = (rng.standard_normal((5, 40)) * std).astype(np.float32)
    labels = np.array([0, 39, 7, 7, 20], np.int32)
    g = {k: rng.standard_normal(5).astype(np.float32) for k in FIELDS}
    got = by_rule(asked, z, labels, g)
    want = by_autodiff(z, labels, {k: g[k] * (k in asked) for k in FIELDS})
    np.testing.assert_allclose(got, want, atol=2e-6, rtol=1e-5)


def test_confident_label_keeps_its_nats():
    """At a lead of 25 nats, 1 - p and logsumexp - z_y round to 0 in float32."""
    z = np.zeros((1, 8), np.float32)
    z[0, 3] = 25
    labels = np.array([3], np.int32)
    made = finish(of_tile(z, labels), np.ones(1, bool))
    want = -np.log1p(7 * np.exp(-25.0))
    np.testing.assert_allclose(made.logprob, [want], rtol=1e-6)
    np.testing.assert_allclose(
        made.entropy, [-want + 7 * np.exp(-25.0) * 25], rtol=1e-5
    )
    g = row_stats.Cotangents(np.ones(1, np.float32), None, None, None)
    dz = row_stats.dlogits(z, labels, made, g)
    np.testing.assert_allclose(dz[0, 3], -want, rtol=1e-6)


@pytest.mark.parametrize("offset", [0.0, 1e3, 3e4])
def test_entropy_does_not_cancel_under_an_offset(offset):
    shifts = np.array([0.0, -8.0, -9.0], np.float32)
    z = (np.float32(offset) + shifts)[None]
    exact = z.astype(np.float64) - z.max()
    p = np.exp(exact) / np.exp(exact).sum()
    made = finish(of_tile(z, np.zeros(1, np.int32)), np.ones(1, bool))
    np.testing.assert_allclose(made.entropy[0], -(p * np.log(p)).sum(), rtol=1e-4)


@pytest.mark.parametrize("columns", [1, 127, 128, 129, 151936])
def test_sums_of_many_columns_stay_exact(columns):
    """Adding 150k terms up in order would lose 1e-4."""
    z = np.random.default_rng(0).standard_normal((4, columns)).astype(np.float32) * 3
    made = finish(of_tile(z, np.zeros(4, np.int32)), np.ones(4, bool))
    want = np.log(np.exp(z.astype(np.float64)).sum(1))
    np.testing.assert_allclose(made.logsumexp, want, rtol=0, atol=2e-6)
