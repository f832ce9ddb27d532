"""Finds where running sums of a row of integers reach given numbers, by a binary tree.

The leaves of the tree are sums of `_GROUP` neighbouring columns. The group that reaches
a number is found by descending, and its columns' integers are computed once more, so
that those of all columns need not be stored. The arithmetic of integers is exact.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

_GROUP = 16  # columns of a leaf, a power of two


def tree(units: jax.Array) -> list[jax.Array]:
    """Sums of columns of units, int32 [C, V], not negative, level by level.

    The first level, [C, 1], has the rows' sums, which fit int32.
    """
    return levels_above(_group_sums(units))


def levels_above(leaves: jax.Array) -> list[jax.Array]:
    """The levels of a tree with these leaves, int32 [C, n], which are its last."""
    levels = [leaves]
    while levels[0].shape[1] > 1:
        even = jnp.pad(levels[0], ((0, 0), (0, levels[0].shape[1] % 2)))
        levels.insert(0, even[:, ::2] + even[:, 1::2])
    return levels


def find(
    levels: list[jax.Array],
    units_of: Callable[[jax.Array], jax.Array],
    x: jax.Array,
    targets: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(exists, column, entry of x): the first whose running sum reaches each target.

    Targets, int32 [C, K], are at least 1. The levels are `tree(units_of(x))`, where
    `units_of` takes any entries of x [C, V], the rows' axis first. Where no running sum
    reaches the target, exists is False and the others have no meaning.
    """
    exists, group, rest = descend(levels, targets)
    columns, entries = window(x, group, _GROUP)
    inside = (columns >= group[..., None] * _GROUP) & (columns < x.shape[1])
    units = jnp.where(inside, units_of(entries), 0)
    column, entry = reach(units, (columns, entries), rest)
    return exists, column, entry


def descend(
    levels: list[jax.Array], targets: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(exists, leaf, rest of the target): the first leaf that reaches each target.

    The rest is what the target, int32 [C, K] and at least 1, exceeds the sum before the
    leaf by.
    """
    exists = targets <= levels[0]
    leaf, rest = jnp.zeros_like(targets), targets
    for sums in levels[1:]:
        left = jnp.take_along_axis(sums, 2 * leaf, axis=1, mode="promise_in_bounds")
        right = rest > left
        rest = rest - jnp.where(right, left, 0)
        leaf = jnp.minimum(2 * leaf + right.astype(leaf.dtype), sums.shape[1] - 1)
    return exists, leaf, rest


def _group_sums(units):
    """Sums of `_GROUP` neighbours each, [C, n]; the last group may have fewer."""
    n_rows, n_columns = units.shape
    whole = n_columns // _GROUP * _GROUP
    groups = units[:, :whole].reshape(n_rows, -1, _GROUP)
    sums = jnp.sum(groups, axis=-1, dtype=jnp.int32)
    if whole == n_columns:
        return sums
    last_sum = jnp.sum(units[:, whole:], axis=1, keepdims=True, dtype=jnp.int32)
    return jnp.concatenate([sums, last_sum], axis=1)


def window(x: jax.Array, leaf: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
    """(columns, entries of x [C, V]) of leaves [C, K], [C, K, width] each.

    They are those of the leaf, or the last ones of the row; x counts as 0 beyond V.
    """
    x = jnp.pad(x, ((0, 0), (0, max(width - x.shape[1], 0))))
    first = jnp.minimum(leaf * width, x.shape[1] - width)

    def read_leaf(row, first):
        return lax.dynamic_slice(row, (first,), (width,))

    entries = jax.vmap(jax.vmap(read_leaf, (None, 0)))(x, first)
    return first[..., None] + jnp.arange(width, dtype=jnp.int32)[None, None], entries


def reach(units: jax.Array, values, rest: jax.Array) -> list[jax.Array]:
    """The values [C, K] of each window where the running sum of units reaches `rest`.

    Units and values are [C, K, width], the width a power of two; `rest` is at least 1
    and at most the sum of the units.
    """
    while (n := units.shape[-1]) > 1:
        left = jnp.sum(units[..., : n // 2], axis=-1, dtype=jnp.int32)
        right = rest > left
        rest = rest - jnp.where(right, left, 0)
        units, *values = (
            jnp.where(right[..., None], x[..., n // 2 :], x[..., : n // 2])
            for x in (units, *values)
        )
    return [x[..., 0] for x in values]
