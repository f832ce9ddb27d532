"""Sampled entries by tiles: the bounds hold, and the kernels find what integers say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.head.maths import column_sampling, row_stats
from jaxmem.head.maths.column_sampling import Sampling
from tests.helpers.cases import slow
from tests.helpers.interpreter import needs_pallas

pytestmark = [needs_pallas, pytest.mark.usefixtures("all_rows_interpreted")]
WIDTH = 64


def tiles(z, labels, dtype, width=WIDTH):
    """(kept, stats, outputs) of logits [n, V], as the forward kernel makes them."""
    from jaxmem.head.kernels.forward import Kept

    n, v = z.shape
    n_tiles = -(-v // width)
    padded = np.pad(z, ((0, 0), (0, n_tiles * width - v)), constant_values=-np.inf)
    by_tile = jnp.asarray(padded.reshape(n, n_tiles, width))
    of_tile = jnp.maximum(by_tile.max(-1), -(2.0**100))
    exps = jnp.exp(by_tile - of_tile[..., None])
    columns = np.arange(n_tiles * width).reshape(n_tiles, width)
    others = jnp.where(columns == labels[:, None, None], 0, exps)
    kept = Kept(
        others.astype(dtype).reshape(n, -1)[:, : -(-v // 64) * 64], of_tile.T,
        jnp.sum(others, -1).T,
    )  # fmt: skip
    stats, _ = row_stats.of_tile(jnp.asarray(z), jnp.asarray(labels))
    return kept, stats, row_stats.finish(stats, jnp.asarray(labels < v))


def problem(n, v, std, seed=0):
    """Logits; some rows' labels lead, some columns are masked."""
    rng = np.random.default_rng(seed)
    z = (std * rng.standard_normal((n, v))).astype(np.float32)
    labels = rng.integers(0, v, n).astype(np.int32)
    z[::3] += 8 * (np.arange(v) == labels[::3, None])
    z[1::4, v // 2 :: 3] = -np.inf
    z[2] = z[2].max()  # ties, the label's among them
    return z, labels


def facts_of(stats, rows, labels):
    from jaxmem.head.kernels import sampled_select

    normaliser = row_stats.Normaliser(rows.max, rows.log_sum)
    return sampled_select.RowFacts(
        jnp.asarray(labels), stats.label_logit, stats.max, normaliser
    )


def entries_of(sampling, kept, facts, starts, n_active):
    from jaxmem.head.kernels import sampled_select

    return sampled_select.entries(
        sampling, WIDTH, kept, facts, lambda total: starts, jnp.int32(n_active)
    )


def bounds_of(sampling, kept, stats, rows, labels):
    """[n_tiles, n]."""
    from jaxmem.head.kernels import sampled_select

    facts = facts_of(stats, rows, labels)
    scale = column_sampling.scale(kept.max, facts.normaliser)
    return sampled_select.bounds(sampling, WIDTH, kept, facts, scale)


def units_of(sampling, kept, scale, labels, n, v, width=WIDTH):
    """[n, n_tiles, width], as the kernel computes them."""
    exps = np.asarray(kept.exps, np.float32)
    n_tiles = scale.shape[0]
    exps = np.pad(exps, ((0, 0), (0, n_tiles * width - exps.shape[1])))
    p = exps.reshape(n, n_tiles, width) * np.asarray(scale).T[..., None]
    columns = np.arange(n_tiles * width).reshape(n_tiles, width)
    p = np.where((columns == labels[:, None, None]) | (columns >= v), 0, p)
    return p, np.asarray(column_sampling.units(sampling, jnp.asarray(p)), np.int64)


@pytest.mark.full
@pytest.mark.parametrize(
    "std, dtype",
    [
        (0.0, "bfloat16"),
        (1.0, "float16"),
        (4.0, "bfloat16"),
        (30.0, "float16"),
    ],
)  # fmt: skip
def test_bounds_hold_and_fit(std, dtype):
    from jaxmem.head.kernels import sampled_select

    n, v = 60, 1000
    z, labels = problem(n, v, std)
    kept, stats, rows = tiles(z, labels, dtype)
    scale = column_sampling.scale(kept.max, rows)
    for slots in (1, 16, 128, 1024):
        sampling = Sampling(slots, v, sampled_select.MARGIN)
        got = bounds_of(sampling, kept, stats, rows, labels)
        _, units = units_of(sampling, kept, scale, labels, n, v)
        bounds = np.asarray(got, np.int64).T
        assert np.all(units.sum(-1) <= bounds)
        assert np.all(bounds.sum(1) <= slots * sampling.one)
        # Little more than what is there: few slots stay empty.
        if slots < v / WIDTH:
            missed = (bounds - units.sum(-1)).sum(1) / sampling.one
            assert np.median(missed) < 0.01 * slots + 0.02


def by_definition(sampling, bounds, p, units, starts):
    """Each multiple of u in a tile's bound; of its columns, the one that reaches it."""
    n, n_tiles, width = units.shape
    columns = np.full((n, sampling.slots), sampling.columns)
    found = np.zeros((n, sampling.slots), np.float32)
    for row in range(n):
        ends = np.cumsum(bounds[row])
        for slot in range(sampling.slots):
            multiple = (slot + 1) * sampling.one - int(starts[row])
            if multiple > ends[-1]:
                break
            tile = np.searchsorted(ends, multiple)
            rest = multiple - (ends[tile] - bounds[row, tile])
            over = np.cumsum(units[row, tile])
            if rest <= over[-1]:
                at = np.searchsorted(over, rest)
                columns[row, slot] = tile * width + at
                found[row, slot] = p[row, tile, at]
    return columns, found


@pytest.mark.full
@pytest.mark.parametrize(
    "slots, v, std, dtype",
    [
        (20, 300, 2.0, "bfloat16"),
        slow(7, 1000, 30.0, "float16"),
        slow(33, 50, 0.5, "bfloat16"),
        slow(64, 4096, 0.1, "bfloat16"),
    ],
)
def test_entries(slots, v, std, dtype):
    from jaxmem.head.kernels import sampled_select

    n = 8
    z, labels = problem(n, v, std)
    labels[-1] = -1
    sampling = Sampling(slots, v, sampled_select.MARGIN)
    starts = column_sampling.starts(
        sampling, column_sampling.draws(jax.random.split(jax.random.key(0), n))
    )
    starts = starts.at[0].set(0).at[1].set(sampling.one - 1)
    kept, stats, rows = tiles(z, labels, dtype)
    got = entries_of(sampling, kept, facts_of(stats, rows, labels), starts, n - 3)
    scale = np.where(np.arange(n) < n - 3, column_sampling.scale(kept.max, rows), 0)
    bounds = np.array(bounds_of(sampling, kept, stats, rows, labels), np.int64).T
    bounds[-3:] = 0
    p, units = units_of(sampling, kept, scale, labels, n, v)
    want = by_definition(sampling, bounds, p, units, starts)
    np.testing.assert_array_equal(got.columns, want[0])
    np.testing.assert_array_equal(got.p, want[1])
    assert np.all(np.asarray(got.columns)[-3:] == v)
    assert np.sum(np.asarray(got.p) > 0) > n


@pytest.mark.slow
@pytest.mark.parametrize("row", [0, 3])
def test_select_keeps_columns_by_units(row, monkeypatch):
    """Every start, of few: probabilities are exact, whatever the bounds are."""
    from jaxmem.head.kernels import sampled_select

    monkeypatch.setattr(column_sampling, "_BITS", 10)
    v, sampling = 80, Sampling(6, 80, sampled_select.MARGIN)
    n = sampling.one
    assert n == 128 and sampling.rate > 1
    z, labels = problem(4, v, 2.0)
    same, label = z[[row] * n], labels[[row] * n]
    kept, stats, rows = tiles(same, label, "bfloat16")
    scale = column_sampling.scale(kept.max, rows)
    _, units = units_of(sampling, kept, scale, label, n, v)
    starts = jnp.arange(n, dtype=jnp.int32)
    got = entries_of(sampling, kept, facts_of(stats, rows, label), starts, n)
    counts = np.bincount(np.asarray(got.columns).ravel(), minlength=v + 1)
    np.testing.assert_array_equal(counts[:v], units[0].ravel()[:v])
