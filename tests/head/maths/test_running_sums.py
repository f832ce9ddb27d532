"""Columns at which running sums of integers reach a number, against numpy's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.head.maths import running_sums
from tests.helpers.cases import slow

pytestmark = pytest.mark.usefixtures("quick_compilation")


def units_of(x):
    return (4 * x).astype(jnp.int32)


@jax.jit
def find(x, targets):
    return running_sums.find(running_sums.tree(units_of(x)), units_of, x, targets)


@pytest.mark.parametrize("v", [1, 15, 16, 300, slow(17), slow(33), slow(4099)])
def test_first_column_to_reach_each_target(v):
    rng = np.random.default_rng(v)
    x = (rng.integers(0, 5, (4, v)) * (rng.random((4, v)) < 0.5) / 4).astype("f")
    x[0], x[1, -1], x[2, :-1] = 0, 0.5, 0
    ends = np.cumsum(units_of(x), axis=1)
    targets = rng.integers(1, 2 * v + 2, (4, 9)).astype(np.int32)
    targets[:, 0], targets[:, 1] = 1, np.maximum(ends[:, -1], 1)
    targets[:, 2] = ends[:, -1] + 1
    exists, column, entry = map(np.asarray, find(x, targets))
    np.testing.assert_array_equal(exists, targets <= ends[:, -1:])
    assert exists.any() and not exists.all()
    for i, j in np.argwhere(exists):
        want = np.searchsorted(ends[i], targets[i, j])
        assert (column[i, j], entry[i, j]) == (want, x[i, want])
