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

from jaxmem.kernels.row_blocks import Parts, exponentials
from jaxmem.kernels.typed import alike, result

WIDTH = 128  # columns of a block
_TILE = 2048  # columns of a program
_WARPS = 4


class Pairs(NamedTuple):
    """Of each block of both heads' logits, float32 [C, ⌈V / WIDTH⌉]."""

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
    found = pl.pallas_call(
        functools.partial(_reduce_blocks, terms, columns),
        grid=(n_rows, pl.cdiv(columns, _TILE)),
        in_specs=[pl.no_block_spec] * 2,
        out_specs=[pl.no_block_spec] * (4 + n_terms),
        out_shape=[result(shape, jnp.float32, *operands)] * (4 + n_terms),
        compiler_params=plt.CompilerParams(num_warps=_WARPS, num_stages=1),
        name="row_pairs",
    )(*operands)
    return Pairs(Parts(*found[:2]), Parts(*found[2:4]), found[4:])


def _reduce_blocks(terms, columns, z_ref, y_ref, *refs):
    row, tile = pl.program_id(0), pl.program_id(1)
    block = tile * (_TILE // WIDTH) + jnp.arange(_TILE // WIDTH, dtype=jnp.int32)
    column = block[:, None] * WIDTH + jnp.arange(WIDTH, dtype=jnp.int32)[None]
    z, y = (
        plt.load(ref.at[row, column], mask=column < columns, other=-jnp.inf)
        for ref in (z_ref, y_ref)
    )
    z_max, z_shift, w, z_others = exponentials(z)
    y_max, y_shift, v, y_others = exponentials(y)
    d = (z - y) - (z_shift - y_shift)[:, None]
    sums = (jnp.sum(x, axis=1) for x in terms(w, v, d))
    there = block < pl.cdiv(columns, WIDTH)
    found = z_max, z_others, y_max, y_others, *sums
    for ref, x in zip(refs, found, strict=True):
        plt.store(ref.at[row, block], x, mask=there)
