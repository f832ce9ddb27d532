"""The schedule: which tiles of the vocabulary are reduced for a row, in which order."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.head.kernels.tiles import Tiles
from tests.helpers.cases import one_at_a_time
from tests.helpers.interpreter import needs_pallas

pytestmark = needs_pallas

MAX_ROWS, MAX_TILES = 1000, 7
TILES = {
    "pairs": Tiles(group=2, cluster=2, panel=8),
    "threes": Tiles(group=3, panel=2),
    "single": Tiles(group=1),
}


def recorder(tiles, n_blocks):
    """Function of (n_rows, n_tiles): the units of every block, in its order.

    A unit is [first row, number of tiles, tile 0, tile 1, ...].
    """
    from jaxmem.head.kernels import ring

    product = ring.RingProduct(tiles, np.dtype(jnp.bfloat16), "mk", "nk", n_blocks)
    most_units = (MAX_ROWS // tiles.block_rows + 2) * MAX_TILES

    @jax.jit
    def units(n_rows, n_tiles):
        def record(tile, n, carry):
            step, log = carry
            columns = [tile(i).column for i in range(tiles.group)]
            unit = jnp.stack([tile(0).first_row, n, *columns])
            return step + 1, log.at[step].set(unit)

        def of_block(_cluster, _peer):
            log = jnp.zeros((most_units, 2 + tiles.group), jnp.int32)
            extent = ring.Extent(n_rows, n_tiles, n_steps=1)
            return ring.for_each_unit(product, extent, record, (jnp.int32(0), log))

        of_cluster = jax.vmap(of_block, (None, 0), axis_name="peer")
        of_chip = jax.vmap(of_cluster, (0, None), axis_name="cluster")
        return of_chip(jnp.arange(product.n_clusters), jnp.arange(tiles.cluster))

    def recorded(n_rows, n_tiles):
        counts, logs = map(np.asarray, units(n_rows, n_tiles))
        logs = logs.reshape(-1, *logs.shape[2:])
        return [log[:n] for n, log in zip(counts.ravel(), logs, strict=True)]

    return recorded


@pytest.mark.parametrize("name, n_blocks", one_at_a_time(TILES, [1, 3, 132]))
def test_row_sums_order_is_batch_invariant(name, n_blocks):
    """Exactly: it depends on the number of tiles, not on the number of active rows.

    Active rows come first, so a row's place depends on which others are active. With
    arithmetic that treats the rows of a tile alike, as the chip's does (asserted on the
    chip, bit by bit), its statistics do not.
    """
    tiles = TILES[name]
    record = recorder(tiles, n_blocks)
    for n_rows, n_tiles in itertools.product((1, 47, 140, 256, MAX_ROWS), (1, 4, 7)):
        n_groups = -(-n_tiles // tiles.group)
        want = {tuple(range(g, n_tiles, n_groups)) for g in range(n_groups)}
        reduced = {}
        for row, n, *columns in np.concatenate(record(n_rows, n_tiles)).tolist():
            reduced.setdefault(row, []).append(tuple(columns[:n]))
        # Blocks of a cluster go together: the last of them may have no active row.
        assert reduced.keys() >= set(range(0, n_rows, tiles.block_rows))
        for groups in reduced.values():
            assert len(groups) == len(want) and set(groups) == want
