"""`divergence_loss`: against float64, against its parts, its cost and its errors."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from tests.helpers.cases import slow
from tests.helpers.divergence import (
    CHUNK,
    make,
    shapes,
)
from tests.helpers.programs import compiled, count_gemms
from tests.helpers.targets import loss_of_two_heads

pytestmark = pytest.mark.usefixtures("quick_compilation", "on_one_device")

N, V = 37, 130
RNG = np.random.default_rng(5)
LABELS = RNG.integers(0, V, N)
WEIGHT = RNG.uniform(0.5, 2, N).astype(np.float32)


def mixture(stats, divergence, weight):
    """A loss of a divergence, cross-entropy and entropy; its metrics."""
    loss = weight * divergence - 0.3 * stats.logprob + 0.1 * stats.entropy
    return loss, {"divergence": divergence, "entropy": stats.entropy}


def test_frozen_head_and_constant_reference():
    def loss(h, W, h_ref, W_ref, frozen):
        W = jax.lax.stop_gradient(W) if frozen else W
        given = h, W, LABELS, h_ref, W_ref, WEIGHT
        return loss_of_two_heads("reverse_kl", mixture)(*given, chunk=CHUNK)[0]

    @jax.jit
    def both(*operands):
        run = jax.grad(loss, (0, 1, 2, 3))
        return run(*operands, True), run(*operands, False)[0]

    (dh, dW, *others), want = both(*make())
    assert not any(x.any() for x in (dW, *others))
    np.testing.assert_array_equal(dh, want)


def test_masked_rows_may_hold_anything():
    h, W, h_ref, W_ref = make()
    labels = np.where(np.arange(N) % 4 == 0, -1, LABELS)
    h[::4], h_ref[::4] = np.nan, np.inf
    count = (labels >= 0).sum()

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def run(h):
        given = h, W, labels, h_ref, W_ref, WEIGHT
        loss = functools.partial(loss_of_two_heads("reverse_kl", mixture), chunk=CHUNK)
        return loss(*given)[0], loss(*given, normalizer=2 * count)[0]

    (value, half), dh = run(h)
    assert np.isfinite(value) and np.isfinite(dh).all() and not dh[::4].any()
    np.testing.assert_allclose(half, value / 2, rtol=1e-6)


@pytest.mark.full
def test_infinite_divergence_left_out_of_loss():
    h, W, h_ref, W_ref = make()
    bias = np.zeros(V, np.float32)
    bias[7] = -np.inf  # excluded by the reference, not by the policy

    def loss(h, used):
        def of(stats, divergence):
            return used * divergence - stats.logprob if used else -stats.logprob

        given = h, W, LABELS, h_ref, jaxmem.Head(W_ref, bias=bias)
        return loss_of_two_heads("reverse_kl", of)(*given, chunk=CHUNK)[0]

    dh, value = jax.jit(lambda h: (jax.grad(loss)(h, 0.0), loss(h, 1.0)))(h)
    assert np.isfinite(dh).all() and np.isinf(value)


@pytest.mark.full
@pytest.mark.parametrize("of_stats", [None, 0.5])
def test_four_products(of_stats):
    """Both heads' logits and two gradients; a loss of `divergence` takes six."""

    def one_pass(h, W, *reference):
        labels = jnp.zeros(len(h), jnp.int32)
        loss = loss_of_two_heads("reverse_kl", lambda stats, d: d - stats.logprob)
        more = {"chunk": 64, "statistics_temperature": of_stats}
        return loss(h, W, labels, *reference, **more)[0]

    def gemms(fn):
        return count_gemms(compiled(fn, *shapes(256, 24, 640)).as_text())

    assert gemms(one_pass) == 2
    assert gemms(jax.grad(one_pass, (0, 1))) == 4


def test_statistics_share_the_largest_logit():
    def loss(*operands):
        given = *operands[:2], LABELS, *operands[2:], WEIGHT
        return loss_of_two_heads("reverse_kl", mixture)(*given, chunk=CHUNK)[0]

    text = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(*make()))
    assert text.count("= reduce_max[") == 2  # one per head


@pytest.mark.parametrize("verb", ["jsd", slow("reverse_kl"), slow("forward_kl")])
@pytest.mark.parametrize("of_stats", [slow(None), 0.5])
def test_memory_is_what_the_page_says(of_stats, verb):
    n, d, v, chunk = 2048, 64, 8192, 128

    def loss(h, W, *reference):
        labels = jnp.zeros(len(h), jnp.int32)
        loss = loss_of_two_heads(verb, lambda stats, d: d - stats.logprob)
        more = {"chunk": chunk, "statistics_temperature": of_stats}
        return loss(h, W, labels, *reference, **more)[0]

    promised = (8 + 4 + (4 if of_stats else 0)) * chunk * v + 4 * v * d
    made = compiled(jax.grad(loss, (0, 1)), *shapes(n, d, v, "float32"))
    temp = made.memory_analysis().temp_size_in_bytes
    assert 4 * chunk * v <= temp <= 1.04 * promised + 64 * n + 16 * n * d


def test_it_is_reported():
    with jaxmem.report() as calls:
        run = functools.partial(loss_of_two_heads("jsd", mixture), chunk=CHUNK)
        h, W, *reference = make()
        jax.eval_shape(run, h, W, LABELS, *reference, WEIGHT)
    (call,) = calls.calls
    assert call.verb == "divergence_loss"
    assert call.live_logits_bytes == 4 * CHUNK * 2 * V


@pytest.mark.parametrize("changes, error, message", [
    ({"implementation": "hopper"}, NotImplementedError, "has no divergence_loss"),
    ({"chunk": 0}, ValueError, "chunk must be"),
    ({"normalizer": -1.0}, ValueError, "normalizer must"),
    ({"statistics_temperature": 0.0}, ValueError, "statistics_temperature must"),
    ({"statistics_temperature": np.ones(3)}, ValueError, "scalar or one per token"),
    ({"labels": LABELS[:5]}, ValueError, "labels must have"),
    ({"teacher_hidden": np.ones((3, 10))}, ValueError, "Teacher.hidden must"),
    ({"loss_fn": lambda stats: stats.logprob}, TypeError, "1 per-token argument"),
    ({"loss_fn": 3}, TypeError, "loss_fn must be a function"),
])  # fmt: skip
def test_wrong_arguments(changes, error, message):
    names = "hidden", "W", "teacher_hidden", "teacher_W"
    given = dict(zip(names, make(), strict=True))
    given |= {"loss_fn": lambda stats, d: d, "labels": LABELS, "chunk": CHUNK}
    given |= changes
    loss = loss_of_two_heads("reverse_kl", given.pop("loss_fn"))
    with pytest.raises(error, match=message):
        loss(**given)


@pytest.mark.parametrize("target", ["reverse_kl", jaxmem.JSD()], ids=str)
def test_other_targets_are_refused(target):
    with pytest.raises(TypeError, match="target must be jaxmem.ForwardKL"):
        jaxmem.divergence_loss(mixture, *make()[:2], LABELS, target, WEIGHT)


def test_array_as_target_is_named_by_shape():
    h, W = make()[:2]
    for target, got in (
        (h, "an array"),
        (jaxmem.ForwardKL(h), "ForwardKL of an array"),
    ):
        message = f"got {got} of float32, shape {re.escape(str(h.shape))}$"
        with pytest.raises(TypeError, match=message):
            jaxmem.divergence(h, W, target)


def loss_of_constants(of):
    """A loss as a function of a temperature and of a factor of the target."""
    h, W, teacher_h, teacher_W = make()
    ids, log_q = jnp.zeros((N, 1), jnp.int32), jnp.full((N, 1), -0.5)

    def loss(statistics_temperature, constant):
        targets = {
            "teacher": jaxmem.Teacher(teacher_h * constant, teacher_W),
            "columns": jaxmem.Columns(ids, log_q * constant),
            "drawn": jaxmem.Drawn(ids),
        }
        return jaxmem.divergence_loss(
            mixture, h, W, LABELS, jaxmem.ForwardKL(targets[of]), WEIGHT,
            statistics_temperature=statistics_temperature, chunk=CHUNK,
        )[0]  # fmt: skip

    return loss


@pytest.mark.parametrize("of", ["teacher", "columns", "drawn"])
def test_gradient_of_statistics_temperature_refused(of):
    with pytest.raises(NotImplementedError, match="^jaxmem: statistics_temperature is"):
        jax.eval_shape(jax.grad(loss_of_constants(of)), 1.3, 1.0)
