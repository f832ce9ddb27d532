"""Sums over rows of logits: against float64, inside the verbs, lowered for CUDA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem import devices
from jaxmem.head.kernels import row_sums
from tests.helpers import hlo
from tests.helpers.divergence import make
from tests.helpers.interpreter import needs_pallas
from tests.helpers.row_kernels import EPS, lowered_loss, rows_of_logits
from tests.helpers.targets import jsd, of_two_heads

pytestmark = needs_pallas


@pytest.mark.full
def test_sums_against_float64(rows_interpreted):
    z, shift = rows_of_logits(4000)[:5], np.arange(5, dtype=np.float32)

    def terms(z, shift):
        e = jnp.exp(z - shift)
        return e, jnp.where(e == 0, 0, e * 2)

    z[3] = 1
    got = row_sums.sums(terms, (jnp.asarray(z),), (jnp.asarray(shift),))
    want = np.exp(z.astype(np.float64) - shift[:, None]).sum(1)
    np.testing.assert_allclose(got[0], want, rtol=16 * EPS)
    np.testing.assert_allclose(got[1], 2 * want, rtol=16 * EPS)


def test_named_xla_runs_none(monkeypatch):
    monkeypatch.setattr(devices, "backend", lambda: "gpu")
    operands = [jnp.asarray(x) for x in make(v=3000)]
    assert "row_sums" in hlo.lowered_for_an_h200(jsd, *operands)
    named = functools.partial(jsd, implementation="xla")
    assert "row_sums" not in hlo.lowered_for_an_h200(named, *operands)


def test_lowered_for_a_gpu(monkeypatch):
    text = lowered_loss("jsd", monkeypatch)
    assert "row_blocks" in text
    assert "row_sums" in text


def test_supports():
    assert row_sums.supports(151936, jnp.float32)
    assert not row_sums.supports(151936, jnp.float64)
    assert not row_sums.supports(2047, jnp.float32)  # less than a tile


@pytest.mark.gpu
@pytest.mark.parametrize("verb", ["reverse_kl", "forward_kl", "jsd"])
def test_verbs_on_a_gpu(verb):
    operands = [jnp.asarray(x, jnp.bfloat16) for x in make(n=300, d=64, v=5000)]

    @functools.partial(jax.jit, static_argnums=0)
    def run(implementation, h, W, *reference):
        def total(h, W):
            call = of_two_heads(verb)
            value = call(h, W, *reference, 128, implementation=implementation)
            return value.sum(), value

        return jax.value_and_grad(total, (0, 1), has_aux=True)(h, W)

    (_, value), gradients = run(None, *operands)
    (_, plain), others = run("xla", *operands)
    np.testing.assert_allclose(value, plain, rtol=1e-5)
    for got, want in zip(gradients, others, strict=True):
        got, want = (np.asarray(x, np.float32) for x in (got, want))
        assert np.abs(got - want).max() <= 2**-7 * np.abs(want).max()
