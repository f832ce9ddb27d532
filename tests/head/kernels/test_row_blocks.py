"""Rows of logits by blocks: against float64, inside the verbs, lowered for CUDA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jaxmem
from jaxmem import devices
from jaxmem.head.kernels import row_blocks
from jaxmem.head.maths import block_sums, row_stats
from jaxmem.head.verbs import draws
from tests.helpers import draws as drawn_heads, hlo, largest
from tests.helpers.described import described
from tests.helpers.interpreter import needs_pallas
from tests.helpers.row_kernels import EPS, by_sorting, rows_of_logits

pytestmark = needs_pallas
WIDTH = row_blocks.WIDTH


def all_parts(z):
    blocks = row_blocks.parts(z)
    return blocks, block_sums.normaliser(blocks)


# Whole tiles, a last tile that overlaps the one before, and a last block that is cut.
@pytest.mark.slow
@pytest.mark.parametrize("columns", [1024, 1024 + 3 * WIDTH + 7])
def test_parts_against_float64(columns, rows_interpreted):
    z = rows_of_logits(columns)
    z[0, :WIDTH] = -np.inf
    blocks, normaliser = all_parts(jnp.asarray(z))
    padded = np.pad(z, ((0, 0), (0, -columns % WIDTH)), constant_values=-np.inf)
    tiles = padded.reshape(6, -1, WIDTH).astype(np.float64)[:5]
    np.testing.assert_array_equal(blocks.largest[:5], tiles.max(-1))
    full = tiles.max(-1) > -np.inf
    tiles, others = tiles[full], np.asarray(blocks.others)[:5][full]
    exps = np.exp(tiles - tiles.max(-1, keepdims=True))
    want = np.sort(exps, -1)[:, :-1].sum(-1)
    np.testing.assert_allclose(others, want, rtol=16 * EPS)
    assert np.isnan(normaliser.log_sum[5])
    want = row_stats.normaliser(jnp.asarray(z[:5]))
    np.testing.assert_array_equal(normaliser.max[:5], want.max)
    np.testing.assert_allclose(normaliser.log_sum[:5], want.log_sum, rtol=64 * EPS)


@pytest.mark.slow
def test_parts_of_row_without_columns(rows_interpreted):
    z = jnp.full((1, 600), -jnp.inf)
    _, got = all_parts(z)
    np.testing.assert_array_equal(got, row_stats.normaliser(z))


# One; k beyond the number of blocks; several; k = V.
@pytest.mark.slow
@pytest.mark.parametrize("k, n", [(1, 512), (7, 600), (9, 700), (20, 2051), (256, 512)])
@pytest.mark.parametrize("levels", [2, 10**6], ids="{} values".format)
def test_ties_are_in_order(k, n, levels, rows_interpreted):
    rng = np.random.default_rng(n)
    x = rng.integers(-levels, levels, (5, n)).astype(np.float32) / 2
    x[0], x[1] = 0, -np.inf
    x[2] = np.where(rng.random(n) < 0.5, 0.0, -0.0)
    x[3, : n // 2] = -np.inf
    x[4, ::3] = np.inf
    z = jnp.asarray(x)
    got = row_blocks.top_k(z, row_blocks.parts(z).largest, k)
    for a, b in zip(got, by_sorting(x, k), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_top_k_selects_nan_first_in_its_row(rows_interpreted):
    x = np.random.default_rng(0).standard_normal((3, 600)).astype(np.float32)
    x[0], x[1, 7] = np.nan, -np.nan
    z = jnp.asarray(x)
    values, ids = row_blocks.top_k(z, row_blocks.parts(z).largest, 5)
    np.testing.assert_array_equal(ids[0], np.arange(5))
    assert ids[1, 0] == 7 and np.isnan(values[1, 0])
    for row, without in ((1, np.delete(x[1:2], 7, axis=1)), (2, x[2:])):
        want = by_sorting(without, 5 - (row == 1))[0]
        np.testing.assert_array_equal(values[row : row + 1, row == 1 :], want)


def run_both(call, *operands):
    """By XLA, and by the kernels."""
    plain = jax.jit(call)(*operands)
    jax.clear_caches()
    with pytest.MonkeyPatch.context() as patch:
        used, parts = [], row_blocks.parts
        patch.setattr(devices, "backend", lambda: "gpu")
        patch.setattr(row_blocks, "parts", lambda z: used.append(1) or parts(z))
        by_kernels = jax.jit(call)(*operands)
        assert used, "the kernels did not run"
    return by_kernels, plain


@pytest.mark.full
@pytest.mark.parametrize("k, v", [(3, 600), (130, 600), (20, 2051)])
def test_topk_with_them(k, v, rows_interpreted):
    h, W = largest.make(v)
    bias = np.where(np.arange(v) % 3 == 0, -np.inf, 0).astype(np.float32)
    options = {"bias": bias, "softcap": 15.0, "temperature": 0.5}

    def call(h, W):
        return described(jaxmem.topk)(
            h, W, min(k, v - 1), 16, vocab_size=v - 1, **options
        )

    by_kernels, plain = run_both(call, h, W)
    np.testing.assert_array_equal(by_kernels.ids, plain.ids)
    np.testing.assert_allclose(by_kernels.logprobs, plain.logprobs, rtol=16 * EPS)


@pytest.mark.slow
def test_sample_ids_excluded_columns_and_nan(rows_interpreted):
    """256 equal columns among excluded ones: the first 8 bits are the number of one."""
    columns = np.sort(np.random.default_rng(0).permutation(1000)[:256])
    bias = np.full(1000, -np.inf, np.float32)
    bias[columns] = 2.5
    h, W = np.zeros((drawn_heads.N, 8), np.float32), np.zeros((1000, 8), np.float32)
    h[5] = np.nan
    by_kernels, _ = run_both(
        lambda h, W: jaxmem.sample_ids(
            h, jaxmem.Head(W, bias=bias), 40, drawn_heads.KEY, 16
        ),
        h,
        W,
    )
    want = columns[np.floor(drawn_heads.uniform(40) * 256).astype(int)]
    want[5] = -1
    np.testing.assert_array_equal(by_kernels, want)


def test_fraction_equals_long_division():
    rng = np.random.default_rng(0)
    b = rng.integers(1, 2**30 + 2**20, 1000).astype(np.int32)
    a = (rng.random(1000) * b).astype(np.int32)
    a[:3], b[:3] = [0, 0, 2**30 - 1], [1, 2**30, 2**30]
    want = [(int(x) << 32) // int(y) for x, y in zip(a, b, strict=True)]
    np.testing.assert_array_equal(draws._fraction(jnp.asarray(a), jnp.asarray(b)), want)


CALLS = {
    "topk": lambda h, W, **options: jaxmem.topk(h, W, 64, **options),
    "sample_ids": lambda h, W, **options: jaxmem.sample_ids(
        h, W, 16, drawn_heads.KEY, **options
    ),
}


@pytest.mark.parametrize("verb", CALLS)
def test_lowered_for_a_gpu_unless_xla_is_named(verb, monkeypatch):
    monkeypatch.setattr(devices, "backend", lambda: "gpu")
    operands = [jnp.zeros((n, 64), jnp.bfloat16) for n in (300, 5000)]
    assert "row_blocks" in hlo.lowered_for_an_h200(CALLS[verb], *operands)
    named = functools.partial(CALLS[verb], implementation="xla")
    assert "row_blocks" not in hlo.lowered_for_an_h200(named, *operands)


@pytest.mark.parametrize("verb", CALLS)
def test_types_over_a_mesh(verb, monkeypatch):
    """The type of every result names the axes over which it varies."""
    monkeypatch.setattr(devices, "backend", lambda: "gpu")
    mesh = jax.make_mesh((2, 2), ("t", "v"), axis_types=(AxisType.Auto,) * 2)
    parallel = functools.partial(
        jaxmem.sharding.parallel, mesh=mesh, tokens="t", vocab="v"
    )
    calls = {
        "topk": lambda h, W: parallel(jaxmem.topk)(h, W, 4).logprobs,
        "sample_ids": lambda h, W: parallel(jaxmem.sample_ids)(
            h, W, 4, drawn_heads.KEY
        ),
    }
    operands = [jnp.zeros((n, 16), jnp.bfloat16) for n in (8, 5000)]
    assert "row_blocks" in str(jax.make_jaxpr(calls[verb])(*operands))


def test_supports():
    assert row_blocks.supports(151936, jnp.float32, 64)
    assert not row_blocks.supports(151936, jnp.float64, 64)
    assert not row_blocks.supports(151936, jnp.float32, 257)  # one after another
    assert not row_blocks.supports(2**20 + 1, jnp.float32)  # blocks
    assert not row_blocks.supports(2047, jnp.float32)  # less than a tile


@pytest.mark.gpu
@pytest.mark.parametrize("k, columns", [(7, 2048), (64, 4099), (256, 151936)])
def test_on_a_gpu(k, columns):
    z = jnp.asarray(rows_of_logits(columns)[:5])
    z = jnp.concatenate([z, jnp.round(z[:1])])  # ties

    @jax.jit
    def run(z):
        blocks, normaliser = all_parts(z)
        return row_blocks.top_k(z, blocks.largest, k), normaliser

    found, normaliser = run(z)
    for a, b in zip(found, by_sorting(np.asarray(z), k), strict=True):
        np.testing.assert_array_equal(a, b)
    want = jax.jit(row_stats.normaliser)(z)
    np.testing.assert_array_equal(normaliser.max, want.max)
    np.testing.assert_allclose(normaliser.log_sum, want.log_sum, rtol=64 * EPS)


@pytest.mark.gpu
def test_verbs_on_a_gpu():
    h, W = drawn_heads.make(3.0, 5003)
    by_kernels = jaxmem.topk(h, W, 64)
    plain = jaxmem.topk(h, W, 64, implementation="xla")
    np.testing.assert_array_equal(by_kernels.ids, plain.ids)
    np.testing.assert_allclose(by_kernels.logprobs, plain.logprobs, rtol=1e-5)
    drawn = jaxmem.sample_ids(h, W, 50, drawn_heads.KEY)
    same = jaxmem.sample_ids(h, W, 50, drawn_heads.KEY, implementation="xla")
    assert np.mean(drawn == same) > 0.999  # but for rounding at a column's bounds
