"""Divergences over given columns, with and without the rest, to float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers.cases import full, slow
from tests.helpers.targets import of_columns, topk_kl
from tests.helpers.tolerance import STATS_EPSILON, error
from tests.helpers.topk_divergence import (
    CHUNK,
    D,
    K,
    N,
    V,
    exact,
    make,
    named,
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


def cotangents():
    return np.random.default_rng(1).standard_normal(N).astype(np.float32)


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


def test_teacher_excluding_all_ids():
    h, W, ids, ln_q = make()
    ln_q[3] = -np.inf
    without, _ = ours((h, W, ids, ln_q), cotangents(), {}, "forward_kl", False)
    np.testing.assert_array_equal(np.isnan(without), np.arange(N) == 3)
    value, _ = ours((h, W, ids, ln_q), cotangents(), {}, "forward_kl", True)
    p = np.exp(log_softmax(h @ W.T))[3, ids[3]].astype(float).sum()
    np.testing.assert_allclose(value[3], -np.log1p(-p), rtol=1e-5)


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
