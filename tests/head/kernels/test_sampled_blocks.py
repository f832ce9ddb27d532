"""Entries sampled by blocks of logits: unbiased, and the values' bits, and for CUDA."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem import devices
from jaxmem.head.kernels import sampled_blocks
from jaxmem.head.maths import column_sampling
from jaxmem.head.maths.block_sums import Density
from jaxmem.head.maths.column_sampling import Sampling
from tests.helpers import crossing, hlo
from tests.helpers.cases import slow
from tests.helpers.crossing import Setting
from tests.helpers.estimates import (
    OF_FEW_COLUMNS,
    SAMPLED,
    check_every_column_kept,
    check_results,
)
from tests.helpers.interpreter import needs_pallas
from tests.helpers.meshes import OnMesh

pytestmark = needs_pallas


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


OF_BLOCKS = [x for x in SAMPLED if x.startswith(("divergence", "topk", "selected"))]
OF_TEACHERS = [x for x in OF_BLOCKS if re.fullmatch(r"divergence \w+ teacher", x)]


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_TEACHERS)
def test_values_and_entries_with_certainty(name, by_kernels):
    check_results(name)
    check_every_column_kept(getattr(jaxmem, name.split()[1]))


def setting_of(columns, n_tokens, gradient=None):
    dtypes = "bfloat16", "bfloat16"
    return Setting(
        dtypes, tokens=(n_tokens,), chunk=16, gradient=gradient, depth=16,
        columns=columns,
    )  # fmt: skip


@pytest.mark.parametrize("name", [slow(OF_TEACHERS[1]), OF_TEACHERS[2]])
def test_types_over_a_mesh(name, monkeypatch):
    """The type of every result names the axes over which it varies."""
    monkeypatch.setattr(devices, "backend", lambda: "gpu")
    setting = setting_of(4096, 6, jaxmem.Sample(8))
    run = functools.partial(crossing.run, OnMesh("2x4"), name, setting, ("hidden", "W"))
    assert "sampled_pick" in str(jax.make_jaxpr(run)(crossing.problem(setting)))


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_TEACHERS)
def test_lowered_for_a_gpu(name, monkeypatch):
    monkeypatch.setattr(devices, "backend", lambda: "gpu")
    setting = setting_of(3000, 37, jaxmem.Sample(100))
    run = functools.partial(crossing.run, jaxmem, name, setting, ("hidden", "W"))
    text = hlo.lowered_for_an_h200(run, crossing.problem(setting))
    assert "sampled_pick" in text


@pytest.mark.gpu
@pytest.mark.parametrize("name", OF_BLOCKS)
def test_on_a_gpu(name):
    """Values to the bit, and gradients whose mean is exact."""
    setting = setting_of(5000, 64)
    p, total = crossing.problem(setting), 0.0
    run = functools.partial(crossing.run, jaxmem, name, trained=("hidden", "W"))
    exact, gradients = run(setting, p=p)
    want = np.asarray(gradients["W"], np.float64)
    setting = setting_of(5000, 64, jaxmem.Sample(100))
    for seed in range(16):
        result, gradients = run(setting, p=p | {"key": jax.random.key(seed)})
        jax.tree.map(np.testing.assert_array_equal, result, exact)
        drawn = np.asarray(gradients["W"], np.float64)
        total += drawn
    one, error = np.linalg.norm(drawn - want), np.linalg.norm(total / 16 - want)
    if name in OF_FEW_COLUMNS:
        assert error <= 0.01 * np.linalg.norm(want)
    else:
        assert 0 < error < 0.4 * one  # 0.25 if the errors of draws are independent
