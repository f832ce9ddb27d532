"""A loss of given columns: float64, its parts, its shards, its cost, its errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxmem
from tests import oracle
from tests.backends.test_xla import compiled, count_gemms
from tests.cases import slow
from tests.functional.test_api import STATS_EPSILON, error
from tests.functional.test_topk_divergence import (
    CHUNK,
    PAIRS,
    D,
    K,
    N,
    V,
    exact,
    make,
    named,
)
from tests.targets import loss_of_columns, topk_kl

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


def with_gradients(operands, *way, **options):
    """((loss, metrics), gradients of hidden and W)."""
    ids_and_teacher = operands[2:]

    @jax.jit
    def run(h, W):
        return jax.value_and_grad(
            lambda h, W: loss_of((h, W, *ids_and_teacher), *way, **options),
            (0, 1),
            has_aux=True,
        )(h, W)

    return run(*operands[:2])


def check(way, tail, operands, **options):
    """Against float64, where the statistics have a temperature of their own."""
    (loss, metrics), gradients = with_gradients(operands, way, tail, **options)
    on, own = options.get("where", np.ones(N, bool)), dict(options)
    own.pop("where", None)
    warmth = own.pop("statistics_temperature", own.get("temperature", 1.0))
    g = np.where(on, WEIGHT, 0) / on.sum()
    divergence, of_divergence = exact(way, tail, g, operands, **own)
    divergence = np.where(on, divergence, 0)
    ones = np.full(N, 1 / on.sum())
    wanted = {"logprob": -0.3 * ones, "entropy": 0.1 * ones}
    own["temperature"] = warmth
    stats, of_stats = oracle.head(*operands[:2], LABELS, wanted, on=on, **own)
    each = WEIGHT * divergence - 0.3 * stats["logprob"] + 0.1 * stats["entropy"]
    np.testing.assert_allclose(loss, each.sum() / on.sum(), rtol=1e-5)
    assert error(metrics["divergence"], divergence) < STATS_EPSILON
    for got, a, b in zip(gradients, of_divergence, of_stats, strict=False):
        assert error(got, a + b) < STATS_EPSILON


def assert_near(gradients, expected, tolerance):
    """Up to a part of the largest entry of each."""
    for got, want in zip(gradients, expected, strict=True):
        got, want = (np.asarray(x, np.float32) for x in (got, want))
        assert np.abs(got - want).max() <= tolerance * np.abs(want).max()


@pytest.mark.parametrize("way, tail", PAIRS)
def test_values_and_gradients(way, tail):
    h, W, ids, ln_q = make(3.0)
    ids[::3, 2:] = -1
    check(way, tail, (h, W, ids, ln_q))


@pytest.mark.parametrize("way, tail", [("jsd", True), slow("reverse_kl", False)])
def test_every_option(way, tail):
    options = {"softcap": 5.0, "temperature": 0.7, "statistics_temperature": 1.3}
    bias = np.linspace(-1, 1, V).astype(np.float32)
    options |= {"bias": bias, "vocab_size": 110, "where": np.arange(N) % 5 != 0}
    check(way, tail, make(3.0), **options)


@pytest.mark.slow
def test_it_is_the_sum_of_its_parts():
    """In 16 bits, with ids that are absent, and with tokens that have none."""
    h, W, ids, ln_q = make(3.0)
    h, W = (jnp.asarray(x, jnp.bfloat16) for x in (h, W))
    ids[::3, 2:], ids[::5] = -1, -1
    (loss, metrics), gradients = with_gradients((h, W, ids, ln_q))

    def parts(h, W):
        each = topk_kl(h, W, ids, ln_q, CHUNK)
        stats = jaxmem.token_stats(h, W, LABELS, CHUNK)
        return mixture(stats, each, WEIGHT)[0].mean(), each

    (want, each), of_parts = jax.value_and_grad(parts, (0, 1), has_aux=True)(h, W)
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    np.testing.assert_allclose(metrics["divergence"], each, atol=1e-6)
    assert not each[::5].any()
    assert_near(gradients, of_parts, 2**-7)


def test_the_divergence_from_drawn_ids_is_their_cross_entropy():
    h, W, ids, _ = make(3.0)
    ids[::3, 2:], ids[::5] = -1, -1

    def ours(h, W):
        return topk_kl(h, W, ids, None, CHUNK)

    def parts(h, W):
        log_p = jaxmem.selected_logprobs(h, W, ids, CHUNK)
        return -log_p.sum(1) / np.maximum((ids >= 0).sum(1), 1)

    (made, pull), (want, pull_parts) = (jax.vjp(f, h, W) for f in (ours, parts))
    np.testing.assert_allclose(made, want, rtol=1e-6)
    assert_near(pull(WEIGHT), pull_parts(WEIGHT), 1e-6)


@pytest.mark.parametrize("dtype", ["float32", slow("bfloat16")])
def test_ids_that_were_drawn_from_the_teacher(dtype):
    """Cross-entropy with them, of which some repeat and some are absent."""
    h, W, ids, _ = make(3.0)
    h, W = (jnp.asarray(x, dtype) for x in (h, W))
    ids[:, 1] = ids[:, 0]
    ids[::3, 2:], ids[::5] = -1, -1
    options = {"temperature": 0.7, "softcap": 5.0, "statistics_temperature": 1.0}
    (loss, metrics), gradients = with_gradients((h, W, ids, None), **options)

    def parts(h, W):
        log_p = jaxmem.selected_logprobs(
            h, jaxmem.Head(W, softcap=5.0), ids, CHUNK, temperature=0.7
        )
        each = -log_p.sum(1) / np.maximum((ids >= 0).sum(1), 1)
        stats = jaxmem.token_stats(h, jaxmem.Head(W, softcap=5.0), LABELS, CHUNK)
        return mixture(stats, each, WEIGHT)[0].mean(), each

    (want, each), of_parts = jax.value_and_grad(parts, (0, 1), has_aux=True)(h, W)
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    np.testing.assert_allclose(metrics["divergence"], each, rtol=1e-5)
    assert not each[::5].any()
    assert_near(gradients, of_parts, 2**-7 if dtype == "bfloat16" else 1e-5)


def test_a_drawn_id_that_does_not_exist_poisons_only_what_uses_it():
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


@pytest.mark.parametrize("tail", [True, slow(False), None])
def test_no_ids_at_all(tail):
    h, W, ids, ln_q = make()
    none = ids[:, :0], None if tail is None else ln_q[:, :0]
    tail = bool(tail)
    (loss, metrics), gradients = with_gradients((h, W, *none), "forward_kl", tail)

    def without(h, W):
        def of(stats):
            return mixture(stats, jnp.zeros_like(stats.logprob), 0)

        return jaxmem.token_loss(of, h, W, LABELS, chunk=CHUNK)[0]

    want, of_statistics = jax.value_and_grad(without, (0, 1))(h, W)
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    assert_near(gradients, of_statistics, 1e-5)
    assert not metrics["divergence"].any()


def test_a_frozen_head_masks_and_a_constant_teacher():
    h, W, ids, ln_q = make()
    where = np.arange(N) % 4 > 0
    h[~where] = np.nan

    @functools.partial(jax.jit, static_argnums=0)
    def gradients(frozen):
        def loss(h, W, ln_q):
            given = h, jax.lax.stop_gradient(W) if frozen else W, ids, ln_q
            return loss_of(given, where=where, normalizer=9.0)[0]

        return jax.grad(loss, (0, 1, 2))(h, W, ln_q)

    dh, dW, teacher = gradients(True)
    assert not dW.any() and not teacher.any() and not dh[~where].any()
    also_dh, of_W, _ = gradients(False)
    np.testing.assert_array_equal(dh, also_dh)
    assert np.isfinite(dh).all() and of_W.any()


def test_a_divergence_that_is_not_used_poisons_nothing():
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


@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("vocab", ["model", slow(None)])
def test_shards_of_the_vocabulary_and_of_tokens(vocab, drawn):
    """Uneven in both; one of the ids of a token is on another device than others."""
    kinds = (AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=kinds)
    operands = make(3.0)
    ids, teacher = operands[2], None if drawn else operands[3]
    warmth = np.linspace(0.5, 2, N, dtype=np.float32)
    alone = functools.partial(jaxmem.divergence_loss, mixture)
    verb = jaxmem.sharding.parallel(alone, mesh, vocab=vocab, tokens="data")

    def run(verb):
        def loss(h, W):
            return loss_of_columns("forward_kl", None, verb)(
                h, jaxmem.Head(W, softcap=9.0), LABELS, ids, teacher, WEIGHT,
                chunk=CHUNK, temperature=warmth,
                statistics_temperature=warmth[::-1].copy(),
            )  # fmt: skip

        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(*operands[:2])

    want = run(alone)
    for got, need in zip(
        jax.tree.leaves(run(verb)), jax.tree.leaves(want), strict=True
    ):
        np.testing.assert_allclose(got, need, rtol=2e-5, atol=2e-6)


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
    want = jax.jit(run)(*arrays)
    specs = P("data"), P(), P("data"), P("data"), P("data"), P("data")
    placed = [
        jax.device_put(x, NamedSharding(mesh, s))
        for x, s in zip(arrays, specs, strict=True)
    ]
    with jax.set_mesh(mesh):
        got = jax.jit(run)(*placed)
    assert got[0][1]["divergence"].sharding.spec == P("data")
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


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


def test_three_products():
    """The logits and two gradients; a loss of `divergence` takes four."""

    def gemms(fn):
        return count_gemms(compiled(fn, *shapes(256, 24, 640, 8)).as_text())

    def of_topk_kl(h, W, ids, teacher):
        return topk_kl(h, W, ids, teacher, 64).mean()

    assert gemms(total(64)) == 1
    assert gemms(jax.grad(total(64), (0, 1))) == 3
    assert gemms(jax.grad(total(64))) == 2
    assert gemms(jax.grad(of_topk_kl, (0, 1))) == 4

    def drawn(h, W, ids, teacher):
        return total(64)(h, W, ids, None)

    assert gemms(jax.grad(drawn, (0, 1))) == 3


@pytest.mark.parametrize("of_stats", [slow(None), 0.5])
def test_memory_is_what_the_page_says(of_stats):
    n, d, v, k, chunk = 2048, 64, 8192, 16, 128
    loss = jax.grad(total(chunk, statistics_temperature=of_stats), (0, 1))
    promised = (4 + 4 + (4 if of_stats else 0)) * chunk * v + 4 * v * d
    promised += 192 * chunk * k
    temp = compiled(loss, *shapes(n, d, v, k)).memory_analysis().temp_size_in_bytes
    assert 4 * chunk * v <= temp <= 1.04 * promised + n * (64 + 16 * d + 32 * k)


def test_it_is_reported():
    with jaxmem.report() as calls:
        jax.eval_shape(lambda: loss_of(make()))
    (call,) = calls.calls
    assert call.verb == "divergence_loss"
    assert call.shapes == {"hidden": (N, D), "W": (V, D), "ids": (N, K)}
    assert call.live_logits_bytes == 4 * CHUNK * V


@pytest.mark.parametrize(
    "changes, kind, message",
    [
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
    ],
)
def test_wrong_arguments(changes, kind, message):
    names = "hidden", "W", "ids", "logprobs"
    given = dict(zip(names, make(), strict=True))
    given |= {"labels": LABELS, "chunk": CHUNK, "name": "forward_kl"}
    given |= {"loss_fn": lambda stats, d: d} | changes
    loss = loss_of_columns(given.pop("name"), given.pop("loss_fn"))
    with pytest.raises(kind, match=message):
        loss(**given)
