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
    """Sums of columns, level by level; the first level, [C, 1], has the rows' sums.

    Args:
        units: int32 [C, V], not negative; a row's sum fits int32.
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
    """The first column of each row whose running sum is at least each target.

    Args:
        levels: `tree(units_of(x))`.
        units_of: the integers of entries of x, whose first axis is that of the rows.
        x: [C, V].
        targets: int32 [C, K], at least 1.

    Returns:
        (exists, column, entry of x there), [C, K] each. Where no running sum reaches
        the target, exists is False and the others have no meaning.
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
    """The first leaf of each row whose running sum is at least each target.

    Args:
        levels: of `tree` or `levels_above`.
        targets: int32 [C, K], at least 1.

    Returns:
        (exists, leaf, what the target exceeds the sum before the leaf by), [C, K] each.
    """
    exists = targets <= levels[0]
    leaf, rest = jnp.zeros_like(targets), targets
    for sums in levels[1:]:
        left = jnp.take_along_axis(sums, 2 * leaf, axis=1, mode="promise_in_bounds")
        right = rest > left
        rest = rest - jnp.where(right, left, 0)
        leaf = jnp.minimum(2 * leaf + right, sums.shape[1] - 1)
    return exists, leaf, rest


def _group_sums(units):
    """Sums of `_GROUP` neighbours each, [C, n]; the last group may have fewer."""
    n_rows, n_columns = units.shape
    whole = n_columns // _GROUP * _GROUP
    groups = units[:, :whole].reshape(n_rows, -1, _GROUP)
    sums = jnp.sum(groups, axis=-1, dtype=jnp.int32)
    if whole == n_columns:
        return sums
    rest = jnp.sum(units[:, whole:], axis=1, keepdims=True, dtype=jnp.int32)
    return jnp.concatenate([sums, rest], axis=1)


def window(x: jax.Array, leaf: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
    """Columns and entries of leaves, or the last ones of the row.

    Args:
        x: [C, V].
        leaf: int32 [C, K].
        width: columns of a leaf.

    Returns:
        (columns, entries of x there), [C, K, width] each; x counts as 0 beyond V.
    """
    x = jnp.pad(x, ((0, 0), (0, max(width - x.shape[1], 0))))
    first = jnp.minimum(leaf * width, x.shape[1] - width)

    def one(row, first):
        return lax.dynamic_slice(row, (first,), (width,))

    entries = jax.vmap(jax.vmap(one, (None, 0)))(x, first)
    return first[..., None] + jnp.arange(width, dtype=jnp.int32), entries


def reach(units: jax.Array, values, rest: jax.Array) -> list[jax.Array]:
    """Return the values of each window where the running sum of units reaches `rest`.

    Args:
        units: int32 [C, K, width], where width is a power of two.
        values: arrays of the same shape.
        rest: int32 [C, K], at least 1 and at most the sum of the units.

    Returns:
        An array [C, K] of each of the values.
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
