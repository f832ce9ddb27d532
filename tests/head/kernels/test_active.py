"""Active rows first, and back: each row exactly once, whatever the mask."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.head.kernels import active

N = 300
MASKS = {
    "none": np.zeros(N, bool),
    "all": np.ones(N, bool),
    "last": np.arange(N) == N - 1,
    "some": np.random.default_rng(0).random(N) < 0.4,
}


@pytest.mark.full
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("size", [N, 512])
def test_active_rows_come_first_in_their_order(mask, size):
    block = active.in_one_block(jnp.asarray(MASKS[mask]), size)
    (want,) = np.nonzero(MASKS[mask])
    assert block.n_active == len(want)
    np.testing.assert_array_equal(block.ids[: len(want)], want)
    assert np.all(block.ids[len(want) :] >= N) and block.ids.shape == (size,)
    np.testing.assert_array_equal(block.position[want], np.arange(len(want)))
    assert np.all(block.position[~MASKS[mask]] == size)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("size", [64, 100, 512])
def test_active_rows_are_in_one_block_each(mask, size):
    """Each is given its number by the block that has it; the others keep theirs."""

    def body(block, carry):
        made, n = carry
        assert block.ids.shape == (size,)
        twice = 2.0 * block.ids
        return active.put({"x": made}, block, {"x": twice})["x"], n + block.n_active

    start = jnp.full(N, -1.0), jnp.int32(0)
    made, n = active.for_each_block(jnp.asarray(MASKS[mask]), size, body, start)
    assert n == MASKS[mask].sum()
    np.testing.assert_array_equal(made, np.where(MASKS[mask], 2.0 * np.arange(N), -1))
