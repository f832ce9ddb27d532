"""The k largest entries of rows, against a stable sort."""

import jax
import numpy as np
import pytest

from jaxmem.head.verbs import topk
from tests.helpers.row_kernels import by_sorting

pytestmark = pytest.mark.usefixtures("quick_compilation")

top_k = jax.jit(topk.top_k, static_argnums=1)


# One, two and three levels of blocks; whole blocks and remainders.
SHAPES = [(1, 1), (1, 33), (7, 7), (7, 224), (7, 225), (1, 4097), (3, 4099), (3, 25000)]


@pytest.mark.parametrize("k, n", SHAPES)
@pytest.mark.parametrize("levels", [2, 30, 10**6], ids="{} values".format)
def test_ties_are_in_order(k, n, levels):
    rng = np.random.default_rng(n)
    x = rng.integers(-levels, levels, (5, n)).astype(np.float32) / 2
    x[0], x[1] = 0, -np.inf
    x[2] = np.where(rng.random(n) < 0.5, 0.0, -0.0)
    x[3, : n // 2] = -np.inf
    for got, want in zip(top_k(x, k), by_sorting(x, k), strict=True):
        np.testing.assert_array_equal(got, want)
        assert got.shape == (5, k)


def test_select_largest_in_one_block_or_apart():
    x = np.zeros((2, 4096), np.float32)
    x[0, 1000:1016] = np.arange(16)
    x[1, ::256] = np.arange(16)
    for row, indices in zip(x, top_k(x, 16)[1], strict=True):
        np.testing.assert_array_equal(row[indices], np.arange(15, -1, -1))
