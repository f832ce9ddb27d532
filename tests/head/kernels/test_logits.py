"""Logits in the kernels: every path applies bias_correction."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from tests.helpers.cases import Case
from tests.helpers.described import described
from tests.helpers.interpreter import needs_pallas
from tests.helpers.one_pass import close

pytestmark = pytest.mark.usefixtures("on_one_device")

D, V = 64, 320
BIAS = np.sin(np.arange(V, dtype=np.float32))


def stats_and_gradients(h, W, y, implementation, **options):
    def total(h, W):
        stats = described(jaxmem.token_stats)
        made = stats(h, W, y, implementation=implementation, **options)
        weighted = made.logprob - 0.3 * made.entropy + 0.2 * made.sum_pi_squared
        return jnp.vdot(jnp.cos(jnp.arange(len(y))), weighted), made

    return jax.jit(jax.grad(total, (0, 1), has_aux=True))(h, W)


@pytest.mark.slow
@needs_pallas
@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.7}, {"softcap": 5.0, "bias": BIAS}],
    ids=lambda x: "+".join(x) or "plain",
)
def test_sums_of_half_their_size_are_doubled(options, interpreted, monkeypatch):
    """The factor applies before bias, softcap and temperature; 16 bits hold it."""
    from jaxmem.head.kernels import logits

    monkeypatch.setattr(logits, "TRUNCATION_BIAS", 1 / D)
    h, W, y = Case(70, D, V, std=1.5).make()
    h, W = (jnp.asarray(x, jnp.bfloat16) for x in (h, W))
    (dh, dW), made = stats_and_gradients(h, W, y, "hopper", **options)
    h, W = (jnp.asarray(x, jnp.float32) for x in (h, W))
    (want_dh, want_dW), want = stats_and_gradients(2 * h, W, y, "xla", **options)
    for a, b in zip(made[:-1], want[:-1], strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    np.testing.assert_array_equal(made.is_argmax, want.is_argmax)
    close(dh, want_dh)
    close(dW, want_dW / 2)


@pytest.mark.slow
@needs_pallas
def test_logits_of_tile_masked_by_bias(interpreted):
    """Its largest logit is that of no column, and less itself it is 0: on the chip,
    where one instruction multiplies and subtracts, if a product with it is exact."""
    from jaxmem.head.kernels import logits

    assert math.frexp(logits.MASK_VALUE)[0] == -0.5
    h, W, y = Case(30, D, 600, std=2.0).make()
    h, W, y = jnp.asarray(h, jnp.bfloat16), jnp.asarray(W, jnp.bfloat16), y % 256
    bias = np.where(np.arange(600) < 256, 0, -np.inf).astype(np.float32)
    grads, made = stats_and_gradients(h, W, y, "hopper", bias=jnp.asarray(bias))
    wide = (x.astype(jnp.float32) for x in (h, W))
    want_grads, want = stats_and_gradients(*wide, y, "xla", bias=jnp.asarray(bias))
    for a, b in zip(made[:-1], want[:-1], strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    jax.tree.map(close, grads, want_grads)
