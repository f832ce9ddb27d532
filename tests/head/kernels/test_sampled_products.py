"""Weighted sums of rows, interpreted: long segments, empty ones, both layouts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.head.kernels.tiles import SampledLaunch
from jaxmem.head.maths import column_sampling
from jaxmem.head.maths.column_sampling import SparseDerivative
from tests.helpers.cases import slow
from tests.helpers.interpreter import needs_pallas

pytestmark = [needs_pallas, pytest.mark.usefixtures("all_rows_interpreted")]


def problem(n, d, v, slots, seed=0):
    """Entries of which many are of column 3, some slots are empty, some rows too."""
    rng = np.random.default_rng(seed)
    columns = np.stack([rng.permutation(v)[:slots] for _ in range(n)]).astype(np.int32)
    columns[::2, 0] = 3
    columns[rng.random((n, slots)) < 0.3] = v
    columns[n // 2] = v
    values = np.where(columns < v, rng.standard_normal((n, slots)), 0)
    dz = SparseDerivative(jnp.asarray(columns), jnp.asarray(values, jnp.float32))
    dense = np.zeros((n, v + 1))
    np.add.at(dense, (np.arange(n)[:, None], columns), values)
    h, W = rng.standard_normal((n, d)), rng.standard_normal((v, d))
    return dz, dense[:, :v], jnp.asarray(h, jnp.bfloat16), jnp.asarray(W, jnp.bfloat16)


@pytest.mark.full
@pytest.mark.parametrize("layout, d", [slow("vd", 16), ("dv", 40)])
def test_both_gradients(layout, d, monkeypatch):
    from jaxmem.head.kernels import sampled_products

    monkeypatch.setattr(sampled_products, "_PIECE", 8)
    monkeypatch.setattr(sampled_products, "_COLUMNS", 1)
    monkeypatch.setattr(sampled_products, "_TRANSPOSED_DEPTH", 16)
    n, v = 12, 10
    dz, dense, h, W = problem(n, d, v, 6)
    launch = SampledLaunch(8, 4, sums=8)
    launches = sampled_products.ColumnLaunches(launch, SampledLaunch(8, 8))
    given = W if layout == "vd" else W.T
    got = sampled_products.to_hidden(launch, dz, given, layout, jnp.float32)
    np.testing.assert_allclose(got, dense @ np.float64(W), rtol=1e-5, atol=1e-5)
    pairs = column_sampling.sort_by_column(dz)
    like = jax.ShapeDtypeStruct(given.shape, jnp.float32)
    got = sampled_products.to_weights(launches, pairs, h, like, layout)
    got = got if layout == "vd" else got.T
    np.testing.assert_allclose(got, dense.T @ np.float64(h), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(np.asarray(got)[~dense.any(0)], 0)
    bias = sampled_products.to_bias(pairs, n, v)
    np.testing.assert_allclose(bias, dense.sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("many", [False, True])
def test_long_column_counts_pairs_once(many, monkeypatch):
    """Columns have any length, and begin anywhere among the pieces."""
    from jaxmem.head.kernels import sampled_products

    monkeypatch.setattr(sampled_products, "_PIECE", 8)
    # Or more pairs than pieces of 8 take.
    monkeypatch.setattr(sampled_products, "_COLUMNS", 2 if many else 1)
    sizes = [7, 8, 0, 9, 15, 16, 1, 17, 24, 0, 3, 40, 8, 16, 24, 5, 63, *[0] * 23]
    n, v = 50, len(sizes)
    columns = np.repeat(np.arange(v + 1), [*sizes, 31])  # the last: empty slots
    end, tokens = np.cumsum(sizes), np.arange(len(columns)) % n
    pairs = column_sampling.SortedEntries(*map(jnp.asarray, (
        columns.astype(np.int32), tokens.astype(np.int32),
        np.ones(len(columns), np.float32),
    )))  # fmt: skip
    launches = sampled_products.ColumnLaunches(
        SampledLaunch(1, 2, 4), SampledLaunch(8, 8)
    )
    x = jnp.eye(n, dtype=jnp.float32)
    pieces = sampled_products.sum_pieces(
        launches.pieces, pairs, jnp.int32(len(columns) - 31), v, x
    )
    assert int(pieces.bits[0]) == (4 if many else 3)
    assert len(pieces.sums) == (v // 2 if many else -(-len(columns) // 8))
    got = sampled_products.sum_columns(launches, pairs, v, x, jnp.float32)
    for i in range(v):
        want = np.bincount(tokens[end[i] - sizes[i] : end[i]], minlength=n)
        np.testing.assert_array_equal(got[i], want)


@pytest.mark.slow
def test_sums_do_not_depend_on_the_launch(monkeypatch):
    from jaxmem.head.kernels import sampled_products

    monkeypatch.setattr(sampled_products, "_PIECE", 8)
    monkeypatch.setattr(sampled_products, "_COLUMNS", 1)
    n, v = 12, 10
    dz, _, h, W = problem(n, 300, v, 6)
    # Products without rounding: XLA for CPUs may or may not fuse them with sums.
    exponents = jnp.arange(dz.values.size).reshape(dz.values.shape) * 7 % 22
    dz = dz._replace(values=jnp.sign(dz.values) * 2.0**-exponents)
    pairs = column_sampling.sort_by_column(dz)
    like = jax.ShapeDtypeStruct(W.shape, jnp.float32)
    gradients = []
    for launch in (SampledLaunch(2, 4, 8), SampledLaunch(1, 2, 1)):
        launches = sampled_products.ColumnLaunches(launch, launch)
        dW = sampled_products.to_weights(launches, pairs, h, like, "vd")
        dhidden = sampled_products.to_hidden(launch, dz, W, "vd", jnp.float32)
        gradients.append((dW, dhidden))
    jax.tree.map(np.testing.assert_array_equal, *gradients)
