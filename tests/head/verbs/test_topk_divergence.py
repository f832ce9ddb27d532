"""Divergences over given columns, with and without the rest, to float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers.cases import full, slow
from tests.helpers.divergence import exact as of_heads
from tests.helpers.selected import scaled
from tests.helpers.targets import of_columns, topk_kl
from tests.helpers.tolerance import EPSILON, STATS_EPSILON, assert_as_good, error
from tests.helpers.topk_divergence import (
    CHUNK,
    D,
    K,
    N,
    V,
    exact,
    make,
    named,
    textbook,
)

WAYS = ("forward_kl", "reverse_kl", "jsd")
# Each tail once; what a test says of other pairs is slow. Terms of a JSD have tests of
# their own, and a JSD of two heads.
PAIRS = [
    ("forward_kl", True), ("reverse_kl", False), full("jsd", True),
    slow("forward_kl", False), slow("reverse_kl", True), slow("jsd", False),
]  # fmt: skip
# For tests of the sums that all directions share, with a tail or without.
ONE_PAIR = [PAIRS[0], slow(*PAIRS[1]), *PAIRS[2:]]

pytestmark = pytest.mark.usefixtures("quick_compilation", "on_one_device")


@functools.partial(
    jax.jit, static_argnames=("way", "tail", "layout", "options", "chunk")
)
def ours(operands, g, arrays, way, tail, layout="vd", options=(), chunk=CHUNK):
    """Value, and the gradients of hidden, W and bias, if any."""
    h, W, ids, ln_q = operands

    def call(h, W, bias):
        W = W if layout == "vd" else W.T
        given = arrays | bias | {"layout": layout} | dict(options)
        return of_columns(named(way))(h, W, ids, ln_q, chunk, tail, **given)

    bias = {k: v for k, v in arrays.items() if k == "bias"}
    value, pull = jax.vjp(call, h, W, bias)
    return value, jax.tree.leaves(pull(g))


@functools.partial(jax.jit, static_argnames=("way", "tail", "options"))
def materialised(operands, g, arrays, way, tail, options=()):
    """The divergence from float32 logits [N, V], and 1 - Σ p of the rest."""
    h, W, ids, ln_q = operands

    def call(h, W, bias):
        z = jnp.matmul(h, W.T, preferred_element_type=jnp.float32)
        z = scaled(jnp, z, **(arrays | bias | dict(options)))
        p = jnp.take_along_axis(jax.nn.softmax(z), jnp.maximum(ids, 0), 1)
        p, q = (jnp.where(ids >= 0, x, 0) for x in (p, jnp.exp(ln_q)))
        if tail:
            p, q = (
                jnp.concatenate([x, 1 - x.sum(1, keepdims=True)], 1) for x in (p, q)
            )
        p, q = (x / x.sum(1, keepdims=True) for x in (p, q))
        return textbook(jnp, way, p, q)

    bias = {k: v for k, v in arrays.items() if k == "bias"}
    value, pull = jax.vjp(call, h, W, bias)
    return value, jax.tree.leaves(pull(g))


def cotangents():
    return np.random.default_rng(1).standard_normal(N).astype(np.float32)


def check(way, tail, operands, dtype="float32", layout="vd", **options):
    """Value and gradients against float64, no worse than the materialised path's."""
    h, W, ids, ln_q = operands
    operands = [jnp.asarray(h).astype(dtype), jnp.asarray(W).astype(dtype), ids, ln_q]
    g = cotangents()
    arrays = {k: v for k, v in options.items() if isinstance(v, np.ndarray)}
    numbers = tuple((k, v) for k, v in options.items() if k not in arrays)
    made, gradients = ours(operands, g, arrays, way, tail, layout, numbers)
    rough, rough_gradients = materialised(operands, g, arrays, way, tail, numbers)
    want, exact_gradients = exact(way, tail, g, operands, **options)
    assert made.dtype == jnp.float32 and made.shape == want.shape
    assert (np.asarray(made) >= 0).all()
    assert_as_good(made, rough, want, STATS_EPSILON, way)
    for name, got, near, need in zip(
        ("dhidden", "dW", "dbias"), gradients, rough_gradients, exact_gradients,
        strict=False,
    ):  # fmt: skip
        assert_as_good(got, near, need, EPSILON[got.dtype.name], name)


@pytest.mark.parametrize("std", [0.0, 1.0, 6.0], ids=["flat", "ordinary", "peaked"])
@pytest.mark.parametrize("way, tail", PAIRS)
def test_values_and_gradients(way, tail, std):
    check(way, tail, make(std))


OPTIONS = {
    "softcap": 5.0,
    "temperature": np.linspace(0.3, 3, N, dtype=np.float32),
    "bias": np.linspace(-2, 2, V, dtype=np.float32),
    "vocab_size": 100,
}


@pytest.mark.parametrize(
    "way,tail,dtype,layout",
    [("forward_kl", True, "float32", "dv"), ("reverse_kl", False, "float32", "vd"),
     ("jsd", True, "bfloat16", "vd")],
)  # fmt: skip
@pytest.mark.slow
def test_topk_divergence_with_every_option(way, tail, dtype, layout):
    check(way, tail, make(3.0), dtype, layout, **OPTIONS)


@pytest.mark.parametrize("way, tail", PAIRS)
def test_ids_that_are_absent(way, tail):
    """The teacher's log-probabilities of absent ids are not read."""
    h, W, ids, ln_q = make()
    ids[:, 1], ids[5:9, 3:], ids[:, 4] = -1, -100, -1
    ln_q[:, 1], ln_q[:, 4] = np.nan, 7.0
    check(way, tail, (h, W, ids, np.where(ids < 0, 0, ln_q)))
    got, _ = ours((h, W, ids, ln_q), cotangents(), {}, way, tail)
    want, _ = ours((h, W, ids, np.where(ids < 0, 0, ln_q)), cotangents(), {}, way, tail)
    np.testing.assert_array_equal(got, want)


@pytest.mark.full
@pytest.mark.parametrize("tail", [True, False])
def test_repeated_id_counts_at_first_occurrence(tail):
    h, W, ids, ln_q = make()
    half = K // 2
    repeated = np.concatenate([ids[:, :half], ids[:, half - 1 :: -1]], 1)
    said = np.concatenate([ln_q[:, :half], ln_q[:, half:] + 1.0], 1)
    ids[:, half:] = -1
    want, gradients = ours((h, W, ids, ln_q), cotangents(), {}, "reverse_kl", tail)
    got, again = ours((h, W, repeated, said), cotangents(), {}, "reverse_kl", tail)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    for a, b in zip(again, gradients, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("way, tail", ONE_PAIR)
def test_all_columns_equal_divergence_of_heads(way, tail):
    (h, W, _, _), (teacher, _, _, _) = make(3.0), make(seed=4)
    rng = np.random.default_rng(2)
    ids = np.stack([rng.permutation(V) for _ in range(N)]).astype(np.int32)
    ln_q = np.take_along_axis(log_softmax(teacher @ W.T), ids, 1)
    got, gradients = ours((h, W, ids, ln_q), cotangents(), {}, way, tail)
    want, need = of_heads(named(way), cotangents(), (h, W, teacher, W))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    for a, b in zip(gradients, need, strict=False):
        np.testing.assert_allclose(a, b, atol=2e-5)


def log_softmax(z):
    return z - np.log(np.exp(z).sum(1, keepdims=True))


@pytest.mark.full
@pytest.mark.parametrize("way", ["forward_kl", "reverse_kl", "jsd"])
def test_all_columns_of_teacher_in_16_bits(way):
    """Its probabilities add up to less than 1, or more, and there is no rest."""
    h, W, _, _ = make()
    ids = np.tile(np.arange(V, dtype=np.int32), (N, 1))
    ln_q = jnp.asarray(log_softmax(make(2.0, 3)[0] @ W.T), jnp.bfloat16)
    got, _ = ours((h, W, ids, ln_q), cotangents(), {}, way, True)
    want, _ = exact(way, False, cotangents(), (h, W, ids, ln_q.astype(np.float32)))
    assert error(got, want) < STATS_EPSILON


@pytest.mark.parametrize("way, tail", PAIRS)
def test_divergence_without_ids_is_zero(way, tail):
    h, W, ids, ln_q = make()
    h[:5], ids[:5], ln_q[3] = np.nan, -1, np.nan
    value, (dh, dW) = ours((h, W, ids, ln_q), cotangents(), {}, way, tail)
    assert not value[:5].any() and not dh[:5].any() and value[5:].all()
    assert np.isfinite(dW).all()
    none = of_columns(named(way))(h, W, ids[:, :0], ln_q[:, :0], tail=tail)
    assert none.shape == (N,) and not none.any()


@pytest.mark.parametrize("way, tail", ONE_PAIR)
def test_masked_tokens_give_exactly_nothing(way, tail):
    h, W, ids, ln_q = make()
    where = np.arange(N) % 4 == 0
    h[~where], ln_q[~where] = np.nan, np.nan
    ids[1] = V + 7  # nobody looks
    bias = np.full(V, 200.0, np.float32)  # e^200, were a row of zeros not left out
    g, operands = cotangents(), (h, W, ids, ln_q)
    arrays = with_bias(bias, where)
    value, (dh, dW, dbias) = ours(operands, g, arrays, way, tail)
    assert not value[~where].any() and value[where].all()
    assert not dh[~where].any() and dh[where].any(1).all()
    kept = h[where], W, ids[where], ln_q[where]
    _, need = exact(way, tail, g[where], kept)
    np.testing.assert_allclose(dW, need[1], atol=1e-5)
    np.testing.assert_allclose(dbias, need[2], atol=1e-5)


def with_bias(bias, where=None):
    """A mask too, so that all tests with a bias share their compiled functions."""
    return {"bias": bias, "where": np.ones(N, bool) if where is None else where}


@pytest.mark.full
def test_rest_of_any_size_keeps_its_digits():
    """1 - Σ p has none left where the student's rest is 1e-12."""
    h, W, ids, ln_q = make()
    ids = np.tile(np.arange(K, dtype=np.int32), (N, 1))
    bias = np.where(np.arange(V) < K, 0, -30.0).astype(np.float32)
    arrays = with_bias(bias)
    for way in WAYS:
        value, (dh, _, dbias) = ours((h, W, ids, ln_q), cotangents(), arrays, way, True)
        want, (need, _, _) = exact(
            way, True, cotangents(), (h, W, ids, ln_q), bias=bias
        )
        np.testing.assert_allclose(value, want, rtol=1e-5)
        np.testing.assert_allclose(dh, need, atol=1e-5)
    # By the log of the rest alone: -q_rest, not what its cancellation leaves of it.
    q_rest = 1 - np.exp(ln_q.astype(float)).sum(1)
    _, (_, _, dbias) = ours((h, W, ids, ln_q), np.ones(N), arrays, "forward_kl", True)
    np.testing.assert_allclose(dbias[K:].sum(), -q_rest.sum(), rtol=1e-5)


def test_confident_heads_keep_their_digits():
    """KL of 1e-9, of which 1 - p leaves nothing."""
    label = np.arange(N) % D
    h, W = np.eye(D, dtype=np.float32)[label], np.zeros((V, D), np.float32)
    np.fill_diagonal(W, 25.0)
    ids = np.where(np.arange(K) == 0, label[:, None], -1).astype(np.int32)
    rest = (V - 1) * np.exp(-25.0)
    ln_q = np.full((N, K), np.log1p(-2 * rest), np.float32)
    p = rest / (1 + rest)
    for way, (a, b) in {
        "forward_kl": (2 * rest, p),
        "reverse_kl": (p, 2 * rest),
    }.items():
        want = a * np.log(a / b) + (1 - a) * (np.log1p(-a) - np.log1p(-b))
        got, _ = ours((h, W, ids, ln_q), cotangents(), {}, way, True)
        np.testing.assert_allclose(got, want, rtol=1e-4)


def test_rounded_rest_of_teacher_is_not_zero():
    """Reverse KL would be infinite, and a teacher of 16 bits more than certain."""
    h, W, ids, _ = make()
    epsilon = np.finfo(np.float32).eps
    for ln_q, rest in (
        (np.log([0.5, 0.5]), 0.5 * epsilon),
        (np.log([0.75, 0.5]), 0.25 * epsilon),  # 1.25 in all
        ([0.0, -np.inf], epsilon**2),
        ([0.05, -np.inf], epsilon**2),
    ):
        said = np.tile(np.float32(np.resize(ln_q, K)), (N, 1))
        two = np.where(np.arange(K) < 2, ids, -1)
        value, gradients = ours((h, W, two, said), cotangents(), {}, "reverse_kl", True)
        p = np.take_along_axis(np.exp(log_softmax(h @ W.T)), ids[:, :2], 1)
        p = p.astype(float)
        p = np.concatenate([p, 1 - p.sum(1, keepdims=True)], 1)
        q = np.append(np.exp(np.float64(ln_q)), rest)
        with np.errstate(divide="ignore"):
            want = (p * (np.log(p) - np.log(q / q.sum()))).sum(1)
        np.testing.assert_allclose(value, want, rtol=1e-4)
        excluded = np.isinf(np.float32(ln_q)).any()
        assert np.isinf(value).all() == excluded
        assert excluded or all(np.isfinite(x).all() for x in gradients)


@pytest.mark.parametrize("way", ["forward_kl", full("reverse_kl"), full("jsd")])
def test_columns_that_a_bias_rules_out(way):
    """A given column, which only forward KL forbids; or all of the others."""
    h, W, ids, ln_q = make()
    bias = np.zeros(V, np.float32)
    bias[ids[7, 2]] = -np.inf
    others = ~(ids == ids[7, 2]).any(1)
    value, (dh, dW, _) = ours(
        (h, W, ids, ln_q), cotangents(), with_bias(bias), way, True
    )
    assert np.isinf(value[7]) == (way == "forward_kl")
    assert np.isfinite(value[others]).all() and np.isfinite(dh).all()
    assert np.isfinite(dW).all()
    bias = np.where(np.arange(V) < K, 0, -np.inf).astype(np.float32)
    ids = np.tile(np.arange(K, dtype=np.int32), (N, 1))
    got = ours((h, W, ids, ln_q), cotangents(), with_bias(bias), way, True)
    want, need = exact(way, False, cotangents(), (h, W, ids, ln_q))
    np.testing.assert_allclose(got[0], want, rtol=1e-5)
    np.testing.assert_allclose(got[1][0], need[0], atol=1e-6)


@pytest.mark.parametrize("tail", [True, slow(False)])
def test_invalid_id_is_nan_in_its_token(tail):
    """Padding of the vocabulary does not, either."""
    (h, W, ids, ln_q), size = make(), (("vocab_size", 100),)
    ids[[7, 9, 11], 3] = 100, V, 2**31 - 1
    g, bad = cotangents(), np.isin(np.arange(N), [7, 9, 11])
    value, (dh, _) = ours((h, W, ids, ln_q), g, {}, "forward_kl", tail, options=size)
    np.testing.assert_array_equal(np.isnan(value), bad)
    np.testing.assert_array_equal(np.isnan(dh).any(1), bad)
    g[bad] = 0
    _, unused = ours((h, W, ids, ln_q), g, {}, "forward_kl", tail, options=size)
    assert all(np.isfinite(x).all() for x in unused)


def test_teacher_excluding_all_ids():
    h, W, ids, ln_q = make()
    ln_q[3] = -np.inf
    without, _ = ours((h, W, ids, ln_q), cotangents(), {}, "forward_kl", False)
    np.testing.assert_array_equal(np.isnan(without), np.arange(N) == 3)
    value, _ = ours((h, W, ids, ln_q), cotangents(), {}, "forward_kl", True)
    p = np.exp(log_softmax(h @ W.T))[3, ids[3]].astype(float).sum()
    np.testing.assert_allclose(value[3], -np.log1p(-p), rtol=1e-5)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.slow
def test_float64_stays_float64(way):
    with jax.enable_x64(True):
        h, W, ids, ln_q = make()
        operands = *(x.astype(np.float64) for x in (h, W)), ids.astype(np.int64), ln_q
        want, need = exact(way, True, cotangents(), operands)
        value, gradients = ours(operands, cotangents().astype(float), {}, way, True)
        assert value.dtype == jnp.float64
        for got, exact_one in zip((value, *gradients), (want, *need), strict=False):
            assert error(got, exact_one) < 1e-13


H, W_, IDS, Q = make()
GOOD = {"hidden": H, "W": W_, "ids": IDS, "logprobs": Q}
POSITIVE = np.where(np.arange(K) == 2, 1.5, Q)
ERRORS = [
    ({"ids": H}, TypeError,
     "ids must be integers, got float32; convert them with ids.astype('int32')"),
    ({"ids": IDS + 100}, ValueError,
     f"ids must be below vocab_size=130, got {IDS.max() + 100}; mark absent entries "
     "with a negative id, or exclude the token with where="),
    ({"logprobs": IDS}, TypeError,
     "Columns.logprobs must be floating point (float32, bfloat16, float16), got int32"),
    ({"logprobs": Q[:, :3]}, ValueError,
     "Columns.logprobs must have one entry for each of ids, shape (37, 6), got "
     "(37, 3)"),
    ({"logprobs": POSITIVE}, ValueError,
     "Columns.logprobs must be log-probabilities, which are not positive, got 1.5"),
    ({"logprobs": np.where(IDS == IDS[0, 0], np.nan, Q)}, ValueError,
     "Columns.logprobs must be log-probabilities, which are not positive, got nan"),
    ({"tail": None}, TypeError, "Columns.tail must be True or False, got None"),
    ({"where": np.ones(3, bool)}, ValueError,
     "where must broadcast to the tokens' shape (37,), got shape (3,)"),
    ({"implementation": "hopper"}, NotImplementedError,
     "implementation='hopper' has no divergence: its kernels reduce one head's logits "
     "to the statistics of token_stats and keep no row of them; pass "
     "implementation=None"),
]  # fmt: skip


@pytest.mark.parametrize("changes,kind,message", ERRORS, ids=lambda x: str(x)[:30])
def test_errors(changes, kind, message):
    with pytest.raises(kind) as caught:
        topk_kl(**(GOOD | changes))
    assert str(caught.value) == message


def test_masked_columns_are_not_checked():
    where = np.arange(N) > 3
    ids, q = IDS.copy(), Q.copy()
    q[:4], q[5, 1], ids[5, 1] = 2.0, np.nan, -1
    assert jax.eval_shape(lambda: topk_kl(H, W_, ids, q, where=where)).shape == (N,)


def test_teacher_constant_other_derivatives_refused():
    def run(h, t, q):
        return topk_kl(h, W_, IDS, q, CHUNK, temperature=t).sum()

    with pytest.raises(NotImplementedError, match="temperature is not differentiable"):
        jax.grad(run, 1)(H, 2.0, Q)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        jax.grad(lambda h: jax.grad(run)(h, 1.0, Q).sum())(H)
    with pytest.raises(TypeError, match="use reverse mode"):
        jax.jvp(lambda h: run(h, 1.0, Q), (H,), (H,))
    assert not jax.jit(jax.grad(run, 2))(H, 2.0, Q).any()
