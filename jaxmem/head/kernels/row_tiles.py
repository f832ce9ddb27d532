"""Parts of rows that are in memory, as arrays in registers.

Rows follow each other without padding, so that the length of a row decides how many
numbers a thread can load at once.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxmem.head.kernels import typed

TILE = 2048  # columns of a program
PARAMS = plgpu.CompilerParams(approx_math=True)


def load(ref: Any, shape: tuple[int, ...], layout: Any) -> Any:
    """Numbers that follow each other, as an array of a shape and layout."""
    return plgpu.load(ref.reshape(shape), layout=layout, optimized=False)


def at_once(columns: int, most: int = 4) -> int:
    """Numbers of a row that a thread can load at once, a power of two."""
    return math.gcd(columns, most)


def reduce_blocks(
    name: str,
    function: Callable[..., Sequence[Any]],
    tiles: Sequence[jax.Array],
    width: int,
) -> list[jax.Array]:
    """The results of a function of blocks of columns, float32 [C, ⌈V / width⌉] each.

    The function takes float32 tiles [blocks, columns] and returns arrays [blocks]. The
    width of a block is a power of two from 16 to 512; the last one may be narrower. V
    is at least TILE.
    """
    operands = typed.alike(*tiles)
    n_rows, columns = operands[0].shape
    n_blocks, size, n = columns // width, TILE // width, len(operands)
    layout = _block_layout(size, width, at_once(columns))

    def reduce_tile(*refs):
        row = lax.axis_index("row")
        first = jnp.minimum(lax.axis_index("tile") * size, n_blocks - size)
        columns = pl.ds(first * width, TILE)
        loaded = [load(r.at[row, columns], (size, width), layout) for r in refs[:n]]
        for ref, x in zip(refs[n:], function(*loaded), strict=True):
            store(ref.at[row, pl.ds(first, size)], x)

    tail = [x[:, n_blocks * width :] for x in operands]
    reduce_tile.__name__ = name
    block = jax.ShapeDtypeStruct((size, width), jnp.float32)
    n_results = len(jax.eval_shape(function, *[block] * n))
    out = jax.ShapeDtypeStruct((n_rows, n_blocks), jnp.float32)
    grid = {"tile": pl.cdiv(n_blocks, size), "row": n_rows}
    results = typed.launch(reduce_tile, (out,) * n_results, grid, PARAMS, operands)
    if n_blocks * width == columns:
        return list(results)
    pairs = zip(results, function(*tail), strict=True)
    joined = [jnp.concatenate([x, last[:, None]], axis=1) for x, last in pairs]
    # If the sums were fused with their readers, each reader would round them its way.
    return lax.optimization_barrier(joined)


def store(ref: Any, x: Any) -> None:
    """Stores x, even if a warp has less than the 32 bytes that memory takes at once."""
    if hasattr(plgpu, "store"):  # jax 0.12, which refuses that below
        plgpu.store(ref, x, optimized=False)
    else:
        ref[...] = x


def _block_layout(size, width, at_once):
    """A thread has 16 columns of one block, so that few threads exchange results."""
    lanes = 4 * 32 // size
    tiling = ((size, width), (size // 4, lanes * at_once), (at_once,))
    return plgpu.Layout.TILED(
        plgpu.Tiling(tiling), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
    )


def beside(x: Any, shape: tuple[int, ...]) -> Any:
    """Numbers of rows, over their columns."""
    return lax.broadcast_in_dim(x, shape, (0,))
