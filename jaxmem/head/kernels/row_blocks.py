"""Rows of logits by blocks of neighbours.

One read of the logits gives the largest logit of each block and the sum of the other
exponentials relative to it. The row's normaliser follows from these few numbers, as do
the blocks that the row's k largest logits are in, and the mass of each block.
"""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmem.head.kernels import block_sizes, row_sums, typed
from jaxmem.head.kernels.row_tiles import PARAMS, beside, reduce_blocks
from jaxmem.head.maths import running_sums
from jaxmem.head.maths.block_sums import BlockSums

WIDTH = block_sizes.ROW_BLOCK
_MAX_BLOCKS = 16384  # whose maxima registers hold
_MAX_K = 256  # entries to select, one after another
_LOWEST, _NAN = np.int32(-(2**31)), np.int32(2**31 - 1)


def supports(columns: int, dtype: Any, k: int = 1) -> bool:
    """True if the kernels take rows of this length and type, and select k of each."""
    fits = pl.cdiv(columns, WIDTH) <= _MAX_BLOCKS and k <= _MAX_K
    return row_sums.supports(columns, dtype) and fits


def parts(z: jax.Array) -> BlockSums:
    """The blocks of logits z [C, V], float32, all -inf beyond V."""
    return BlockSums(*reduce_blocks("row_blocks", _largest_and_others, (z,), WIDTH))


def _largest_and_others(z):
    largest = jnp.max(z, axis=1)
    is_largest = z == beside(largest, z.shape)
    # A block of -inf has exponentials of 0, not NaN.
    exps = jnp.exp(z - beside(jnp.where(largest == -jnp.inf, 0, largest), z.shape))
    others = jnp.sum(jnp.where(is_largest, 0, exps), axis=1)
    return largest, others + (jnp.sum(jnp.where(is_largest, 1.0, 0.0), axis=1) - 1)


def without_largest(z: jax.Array, largest, sums, width: int) -> BlockSums:
    """`BlockSums` of blocks of some width, from sums with the 1 of a largest logit.

    Subtracting it loses a small sum, which matters in the row's first block alone.
    """
    first = jnp.argmax(largest, axis=1)[:, None]
    column, entries = running_sums.window(z, first, width)
    inside = (column >= first[..., None] * width) & (column < z.shape[1])
    entries = jnp.where(inside, entries, -jnp.inf)[:, 0]
    row_max = jnp.max(largest, axis=1, keepdims=True)
    is_largest = entries >= row_max
    others = jnp.where(is_largest, 0, jnp.exp(entries - row_max))
    others = jnp.sum(others, axis=1) + (jnp.sum(is_largest, axis=1) - 1)
    block = jnp.arange(largest.shape[1], dtype=jnp.int32)
    return BlockSums(largest, jnp.where(block == first, others[:, None], sums - 1))


def top_k(z: jax.Array, largest: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k largest of rows of logits and their columns, largest first, equal in order.

    The next one is in the block with the largest maximum, which is read again: it also
    gives the maximum of what is left of that block. See `supports` for k.
    """
    n_rows, columns = z.shape
    n = pl.cdiv(largest.shape[1], 128) * 128
    keys = jnp.pad(
        _to_ordered(largest),
        ((0, 0), (0, n - largest.shape[1])),
        constant_values=_LOWEST,
    )
    out = jax.ShapeDtypeStruct((n_rows, k), jnp.int32)
    select = _selection_kernel(columns, n, k)
    keys, ids = typed.launch(select, (out, out), {"row": n_rows}, PARAMS, (keys, z))
    return _from_ordered(keys), ids


def _selection_kernel(columns, n, k):
    """The kernel of `top_k` for rows of n maxima, padded."""
    # Two columns of a block for each thread of a warp, and the same for all warps.
    block_layout = plgpu.Layout.TILED(
        plgpu.Tiling(((WIDTH,), (32,), (1,))),
        warp_dims=(plgpu.Replicated(4),), lane_dims=(-2,), vector_dim=-1,
    )  # fmt: skip
    row_layout = plgpu.Layout.WG_STRIDED((n,), 1)

    def row_select(largest_ref, z_ref, keys_ref, columns_ref):
        row = lax.axis_index("row")
        block_ids = lax.broadcasted_iota(jnp.int32, (n,), 0)
        lane = lax.broadcasted_iota(jnp.int32, (WIDTH,), 0)
        lane = plgpu.layout_cast(lane, block_layout)

        def select_next(i, carry):
            largest, last_key, last_column = carry
            key = jnp.max(largest)
            block = -jnp.max(jnp.where(largest == key, -block_ids, -n))
            first = jnp.minimum(block * WIDTH, columns - WIDTH)
            z = z_ref.at[row, pl.ds(first, WIDTH)]
            z = _to_ordered(plgpu.load(z, layout=block_layout, optimized=False))
            columns_read = first + lane
            # Of equal logits, those in columns up to the last one are taken.
            last_taken = jnp.where(key == last_key, last_column, -1)
            equal = (z == key) & (columns_read > last_taken)
            equal = equal & (columns_read >= block * WIDTH)
            column = -jnp.max(jnp.where(equal, -columns_read, -columns))
            remaining = (z < key) & (columns_read >= block * WIDTH)
            remaining = remaining | equal & (columns_read > column)
            remaining = jnp.max(jnp.where(remaining, z, _LOWEST))
            keys_ref[row, i], columns_ref[row, i] = key, column
            return jnp.where(block_ids == block, remaining, largest), key, column

        largest = plgpu.load(largest_ref.at[row], layout=row_layout, optimized=False)
        # The result of an operation has the type of the carry in `jax.shard_map`.
        largest = jnp.maximum(largest, _LOWEST)
        lax.fori_loop(0, k, select_next, (largest, _LOWEST, jnp.int32(-1)))

    return row_select


def _to_ordered(x):
    """int32 in the order of float32 x, in which -0 is 0 and NaN comes last."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)
    return jnp.where(x != x, _NAN, jnp.where(bits < 0, bits ^ _NAN, bits))


def _from_ordered(keys):
    """The float32 numbers of `_to_ordered`."""
    x = lax.bitcast_convert_type(jnp.where(keys < 0, keys ^ _NAN, keys), jnp.float32)
    return jnp.where(keys == _NAN, jnp.nan, x)
