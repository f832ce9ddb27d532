"""Losses in float16, which ends at 65504, with weights and normalisers of any size.

A derivative is as good as it would be with weights near 1, which change nothing but the
result's size.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem import Recompute, Sample
from tests.helpers.cases import Case, slow
from tests.helpers.targets import loss_of_columns, loss_of_two_heads
from tests.helpers.tolerance import EPSILON, STATS_EPSILON, assert_as_good

pytestmark = pytest.mark.usefixtures("quick_compilation", "on_one_device")

N, D, V = 40, 16, 300


def nll(stats, weight):
    return -weight * stats.logprob


def with_divergence(stats, divergence, weight):
    return -weight * stats.logprob + 0 * divergence


def by_divergence_loss(h, W, y, *args, **options):
    loss = loss_of_two_heads("reverse_kl", with_divergence)
    return loss(h, W, y, h, W, *args, **options)


def by_topk(h, W, y, *args, **options):
    ids, log_q = jnp.abs(y)[:, None], jnp.full((len(y), 1), -1.0)
    loss = loss_of_columns("forward_kl", with_divergence)
    return loss(h, W, y, ids, log_q, *args, **options)


token_loss = functools.partial(jaxmem.token_loss, nll)
KINDS = {
    "token_loss": token_loss,
    "blocks": functools.partial(token_loss, gradient=Recompute(2)),
    "groups": functools.partial(token_loss, vocab_groups=2),
    "divergence_loss": by_divergence_loss,
    "columns": by_topk,
}
WEIGHTS = {
    "large": (2.0**20, 8 * 2.0**20),
    "larger": (1e30, 40 * 1e30),
    "small over 1": (0.02, 1.0),
    "one over many": (1.0, 4096.0),
}


def operands():
    h, W, y = Case(N, D, V, std=3.0).make()
    y = np.where(np.arange(N) % 5 == 0, -1, y)
    return jnp.asarray(h, jnp.float16), jnp.asarray(W / 8, jnp.float16), y


def exact(h, W, y, weight, normalizer):
    """The loss and both gradients, in float64."""
    h, W = (np.asarray(x, np.float64) for x in (h, W))
    z = h @ W.T
    log_p = z - np.log(np.exp(z - z.max()).sum(-1, keepdims=True)) - z.max()
    one_hot = np.eye(V)[y] * (y >= 0)[:, None]
    dz = (np.exp(log_p) * (y >= 0)[:, None] - one_hot) * (weight / normalizer)[:, None]
    loss = -(log_p * one_hot).sum(-1) @ weight / normalizer
    return loss, dz @ W, dz.T @ h


def materialised(h, W, y, weight, normalizer):
    z = jnp.dot(h, W.T, preferred_element_type=jnp.float32)
    log_p = jax.nn.log_softmax(z)[jnp.arange(N), y]
    return jnp.sum(jnp.where(y >= 0, -weight * log_p, 0)) / normalizer


@functools.partial(jax.jit, static_argnums=(0, 1))
def value_and_gradients(kind, frozen, h, W, y, weight, normalizer):
    """Value and gradients of a call, or of materialised logits."""

    def total(h, W):
        if kind is None:
            return materialised(h, W, y, weight, normalizer)
        options = {"normalizer": normalizer, "chunk": 16}
        return KINDS[kind](h, W, y, weight, **options)[0]

    return jax.value_and_grad(total, (0,) if frozen else (0, 1))(h, W)


CALLS = [
    ("token_loss", "large", False), ("token_loss", "large", True),
    ("token_loss", "larger", False), ("token_loss", "small over 1", False),
    ("token_loss", "one over many", False), ("blocks", "large", False),
    ("groups", "large", False), ("divergence_loss", "large", False),
    ("divergence_loss", "large", True), ("columns", "large", False),
]  # fmt: skip
QUICK = [x for x in CALLS if x[0] == "token_loss" and not x[2]]
REST = [
    slow(kind, size, frozen)
    for kind in KINDS
    for size in WEIGHTS
    for frozen in (False, True)
    if (kind, size, frozen) not in QUICK
]


@pytest.mark.parametrize(("kind", "size", "frozen"), QUICK + REST)
def test_weights_and_normalisers_of_any_size(kind, size, frozen):
    h, W, y = operands()
    largest, normalizer = WEIGHTS[size]
    weight = (largest * np.linspace(0.1, 1, N)).astype(np.float32)
    want, *need = exact(h, W, y, np.float64(weight), normalizer)
    loss, made = value_and_gradients(kind, frozen, h, W, y, weight, normalizer)
    rough, near = value_and_gradients(None, False, h, W, y, weight, normalizer)
    scale = abs(want)
    assert_as_good(loss / scale, rough / scale, want / scale, STATS_EPSILON, "loss")
    for name, got, other, expected in zip("hW", made, near, need, strict=False):
        assert got.dtype == jnp.float16
        scale, epsilon = np.abs(expected).max(), EPSILON["float16"]
        if name == "h" and kind == "blocks":
            epsilon *= 3  # rounded once more per block
        got, other = (np.asarray(x, np.float64) / scale for x in (got, other))
        assert_as_good(got, other, expected / scale, epsilon, name)


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "size", "frozen"), CALLS)
def test_on_a_gpu(kind, size, frozen):
    test_weights_and_normalisers_of_any_size(kind, size, frozen)


@pytest.mark.slow
def test_samples_know_no_size():
    """An estimate is as it is with small weights, to rounding, and neither is inf."""
    h, W, y = operands()

    @jax.jit
    def gradients(size):
        def total(h, W):
            weight = jnp.linspace(0.1, 1, N) * size
            options = {"gradient": Sample(8), "key": jax.random.key(0)}
            return token_loss(h, W, y, weight, normalizer=8 * size, **options)[0]

        return jax.grad(total, (0, 1))(h, W)

    for got, want in zip(gradients(65536.0), gradients(1.0), strict=True):
        scale = np.abs(np.asarray(want, np.float64)).max()
        np.testing.assert_allclose(got, want, atol=4 * EPSILON["float16"] * scale)
