"""Selection of each token's sampled entries from stored exponentials.

The forward kernel stores e^(z - m) in 16 bits, m the largest logit of a tile, and each
tile's m and sum. They give upper bounds of the units (`maths.column_sampling`) of a
tile's columns, by which `sampled_blocks` selects entries.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxmem.head.kernels import sampled_blocks
from jaxmem.head.kernels.forward import Kept
from jaxmem.head.maths import column_sampling
from jaxmem.head.maths.block_sums import Density
from jaxmem.head.maths.column_sampling import Entries, Sampling
from jaxmem.head.maths.row_stats import Normaliser

# A bound's relative error: rounding of exponentials to bfloat16, and of their sums.
_ROUNDED = 2.0**-8 + 2.0**-12
# Absolute errors relative to a tile's largest: subnormal float16, and the rounding of
# m, which grows with |m|.
_BELOW, _OF_MAX = 2.0**-16, 2.0**-22
# Of `Sampling`: relative excess of the bounds over the units.
MARGIN = column_sampling.MARGIN


class RowFacts(NamedTuple):
    """Facts of rows that select entries besides the exponentials; arrays [n_rows]."""

    labels: jax.Array  # int32
    label_logit: jax.Array
    max: jax.Array  # of this shard of the vocabulary
    normaliser: Normaliser  # of the whole vocabulary


def entries(
    sampling: Sampling, width: int, kept: Kept, rows: RowFacts, starts_of: Callable,
    n_active,
) -> Entries:  # fmt: skip
    """Entries [n_rows, K] of the first n_active rows, whose exponentials are stored.

    Exponentials are 0 at the labels; columns from V on are ignored. `starts_of` maps
    the sums of the rows' bounds to their starts.
    """
    scale = column_sampling.scale(kept.max, rows.normaliser)
    tile_bounds = bounds(sampling, width, kept, rows, scale)
    active = jnp.arange(tile_bounds.shape[1]) < n_active
    exps = jnp.pad(kept.exps, ((0, 0), (0, max(width - kept.exps.shape[1], 0))))
    density = Density(lax.mul, (exps,), (scale.T,))
    tile_bounds = jnp.where(active, tile_bounds, 0).T
    starts = starts_of(jnp.sum(tile_bounds, axis=1))
    return sampled_blocks.select(sampling, density, tile_bounds, width, starts)


def bounds(sampling, width, kept: Kept, rows: RowFacts, scale) -> jax.Array:
    """Upper bounds of the sum of units of a tile's columns, int32 [n_tiles, n_rows].

    The largest exponential of a tile is 1 and its column is kept at most once. Unless
    it is the label's, the bound is the smaller one of that of all columns, and that of
    the other columns plus one. `scale` makes probabilities of the exponentials.
    """
    tile = jnp.arange(len(scale), dtype=jnp.int32)[:, None]
    label_on_top = (lax.div(rows.labels, width) == tile) & (
        rows.label_logit >= kept.max
    )
    below = _BELOW + jnp.abs(rows.max) * _OF_MAX

    def bound_of(sums):
        return sampling.rate * scale * (sums * (1 + _ROUNDED) + below)

    uncapped = bound_of(kept.sums)
    capped = 1 + bound_of(jnp.maximum(kept.sums - 1, 0))
    bound = jnp.where(label_on_top, uncapped, jnp.minimum(uncapped, capped))
    units = jnp.ceil(bound * sampling.one).astype(jnp.int32) + width
    return jnp.where(scale > 0, units, 0)
