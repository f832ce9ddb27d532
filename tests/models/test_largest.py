"""The largest numbers without a sort of all, against one."""

import jax
import numpy as np
import pytest

from jaxmem.models import largest

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.parametrize("count", [1, 2, 5, 20])
@pytest.mark.parametrize("size", [40, 6400, 6401])
def test_largest_prefers_lower_index_of_equals(size, count):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, size)).astype(np.float32)
    x[1] = np.round(4 * x[1])  # many are equal, across blocks
    x[2] = 0
    x[3, ::2] = -np.inf
    x[3, -1] = 9
    values, places = jax.jit(largest.top, static_argnums=1)(x, count)
    want = np.argsort(-x, axis=1, kind="stable")[:, :count]
    np.testing.assert_array_equal(places, want)
    np.testing.assert_array_equal(values, np.take_along_axis(x, want, axis=1))


@pytest.mark.parametrize("share", [1e-6, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0, 8.0])
def test_nucleus_keeps_fewest_with_share(share, spread):
    z = spread * np.random.default_rng(0).normal(size=(6, 300)).astype(np.float32)
    z[1] = np.round(z[1])  # many are equal
    z[2, ::3] = -np.inf
    z -= z.max(axis=1, keepdims=True)
    kept = np.asarray(jax.jit(largest.nucleus, static_argnums=1)(z, share))
    for row, mask in zip(z.astype(np.float64), kept, strict=True):
        order = np.argsort(-row, kind="stable")
        p = np.exp(row[order]) / np.exp(row).sum()
        before = np.cumsum(p) - p
        # The sums of float32 numbers decide, so a number at the border may be either.
        certain = np.abs(before - share) > 1e-6
        np.testing.assert_array_equal(mask[order][certain], (before < share)[certain])
        count = mask.sum()
        np.testing.assert_array_equal(mask[order], np.arange(300) < count)


def test_few_numbers_are_sorted():
    x = jax.ShapeDtypeStruct((2, 151_936), "float32")
    text = jax.jit(largest.top, static_argnums=1).lower(x, 50).as_text()
    sorts = [line for line in text.splitlines() if "chlo.top_k" in line]
    assert sorts and not any("151936" in line for line in sorts)
