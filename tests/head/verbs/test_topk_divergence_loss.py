"""A loss of given columns: float64, its parts, its shards, its cost, its errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxmem
from tests.helpers import oracle
from tests.helpers.cases import slow
from tests.helpers.programs import compiled, count_gemms
from tests.helpers.targets import loss_of_columns, topk_kl
from tests.helpers.tolerance import STATS_EPSILON, error
from tests.helpers.topk_divergence import CHUNK, D, K, N, V, exact, make, named

pytestmark = pytest.mark.usefixtures("quick_compilation", "on_one_device")

RNG = np.random.default_rng(5)
LABELS = RNG.integers(0, 100, N)
WEIGHT = RNG.uniform(0.5, 2, N).astype(np.float32)


def mixture(stats, divergence, weight):
    """A loss of a divergence, cross-entropy and entropy; its metrics."""
    loss = weight * divergence - 0.3 * stats.logprob + 0.1 * stats.entropy
    return loss, {"divergence": divergence, "entropy": stats.entropy}


def loss_of(operands, way="forward_kl", tail=True, **options):
    """The loss and its metrics."""
    h, W, ids, ln_q = operands
    loss = loss_of_columns(named(way), mixture)
    return loss(h, W, LABELS, ids, ln_q, WEIGHT, tail=tail, chunk=CHUNK, **options)


@functools.partial(jax.jit, static_argnames=("way", "tail", "numbers", "frozen"))
def run(operands, arrays, way, tail, numbers=(), frozen=False):
    h, W, *others = operands

    def loss(h, W):
        W = jax.lax.stop_gradient(W) if frozen else W
        return loss_of((h, W, *others), way, tail, **arrays, **dict(numbers))

    return jax.value_and_grad(loss, (0, 1), has_aux=True)(h, W)


def with_gradients(operands, way="forward_kl", tail=True, frozen=False, **options):
    """((loss, metrics), gradients of hidden and W)."""
    arrays = {k: v for k, v in options.items() if isinstance(v, np.ndarray)}
    numbers = tuple((k, v) for k, v in options.items() if k not in arrays)
    return run(operands, arrays, way, tail, numbers, frozen)


def wanted(way, tail, operands, where=None, normalizer=None, **options):
    """The loss, the divergence and gradients in float64; of drawn ids without ln q."""
    h, W, ids, ln_q = operands
    n, own = len(h), dict(options)
    on = np.ones(n, bool) if where is None else where
    h, share = np.where(on[:, None], h, 0), on / (normalizer or on.sum())
    warmth = own.pop("statistics_temperature", own.get("temperature", 1.0))
    given = h, W, ids, np.full(ids.shape, -np.log(K)) if ln_q is None else ln_q
    g = WEIGHT[:n] * share
    divergence, of_divergence = exact(way, tail, g, given, **own)
    divergence = np.where(on, divergence + (np.log(K) if ln_q is None else 0), 0)
    g_stats = {"logprob": -0.3 * share, "entropy": 0.1 * share}
    own["temperature"] = warmth
    stats, of_stats = oracle.head(h, W, LABELS[:n], g_stats, on=on, **own)
    each = WEIGHT[:n] * divergence - 0.3 * stats["logprob"] + 0.1 * stats["entropy"]
    gradients = [a + b for a, b in zip(of_divergence[:2], of_stats, strict=False)]
    return (each * share).sum(), divergence, gradients


def assert_is(made, want):
    """((loss, metrics), gradients) are those of `wanted`."""
    ((loss, metrics), gradients), (exact_loss, divergence, need) = made, want
    np.testing.assert_allclose(loss, exact_loss, rtol=1e-5)
    assert error(metrics["divergence"], divergence) < STATS_EPSILON
    for got, exact_one in zip(gradients, need, strict=True):
        assert error(got, exact_one) < STATS_EPSILON


def assert_near(gradients, expected, tolerance):
    """Up to a part of the largest entry of each."""
    for got, want in zip(gradients, expected, strict=True):
        got, want = (np.asarray(x, np.float32) for x in (got, want))
        assert np.abs(got - want).max() <= tolerance * np.abs(want).max()


def test_divergence_from_drawn_ids_is_cross_entropy():
    h, W, ids, _ = make(3.0)
    ids[::3, 2:], ids[::5] = -1, -1

    def ours(h, W):
        return topk_kl(h, W, ids, None, CHUNK)

    def parts(h, W):
        log_p = jaxmem.selected_logprobs(h, W, ids, CHUNK)
        return -log_p.sum(1) / np.maximum((ids >= 0).sum(1), 1)

    @jax.jit
    def both(h, W):
        pairs = (jax.vjp(f, h, W) for f in (ours, parts))
        return [(made, pull(WEIGHT)) for made, pull in pairs]

    (made, gradients), (want, of_parts) = both(h, W)
    np.testing.assert_allclose(made, want, rtol=1e-6)
    assert_near(gradients, of_parts, 1e-6)


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
    tail = bool(tail)
    (loss, metrics), gradients = with_gradients((h, W, *none), "forward_kl", tail)
    ones = np.ones(N) / N
    of = {"logprob": -0.3 * ones, "entropy": 0.1 * ones}
    stats, of_stats = oracle.head(h, W, LABELS, of)
    np.testing.assert_allclose(loss, sum((of[k] * stats[k]).sum() for k in of), 1e-6)
    assert_near(gradients, of_stats[:2], 1e-5)
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


@pytest.mark.full
@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("vocab", ["model", slow(None)])
def test_shards_of_the_vocabulary_and_of_tokens(vocab, drawn):
    """Uneven in both; one of the ids of a token is on another device than others."""
    kinds = (AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=kinds)
    h, W, ids, teacher = make(3.0)
    operands, each = (h, W, ids, None if drawn else teacher), np.linspace(0.5, 2, N)
    options = {
        "softcap": 9.0,
        "temperature": each,
        "statistics_temperature": each[::-1],
    }
    alone = functools.partial(jaxmem.divergence_loss, mixture)
    verb = jaxmem.sharding.parallel(alone, mesh, vocab=vocab, tokens="data")
    verb = loss_of_columns("forward_kl", None, verb)

    @jax.jit
    def both(h, W):
        def loss(h, W):
            given = h, W, LABELS, *operands[2:], WEIGHT
            return verb(*given, chunk=CHUNK, **options)

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(h, W)

    assert_is(both(h, W), wanted("forward_kl", True, operands, **options))


@pytest.mark.full
def test_axes_with_explicit_types():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    given = [x[:32] if len(x) == N else x for x in make(3.0)]

    def run(h, W, labels, ids, ln_q, weight):
        def loss(h, W):
            of = loss_of_columns("forward_kl", mixture)
            return of(h, W, labels, ids, ln_q, weight, chunk=None)

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(h, W)

    h, W, ids, ln_q = given
    arrays = h, W, LABELS[:32], ids, ln_q, WEIGHT[:32]
    specs = P("data"), P(), P("data"), P("data"), P("data"), P("data")
    placed = [
        jax.device_put(x, NamedSharding(mesh, s))
        for x, s in zip(arrays, specs, strict=True)
    ]
    with jax.set_mesh(mesh):
        got = jax.jit(run)(*placed)
    assert got[0][1]["divergence"].sharding.spec == P("data")
    assert_is(got, wanted("forward_kl", True, given))


def shapes(n, d, v, k):
    ids, teacher = (jax.ShapeDtypeStruct((n, k), t) for t in (jnp.int32, jnp.float32))
    of_head = (jax.ShapeDtypeStruct((size, d), jnp.float32) for size in (n, v))
    return *of_head, ids, teacher


def total(chunk, **options):
    def run(h, W, ids, teacher):
        labels = jnp.zeros(len(h), jnp.int32)
        loss = loss_of_columns("forward_kl", lambda stats, d: d - stats.logprob)
        return loss(h, W, labels, ids, teacher, chunk=chunk, **options)[0]

    return run


@pytest.mark.slow
def test_three_products():
    """The logits and two gradients; a loss of `divergence` takes four."""

    def gemms(fn):
        return count_gemms(compiled(fn, *shapes(256, 24, 640, 8)).as_text())

    assert gemms(total(64)) == 1
    assert gemms(jax.grad(total(64))) == 2

    def drawn(h, W, ids, teacher):
        return total(64)(h, W, ids, None)

    assert gemms(jax.grad(drawn, (0, 1))) == 3


@pytest.mark.full
@pytest.mark.parametrize("of_stats", [None, 0.5])
def test_memory_and_products_as_documented(of_stats):
    n, d, v, k, chunk = 2048, 64, 8192, 16, 128
    loss = jax.grad(total(chunk, statistics_temperature=of_stats), (0, 1))
    promised = (4 + 4 + (4 if of_stats else 0)) * chunk * v + 4 * v * d
    promised += 192 * chunk * k
    program = compiled(loss, *shapes(n, d, v, k))
    assert count_gemms(program.as_text()) == 3
    temp = program.memory_analysis().temp_size_in_bytes
    assert 4 * chunk * v <= temp <= 1.04 * promised + n * (64 + 16 * d + 32 * k)


def test_it_is_reported():
    with jaxmem.report() as calls:
        jax.eval_shape(lambda: loss_of(make()))
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
def test_wrong_arguments(changes, kind, message):
    names = "hidden", "W", "ids", "logprobs"
    given = dict(zip(names, make(), strict=True))
    given |= {"labels": LABELS, "chunk": CHUNK, "name": "forward_kl"}
    given |= {"loss_fn": lambda stats, d: d} | changes
    loss = loss_of_columns(given.pop("name"), given.pop("loss_fn"))
    with pytest.raises(kind, match=message):
        loss(**given)
