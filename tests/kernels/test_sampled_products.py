"""Weighted sums of rows, interpreted: long segments, empty ones, both layouts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem import _sampled_xla
from jaxmem._sampled import Derivative
from tests.kernels import needs_pallas

pytestmark = [needs_pallas, pytest.mark.usefixtures("triton_interpreted")]


def problem(n, d, v, slots, seed=0):
    """Entries of which many are of column 3, some slots are empty, some rows too."""
    rng = np.random.default_rng(seed)
    columns = np.stack([rng.permutation(v)[:slots] for _ in range(n)]).astype(np.int32)
    columns[::2, 0] = 3
    columns[rng.random((n, slots)) < 0.3] = v
    columns[n // 2] = v
    values = np.where(columns < v, rng.standard_normal((n, slots)), 0)
    dz = Derivative(jnp.asarray(columns), jnp.asarray(values, jnp.float32))
    dense = np.zeros((n, v + 1))
    np.add.at(dense, (np.arange(n)[:, None], columns), values)
    h, W = rng.standard_normal((n, d)), rng.standard_normal((v, d))
    return dz, dense[:, :v], jnp.asarray(h, jnp.bfloat16), jnp.asarray(W, jnp.bfloat16)


@pytest.mark.parametrize("layout", ["vd", "dv"])
@pytest.mark.parametrize("d", [16, 40])
def test_both_gradients(d, layout, monkeypatch):
    from jaxmem.kernels import sampled_products as products

    monkeypatch.setattr(products, "PIECE", 8)
    monkeypatch.setattr(products, "_TRANSPOSED_DEPTH", 16)
    n, v = 60, 50
    dz, dense, h, W = problem(n, d, v, 6)
    launch = products.Launch(16, 4, 1)
    given = W if layout == "vd" else W.T
    got = products.to_hidden(dz, given, layout, jnp.float32, launch)
    np.testing.assert_allclose(got, dense @ np.float64(W), rtol=1e-5, atol=1e-5)
    pairs = _sampled_xla.sort_by_column(dz)
    like = jax.ShapeDtypeStruct(given.shape, jnp.float32)
    got = products.to_weights(pairs, h, like, layout, launch)
    got = got if layout == "vd" else got.T
    np.testing.assert_allclose(got, dense.T @ np.float64(h), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(np.asarray(got)[~dense.any(0)], 0)
    bias = products.to_bias(pairs, n, v)
    np.testing.assert_allclose(bias, dense.sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [7, 8, 9, 15, 16, 17, 24, 40])
def test_a_long_segment_counts_each_pair_once(length, monkeypatch):
    """Wherever it begins among the pieces."""
    from jaxmem.kernels import sampled_products as products

    monkeypatch.setattr(products, "PIECE", 8)
    x = jnp.eye(50, dtype=jnp.float32)
    sizes = np.array([0, length % 5, length, 3, 0, 0, length + 1])
    end = np.cumsum(sizes).astype(np.int32)
    n = 50 * 8
    rows = np.arange(n) % 50
    segments = products.Segments(
        *map(jnp.asarray, (end - sizes.astype(np.int32), end,
                           rows.astype(np.int32), np.ones(n, np.float32)))
    )  # fmt: skip
    launch = products.Launch(64, 2, 1)
    got = products.sum_rows(launch, segments, x, jnp.float32, pieces=True)
    for i, size in enumerate(sizes):
        want = np.bincount(rows[end[i] - size : end[i]], minlength=50)
        np.testing.assert_array_equal(got[i], want)
