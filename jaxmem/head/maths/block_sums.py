"""Sums over blocks of neighbouring columns of logits in memory.

A backend that reads logits once reduces each block to few numbers, relative to the
block's largest logit. The normaliser of the rows follows from them.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxmem.head.maths.row_stats import Normaliser


class BlockSums(NamedTuple):
    """Sums of each block of logits, float32 [C, n]."""

    largest: jax.Array  # m, the largest logit
    others: jax.Array  # Σ e^(z - m) without the 1 of a largest logit


class PairSums(NamedTuple):
    """Sums of each block of both heads' logits, float32 [C, n]."""

    z: BlockSums
    y: BlockSums
    sums: Sequence[jax.Array]  # an array for each of the terms


class Masses(NamedTuple):
    """Σ density over blocks of `width` columns, [C, n]."""

    width: int
    whole: jax.Array
    others: jax.Array  # without `tops` columns
    tops: int


class Density(NamedTuple):
    """Probabilities of columns, from what is in memory.

    Attributes:
        function: from tiles [width], numbers of their block [] and of their row [], all
            float32, to probabilities [width].
        tiles: its first arguments, [C, V]; the tiles have no columns from V on.
        blocks: the next ones, [C, n].
        rows: the last ones, [C].
    """

    function: Callable[..., jax.Array]
    tiles: tuple[jax.Array, ...]
    blocks: tuple[jax.Array, ...] = ()
    rows: tuple[jax.Array, ...] = ()


def normaliser(blocks: BlockSums) -> Normaliser:
    """The normaliser of the rows; see `maths.row_stats.normaliser`."""
    largest, others = blocks
    row_max = jnp.max(largest, axis=1)
    is_largest = largest == row_max[:, None]
    scaled = (others + 1) * jnp.exp(largest - row_max[:, None])
    # Without the 1 of a largest logit: adding and subtracting it loses a small sum.
    smaller = jnp.sum(jnp.where(is_largest, others, scaled), axis=1)
    smaller += jnp.sum(is_largest.astype(jnp.float32), axis=1) - 1
    return Normaliser(row_max, jnp.log1p(jnp.where(row_max == -jnp.inf, -1, smaller)))
