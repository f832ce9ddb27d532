"""Divergences over given columns: digits of the rest, infinities, errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from tests.helpers import oracle
from tests.helpers.cases import full, slow
from tests.helpers.targets import KINDS, loss_of_columns, of_columns, topk_kl
from tests.helpers.tolerance import STATS_EPSILON, error

N, D, V, K, CHUNK = 37, 24, 130, 6, 16
BETA = 0.3


def named(way):
    return f"jsd {BETA}" if way == "jsd" else way


def make(std=1.0, seed=0):
    """hidden, W, and a teacher: K distinct ids a token and their ln q, 0.8 at most."""
    rng = np.random.default_rng(seed)
    h = rng.standard_normal((N, D), np.float32)
    W = rng.standard_normal((V, D), np.float32) * std / D**0.5
    ids = np.stack([rng.permutation(100)[:K] for _ in range(N)]).astype(np.int32)
    ln_q = np.log(0.8 * rng.dirichlet(np.ones(K + 1), N)[:, :K]).astype(np.float32)
    return h, W.astype(np.float32), ids, ln_q


def exact(way, tail, g, operands, **options):
    """The divergence in float64, and gradients of hidden, W and bias by hand."""
    h, W, ids, ln_q = operands
    logits = oracle.Logits.of(h, W, **{"vocab_size": V} | options)
    kind = KINDS[way].__name__
    values, pull = oracle.divergence_of_columns(
        kind, logits.z, ids, np.asarray(ln_q).astype(np.float64), tail, BETA
    )
    return values, logits.gradients(pull(g))


WAYS = ("forward_kl", "reverse_kl", "jsd")
# Each tail once; what a test says of other pairs is slow. Terms of a JSD have tests of
# their own, and a JSD of two heads.
PAIRS = [
    ("forward_kl", True), ("reverse_kl", False), full("jsd", True),
    slow("forward_kl", False), slow("reverse_kl", True), slow("jsd", False),
]  # fmt: skip

pytestmark = pytest.mark.usefixtures("quick_compilation", "on_one_device")


@functools.partial(jax.jit, static_argnames=("way", "tail"))
def ours(operands, g, bias, way, tail):
    """Value, and the gradients of hidden, W and bias, if any."""
    h, W, ids, ln_q = operands

    def call(h, W, bias):
        given = {"layout": "vd", "bias": bias}
        return of_columns(named(way))(h, W, ids, ln_q, CHUNK, tail, **given)

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
    got, _ = ours((h, W, ids, ln_q), cotangents(), None, way, True)
    want, _ = exact(way, False, cotangents(), (h, W, ids, ln_q.astype(np.float32)))
    assert error(got, want) < STATS_EPSILON


@pytest.mark.parametrize("way, tail", PAIRS)
def test_divergence_without_ids_is_zero(way, tail):
    h, W, ids, ln_q = make()
    h[:5], ids[:5], ln_q[3] = np.nan, -1, np.nan
    value, (dh, dW) = ours((h, W, ids, ln_q), cotangents(), None, way, tail)
    assert not value[:5].any() and not dh[:5].any() and value[5:].all()
    assert np.isfinite(dW).all()
    none = of_columns(named(way))(h, W, ids[:, :0], ln_q[:, :0], tail=tail)
    assert none.shape == (N,) and not none.any()


@pytest.mark.full
def test_rest_of_any_size_keeps_its_digits():
    """1 - Σ p has none left where the student's rest is 1e-12."""
    h, W, ids, ln_q = make()
    ids = np.tile(np.arange(K, dtype=np.int32), (N, 1))
    bias = np.where(np.arange(V) < K, 0, -30.0).astype(np.float32)
    for way in WAYS:
        value, (dh, _, dbias) = ours((h, W, ids, ln_q), cotangents(), bias, way, True)
        want, (need, _, _) = exact(
            way, True, cotangents(), (h, W, ids, ln_q), bias=bias
        )
        np.testing.assert_allclose(value, want, rtol=1e-5)
        np.testing.assert_allclose(dh, need, atol=1e-5)
    # The bias of the other columns changes the mass of the tail alone, whose gradient
    # is -q_rest; as a difference of two masses it would lose its digits.
    q_rest = 1 - np.exp(ln_q.astype(float)).sum(1)
    _, (_, _, dbias) = ours((h, W, ids, ln_q), np.ones(N), bias, "forward_kl", True)
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
        got, _ = ours((h, W, ids, ln_q), cotangents(), None, way, True)
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
        operands = h, W, two, said
        value, gradients = ours(operands, cotangents(), None, "reverse_kl", True)
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
    value, (dh, dW, _) = ours((h, W, ids, ln_q), cotangents(), bias, way, True)
    assert np.isinf(value[7]) == (way == "forward_kl")
    assert np.isfinite(value[others]).all() and np.isfinite(dh).all()
    assert np.isfinite(dW).all()
    bias = np.where(np.arange(V) < K, 0, -np.inf).astype(np.float32)
    ids = np.tile(np.arange(K, dtype=np.int32), (N, 1))
    got = ours((h, W, ids, ln_q), cotangents(), bias, way, True)
    want, need = exact(way, False, cotangents(), (h, W, ids, ln_q))
    np.testing.assert_allclose(got[0], want, rtol=1e-5)
    np.testing.assert_allclose(got[1][0], need[0], atol=1e-6)


def test_teacher_excluding_all_ids():
    h, W, ids, ln_q = make()
    ln_q[3] = -np.inf
    without, _ = ours((h, W, ids, ln_q), cotangents(), None, "forward_kl", False)
    np.testing.assert_array_equal(np.isnan(without), np.arange(N) == 3)
    value, _ = ours((h, W, ids, ln_q), cotangents(), None, "forward_kl", True)
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


# Losses of a divergence.

RNG = np.random.default_rng(5)
LABELS = RNG.integers(0, 100, N)
WEIGHT = RNG.uniform(0.5, 2, N).astype(np.float32)


def mixture(stats, divergence, weight):
    """A loss of a divergence, cross-entropy and entropy; its metrics."""
    loss = weight * divergence - 0.3 * stats.logprob + 0.1 * stats.entropy
    return loss, {"divergence": divergence, "entropy": stats.entropy}


def test_invalid_drawn_id_is_nan_where_used():
    h, W, ids, _ = make()
    ids[3, 0] = V  # known at run time only

    @jax.jit
    def run(h, ids, weight):
        def loss(h):
            return loss_of_columns(
                "forward_kl",
                lambda stats, d, w: jnp.where(w == 0, 0, w * d) - stats.logprob,
            )(h, W, LABELS, ids, None, weight, chunk=CHUNK)[0]

        return jax.value_and_grad(loss)(h)

    used = np.ones(N, np.float32)
    assert np.isnan(run(h, ids, used)[0])
    loss, dh = run(h, ids, np.where(np.arange(N) == 3, 0, used))
    assert np.isfinite(loss) and np.isfinite(dh).all()


@pytest.mark.parametrize("tail", [True, slow(False), slow(None)])
def test_loss_of_columns_without_ids(tail):
    h, W, ids, ln_q = make()
    none = ids[:, :0], None if tail is None else ln_q[:, :0]
    loss = loss_of_columns("forward_kl", mixture)

    @jax.jit
    def run(h, W):
        def of_weights(h, W):
            return loss(h, W, LABELS, *none, WEIGHT, tail=bool(tail), chunk=CHUNK)

        return jax.value_and_grad(of_weights, (0, 1), has_aux=True)(h, W)

    (total, metrics), gradients = run(h, W)
    ones = np.ones(N) / N
    of = {"logprob": -0.3 * ones, "entropy": 0.1 * ones}
    stats, of_stats = oracle.head(h, W, LABELS, of)
    np.testing.assert_allclose(total, sum((of[k] * stats[k]).sum() for k in of), 1e-6)
    for got, want in zip(gradients, of_stats, strict=False):
        np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())
    assert not metrics["divergence"].any()


@pytest.mark.full
def test_unused_divergence_is_harmless():
    h, W, ids, ln_q = make()
    ln_q[3, 0] = -np.inf  # excluded by the teacher, not by the student

    @jax.jit
    @jax.value_and_grad
    def loss(h, weight):
        def of(stats, divergence, weight):
            return jnp.where(weight > 0, weight * divergence, 0) - stats.logprob

        given = h, W, LABELS, ids, ln_q, weight
        return loss_of_columns("reverse_kl", of)(*given, chunk=CHUNK)[0]

    used = np.ones(N, np.float32)
    assert np.isinf(loss(h, used)[0])
    used[3] = 0
    value, dh = loss(h, used)
    assert np.isfinite(value) and np.isfinite(dh).all()


def test_report_of_a_loss():
    h, W, ids, ln_q = make()
    with jaxmem.report() as calls:
        loss = functools.partial(loss_of_columns("forward_kl", mixture), chunk=CHUNK)
        jax.eval_shape(lambda: loss(h, W, LABELS, ids, ln_q, WEIGHT))
    (call,) = calls.calls
    assert call.verb == "divergence_loss"
    assert call.shapes == {"hidden": (N, D), "W": (V, D), "ids": (N, K)}
    assert call.live_logits_bytes == 4 * CHUNK * V


@pytest.mark.parametrize("changes, kind, message", [
    ({"tail": 1}, TypeError, "Columns.tail must be"),
    ({"implementation": "hopper"}, NotImplementedError, "has no divergence_loss"),
    ({"ids": np.full((N, K), V)}, ValueError, f"ids must be below vocab_size={V}"),
    ({"logprobs": np.ones((N, K))}, ValueError, "which are not positive"),
    ({"logprobs": None, "name": "jsd"}, ValueError, "must be jaxmem.ForwardKL of"),
    ({"logprobs": None, "name": "reverse_kl"}, ValueError, "got ReverseKL"),
    ({"labels": LABELS[:5]}, ValueError, "labels must have"),
    ({"labels": None}, TypeError, "labels must be"),
    ({"normalizer": -1.0}, ValueError, "normalizer must"),
    ({"statistics_temperature": 0.0}, ValueError, "statistics_temperature must"),
    ({"loss_fn": 3}, TypeError, "loss_fn must be a function"),
])  # fmt: skip
def test_wrong_arguments_of_a_loss(changes, kind, message):
    names = "hidden", "W", "ids", "logprobs"
    given = dict(zip(names, make(), strict=True))
    given |= {"labels": LABELS, "chunk": CHUNK, "name": "forward_kl"}
    given |= {"loss_fn": lambda stats, d: d} | changes
    loss = loss_of_columns(given.pop("name"), given.pop("loss_fn"))
    with pytest.raises(kind, match=message):
        loss(**given)
