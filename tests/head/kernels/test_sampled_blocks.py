"""Entries sampled by blocks of logits: unbiased, and the values' bits, and for CUDA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jaxmem
from jaxmem import devices
from jaxmem.head.kernels import sampled_blocks
from jaxmem.head.maths import column_sampling
from jaxmem.head.maths.block_sums import Density
from jaxmem.head.maths.column_sampling import Sampling
from tests.helpers import hlo, sampled_divergence
from tests.helpers.cases import slow
from tests.helpers.interpreter import needs_pallas
from tests.helpers.targets import of_two_heads

pytestmark = needs_pallas
KEY = sampled_divergence.KEY


@pytest.fixture
def by_kernels(rows_interpreted, monkeypatch):
    monkeypatch.setattr(devices, "backend", lambda: "gpu")


@pytest.mark.full
@pytest.mark.parametrize("peak", [0.0, 8.0])
def test_select_keeps_columns_by_probability(peak, rows_interpreted):
    """Over starts in equal steps, so that counts are exact up to one."""
    width, columns, slots, n = 64, 300, 6, 32
    rng = np.random.default_rng(0)
    z = rng.standard_normal(columns).astype(np.float32)
    z[[3, 4]] += peak
    z[50:55], z[64:128] = -np.inf, -60  # units of 1 in a block without mass
    sampling = Sampling(slots, columns, sampled_blocks.MARGIN)
    p = np.exp(z - np.log(np.exp(z.astype(np.float64)).sum())).astype(np.float32)
    blocks = np.pad(p, (0, -columns % width)).reshape(-1, width)
    mass, others = (
        jnp.asarray(x) for x in (blocks.sum(1), np.sort(blocks, 1)[:, :-1].sum(1))
    )
    bounds = sampled_blocks.bounds(sampling, width, mass, others, 1)
    units = np.asarray(column_sampling.units(sampling, jnp.asarray(p)))
    of_block = np.pad(units, (0, -columns % width)).reshape(-1, width).sum(1)
    assert (bounds >= of_block).all()
    assert bounds.sum() <= slots * sampling.one
    starts = jnp.arange(n, dtype=jnp.int32) * (sampling.one // n)

    def density(z, ln_total):
        return jnp.exp(z - ln_total)

    density = Density(
        density, (jnp.tile(z, (n, 1)),), rows=(jnp.zeros(n) + np.log(np.exp(z).sum()),)
    )
    entries = sampled_blocks.select(
        sampling, density, jnp.tile(bounds, (n, 1)), width, starts
    )
    columns_kept, kept = entries.columns, entries.p
    counts = np.bincount(np.asarray(columns_kept).reshape(-1), minlength=columns + 1)
    np.testing.assert_allclose(counts[:columns], units / sampling.one * n, atol=1.01)
    kept, columns_kept = np.asarray(kept), np.asarray(columns_kept)
    there = columns_kept < columns
    np.testing.assert_allclose(kept[there], p[columns_kept[there]], rtol=1e-5)
    assert not kept[~there].any()


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["jsd", "reverse_kl", "forward_kl"])
def test_values_and_entries_with_certainty(verb, by_kernels):
    sampled_divergence.check_values()
    sampled_divergence.check_every_column_kept(verb)


@pytest.mark.parametrize("verb", [slow("reverse_kl"), "jsd"])
def test_types_over_a_mesh(verb, monkeypatch):
    """The type of every result names the axes over which it varies."""
    monkeypatch.setattr(devices, "backend", lambda: "gpu")
    mesh = jax.make_mesh((2, 2), ("t", "v"), axis_types=(AxisType.Auto,) * 2)
    h, W, *reference = sampled_divergence.problem(6, 16, 4096)
    run = jaxmem.sharding.parallel(jaxmem.divergence, mesh, tokens="t", vocab="v")
    run = of_two_heads(verb, run)

    def loss(h, W):
        return run(h, W, *reference, gradient=jaxmem.Sample(8), key=KEY).sum()

    text = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(h, W))
    assert "sampled_pick" in text


def operands_of(verb, v, n):
    made = sampled_divergence.operands_of(verb, n, 16, v)
    floats = [
        x if x is None or x.dtype.kind == "i" else x.astype(jnp.bfloat16) for x in made
    ]
    return jax.tree.map(jnp.asarray, floats)


def sampled(verb, key, *operands):
    """Value and gradients of a sum over tokens."""
    return sampled_divergence.loss_of(
        verb, 1.0, chunk=16, gradient=jaxmem.Sample(100), key=key
    )(*operands)


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["jsd", "reverse_kl", "forward_kl"])
def test_lowered_for_a_gpu(verb, monkeypatch):
    monkeypatch.setattr(devices, "backend", lambda: "gpu")
    text = hlo.lowered_for_an_h200(
        functools.partial(sampled, verb), KEY, *operands_of(verb, 3000, 37)
    )
    assert "sampled_pick" in text


@pytest.mark.gpu
@pytest.mark.parametrize("verb", sampled_divergence.VERBS)
def test_on_a_gpu(verb):
    """Values to the bit, and gradients whose mean is exact."""
    operands = operands_of(verb, 5000, 64)
    exact, (_, dW) = sampled_divergence.loss_of(verb, 1.0, chunk=16)(*operands)
    run, total = jax.jit(functools.partial(sampled, verb)), np.zeros(dW.shape)
    for seed in range(16):
        value, (_, drawn) = run(jax.random.key(seed), *operands)
        np.testing.assert_array_equal(value, exact)
        total += np.asarray(drawn, np.float64)
    one = np.linalg.norm(np.asarray(drawn, np.float64) - np.asarray(dW, np.float64))
    error = np.linalg.norm(total / 16 - np.asarray(dW, np.float64))
    assert 0 < error < 0.4 * one  # 0.25 if the errors of draws are independent
