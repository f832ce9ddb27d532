"""Two heads' logits by blocks of neighbouring columns, by Pallas's Triton backend.

One read of both heads' logits z and y gives, for each block of columns, what
`row_blocks.Parts` has of either head, and sums over the block of terms of

    w = e^(z - max z),   v = e^(y - max y),   d = ln(w / v),

maxima over the block. The block's columns stay in registers between the maxima and the
sums, so that no term needs the row's normalisers, which another read would have to find
first. What the sums over the row are follows from these few numbers.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.triton as plt
import jax.numpy as jnp

from jaxmem.kernels import row_blocks, row_sums
from jaxmem.kernels.arithmetic import exp
from jaxmem.kernels.row_blocks import Parts
from jaxmem.kernels.typed import alike, result

WIDTH = 128  # columns of a block
_LANES = 64  # neighbouring columns that are loaded at once
_TILE = 2048  # columns of a program at a time
_WARPS = 4


class Pairs(NamedTuple):
    """Sums of each block of both heads' logits, float32 [C, ⌈V / WIDTH⌉]."""

    z: Parts
    y: Parts
    sums: Sequence[jax.Array]  # an array for each of the terms


def parts(
    terms: Callable[..., Sequence[jax.Array]], z: jax.Array, y: jax.Array
) -> Pairs:
    """The blocks of logits z and y [C, V], float32.

    Args:
        terms: of w, v and d, arrays of one shape, to arrays of that shape. In a column
            beyond V, or masked in both heads, w = v = 0 and d is NaN.
        z: logits.
        y: logits of the other head.

    Returns:
        The blocks.
    """
    operands = alike(z, y)
    n_rows, columns = z.shape
    one = jax.ShapeDtypeStruct((), jnp.float32)
    n_terms = len(jax.eval_shape(terms, one, one, one))
    shape = n_rows, pl.cdiv(columns, WIDTH)
    z_max, y_max, z_sum, y_sum, *sums = pl.pallas_call(
        functools.partial(_reduce_blocks, terms, columns),
        grid=(n_rows, row_sums.SHARES),
        in_specs=[pl.no_block_spec] * 2,
        out_specs=[pl.no_block_spec] * (4 + n_terms),
        out_shape=[result(shape, jnp.float32, *operands)] * (4 + n_terms),
        compiler_params=plt.CompilerParams(num_warps=_WARPS, num_stages=1),
        name="row_pairs",
    )(*operands)
    z_parts = row_blocks.without_largest(z, z_max, z_sum, WIDTH)
    y_parts = row_blocks.without_largest(y, y_max, y_sum, WIDTH)
    return Pairs(z_parts, y_parts, sums)


def _reduce_blocks(terms, columns, z_ref, y_ref, *refs):
    row, n_blocks = pl.program_id(0), _TILE // WIDTH
    part = jnp.arange(WIDTH // _LANES, dtype=jnp.int32)[:, None, None]
    lane = jnp.arange(_LANES, dtype=jnp.int32)[None, None]

    def tile(i, carry):
        block = i * n_blocks + jnp.arange(n_blocks, dtype=jnp.int32)
        column = block[None, :, None] * WIDTH + part * _LANES + lane
        z, y = (
            plt.load(ref.at[row, column], mask=column < columns, other=-jnp.inf)
            for ref in (z_ref, y_ref)
        )
        (z_max, z_shift, w), (y_max, y_shift, v) = _exps(z), _exps(y)
        d = (z - y) - (z_shift - y_shift)[None, :, None]
        sums = (_reduce(jnp.sum, x) for x in (w, v, *terms(w, v, d)))
        there = block < pl.cdiv(columns, WIDTH)
        for ref, x in zip(refs, (z_max, y_max, *sums), strict=True):
            plt.store(ref.at[row, block], x, mask=there)
        return carry

    row_sums.for_each_block(columns, _TILE, tile, 0)


def _reduce(function, x):
    """Over parts and lanes. A thread has all parts, so that few lanes exchange."""
    return function(function(x, axis=0), axis=1)


def _exps(z):
    """(maxima m, m or 0 where it is -inf, e^(z - m)), by blocks."""
    largest = _reduce(jnp.max, z)
    # A block of -inf has exponentials of 0, not NaN.
    shift = jnp.where(largest == -jnp.inf, 0, largest)
    return largest, shift, exp(z - shift[None, :, None])
