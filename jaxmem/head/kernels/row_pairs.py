"""Two heads' logits by blocks of neighbouring columns, which are read once.

A block's columns stay in registers between its maxima and its sums of terms of

    w = e^(z - max z),   v = e^(y - max y),   d = ln(w / v),

so that no term needs the row's normalisers, which another read would have to find.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jaxmem.head.kernels import block_sizes, row_blocks
from jaxmem.head.kernels.arithmetic import exp, log_ratio
from jaxmem.head.kernels.row_tiles import beside, reduce_blocks
from jaxmem.head.maths.block_sums import PairSums

WIDTH = block_sizes.PAIR_BLOCK


def parts(
    terms: Callable[..., Sequence[jax.Array]], z: jax.Array, y: jax.Array
) -> PairSums:
    """The blocks of logits z and y [C, V], float32.

    The terms are of w, v and d, arrays of one shape. In a column that is masked in both
    heads, w = v = 0 and d is NaN.
    """

    def reduce(z, y):
        (z_max, z_shift, w), (y_max, y_shift, v) = _block_exps(z), _block_exps(y)
        d = log_ratio(z, y, beside(z_shift, z.shape), beside(y_shift, y.shape))
        return z_max, y_max, *(jnp.sum(x, axis=1) for x in (w, v, *terms(w, v, d)))

    z_max, y_max, z_sum, y_sum, *sums = reduce_blocks(
        "row_pairs", reduce, (z, y), WIDTH
    )
    z_parts = row_blocks.without_largest(z, z_max, z_sum, WIDTH)
    y_parts = row_blocks.without_largest(y, y_max, y_sum, WIDTH)
    return PairSums(z_parts, y_parts, sums)


def _block_exps(z):
    """(maxima m, m or 0 where it is -inf, e^(z - m)), by blocks."""
    largest = jnp.max(z, axis=1)
    # A block of -inf has exponentials of 0, not NaN.
    shift = jnp.where(largest == -jnp.inf, 0, largest)
    return largest, shift, exp(z - beside(shift, z.shape))
