"""On an NVIDIA GPU: frozen heads, and losses of divergences beside their parts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from tests.helpers.divergence import make
from tests.helpers.targets import (
    loss_of_columns,
    loss_of_two_heads,
    of_columns,
    of_two_heads,
)

pytestmark = pytest.mark.gpu

N, D, V, K, CHUNK = 300, 64, 5000, 16, 128
VERBS = ["reverse_kl", "forward_kl", "jsd"]
RNG = np.random.default_rng(2)
LABELS = RNG.integers(0, V, N).astype(np.int32)
WEIGHT = RNG.uniform(0.5, 2, N).astype(np.float32)


def heads():
    """A student and its teacher, in 16 bits."""
    return [jnp.asarray(x, jnp.bfloat16) for x in make(2.0, n=N, d=D, v=V)]


def teacher_columns():
    """Each token's ids, some absent, and the teacher's ln q of them."""
    ids = np.stack([RNG.permutation(V)[:K] for _ in range(N)]).astype(np.int32)
    ids[::3, 2:], ids[::5] = -1, -1
    ln_q = np.log(0.8 * RNG.dirichlet(np.ones(K + 1), N)[:, :K])
    return ids, ln_q.astype(np.float32)


def mixture(stats, divergence, weight):
    """A loss of a divergence, cross-entropy and entropy; its metrics."""
    loss = weight * divergence - 0.3 * stats.logprob + 0.1 * stats.entropy
    return loss, {"divergence": divergence}


def with_gradients(loss, *operands):
    """((loss, metrics), gradients of hidden and W)."""
    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(*operands)


def assert_near(found, wanted):
    """Loss and metrics to float32's rounding of sums, gradients to bfloat16's."""
    (loss, metrics), gradients = found
    (want, of_parts), by_parts = wanted
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    np.testing.assert_allclose(
        metrics["divergence"], of_parts["divergence"], rtol=1e-5, atol=1e-6
    )
    for got, need in zip(gradients, by_parts, strict=True):
        got, need = (np.asarray(x, np.float32) for x in (got, need))
        assert need.any()
        assert np.abs(got - need).max() <= 2**-7 * np.abs(need).max()


@pytest.mark.parametrize("verb", VERBS)
def test_frozen_head_has_same_hidden_gradient(verb):
    h, *others = heads()

    @functools.partial(jax.jit, static_argnums=0)
    def run(frozen, h):
        def total(h):
            gradient = None if frozen else jaxmem.Recompute()
            value = of_two_heads(verb)(h, *others, CHUNK, gradient=gradient)
            return (WEIGHT * value).sum(), value

        return jax.grad(total, has_aux=True)(h)

    (got, value), (want, trained) = run(True, h), run(False, h)
    np.testing.assert_array_equal(value, trained)
    got, want = (np.asarray(x, np.float32) for x in (got, want))
    assert want.any() and np.abs(got - want).max() <= 2**-7 * np.abs(want).max()


@pytest.mark.parametrize("verb", VERBS)
def test_divergence_loss_is_the_sum_of_its_parts(verb):
    h, W, *reference = heads()

    def loss(h, W):
        given = h, W, LABELS, *reference, WEIGHT
        return loss_of_two_heads(verb, mixture)(*given, chunk=CHUNK)

    def parts(h, W):
        each = of_two_heads(verb)(h, W, *reference, CHUNK)
        losses, metrics = mixture(jaxmem.token_stats(h, W, LABELS, CHUNK), each, WEIGHT)
        return losses.mean(), metrics

    assert_near(with_gradients(loss, h, W), with_gradients(parts, h, W))


@pytest.mark.parametrize("verb", VERBS)
def test_loss_of_columns_is_sum_of_its_parts(verb):
    (h, W, *_), given = heads(), teacher_columns()

    def loss(h, W):
        operands = h, W, LABELS, *given, WEIGHT
        return loss_of_columns(verb, mixture)(*operands, chunk=CHUNK)

    def parts(h, W):
        each = of_columns(verb)(h, W, *given, CHUNK)
        losses, metrics = mixture(jaxmem.token_stats(h, W, LABELS, CHUNK), each, WEIGHT)
        return losses.mean(), metrics

    assert_near(with_gradients(loss, h, W), with_gradients(parts, h, W))


def test_loss_of_drawn_ids_and_frozen_head():
    (h, W, *_), (ids, _) = heads(), teacher_columns()

    def loss(h, W):
        operands = h, W, LABELS, ids, None, WEIGHT
        return loss_of_columns("forward_kl", mixture)(*operands, chunk=CHUNK)

    def parts(h, W):
        log_p = jaxmem.selected_logprobs(h, W, ids, CHUNK)
        each = -log_p.sum(1) / np.maximum((ids >= 0).sum(1), 1)
        losses, metrics = mixture(jaxmem.token_stats(h, W, LABELS, CHUNK), each, WEIGHT)
        return losses.mean(), metrics

    trained = with_gradients(loss, h, W)
    assert_near(trained, with_gradients(parts, h, W))
    frozen = with_gradients(lambda h, W: loss(h, jax.lax.stop_gradient(W)), h, W)
    np.testing.assert_array_equal(frozen[1][0], trained[1][0])
    assert not frozen[1][1].any()
