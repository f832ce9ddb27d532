"""Sums over rows of logits: against float64, inside the verbs, lowered for CUDA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem import devices
from jaxmem.head.kernels import row_sums
from tests import hlo
from tests.head.kernels import needs_pallas
from tests.head.verbs.test_divergence import CHUNK, exact, make
from tests.targets import jsd, loss_of_two_heads, of_two_heads

pytestmark = needs_pallas
EPS = float(np.finfo(np.float32).eps)


def rows_of_logits(columns):
    """Flat, confident, very confident with a tie, masked columns, and one NaN."""
    rng = np.random.default_rng(0)
    z = rng.standard_normal((6, columns)).astype(np.float32)
    z[1] *= 20
    z[2] = -30
    z[2, -1] = 0
    z[3] = 1e4
    z[4, ::3] = -np.inf
    z[5, columns // 2] = np.nan
    return z


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


@pytest.mark.slow
def test_verbs_with_them(rows_interpreted, monkeypatch):
    monkeypatch.setattr(row_sums, "SHARES", 2)
    assert_good("jsd", make(v=600), (row_sums, "sums"), vocab_size=600)


def assert_good(verb, operands, kernel, **options):
    """A verb's values and gradients by a kernel, (module, name), and by XLA."""
    g = np.random.default_rng(1).standard_normal(len(operands[0])).astype(np.float32)
    call = functools.partial(of_two_heads(verb), chunk=CHUNK, **options)

    def run(h, W):
        return jax.vjp(lambda h, W: call(h, W, *operands[2:]), h, W)

    plain, pull = run(*operands[:2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "backend", lambda: "gpu")
        (module, name), used = kernel, []
        launch = getattr(module, name)
        patch.setattr(module, name, lambda *a: used.append(1) or launch(*a))
        value, pull_here = run(*operands[:2])
        assert used, "the kernels did not run"
        gradients_here = pull_here(g)
    want, gradients = exact(verb, g, operands, **options)
    np.testing.assert_allclose(value, want, rtol=64 * EPS)
    np.testing.assert_allclose(value, plain, rtol=64 * EPS)
    for got, other, need in zip(gradients_here, pull(g), gradients, strict=False):
        scale = np.abs(need).max()
        np.testing.assert_allclose(got, other, atol=16 * EPS * scale)
        np.testing.assert_allclose(got, need, atol=64 * EPS * scale)


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


def lowered_loss(verb, monkeypatch):
    """A loss of a divergence, for a GPU."""
    monkeypatch.setattr(devices, "backend", lambda: "gpu")

    def loss(h, W, *reference):
        labels = jnp.zeros(len(h), jnp.int32)
        of = loss_of_two_heads(verb, lambda stats, divergence: divergence)
        return of(h, W, labels, *reference)[0]

    operands = [jnp.asarray(x, jnp.bfloat16) for x in make(v=3000)]
    return hlo.lowered_for_an_h200(jax.grad(loss, (0, 1)), *operands)


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
