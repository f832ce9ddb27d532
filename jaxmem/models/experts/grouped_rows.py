"""Rows sorted by group, and the operations of a function on them."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp


class GroupedRows(Protocol):
    """Operations on rows, each of one group, for the function of `grouped.apply`."""

    def products(self, x: jax.Array, *weights: jax.Array) -> list[jax.Array]:
        """Each row of x [R, D] times the matrices of its group, in the dtype of x."""
        ...

    def own(self, vectors: jax.Array) -> jax.Array:
        """The vector of each row's group, as an array that broadcasts to [R, D]."""
        ...


# (rows, weights, x [R, D], scale f32 [R]) -> [R, D'], with weights of all groups that
# only `rows` reads.
Function = Callable[[GroupedRows, Any, jax.Array, jax.Array], jax.Array]


class GroupTiles(NamedTuple):
    """Rows by group. An index n K + k means row n and its choice k."""

    rows: jax.Array  # int32 [tiles R] indices; at least N K where there is none
    groups: jax.Array  # int32 [tiles]
    first: jax.Array  # int32 [groups + 1], the first tile of each, and their number
    counts: jax.Array  # int32 [groups], rows of each


def tiles(choice: jax.Array, groups: int, size: int) -> GroupTiles:
    """The tiles of `size` rows that choose groups [N, K]."""
    flat = choice.reshape(-1)
    most = min(groups, len(flat))
    most += (len(flat) - most) // size
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    ends = jnp.searchsorted(  # unrolled, it is one program of a GPU
        flat[order], jnp.arange(groups), side="right", method="scan_unrolled"
    )
    counts = jnp.diff(ends, prepend=0).astype(jnp.int32)
    starts, needed = ends - counts, -(-counts // size)
    first = jnp.pad(jnp.cumsum(needed), (1, 0)).astype(jnp.int32)
    tile = jnp.arange(most, dtype=jnp.int32)
    group = jnp.sum(first[None, 1:] <= tile[:, None], axis=1, dtype=jnp.int32)
    group = jnp.minimum(group, groups - 1)
    offset = (tile - first[group])[:, None] * size + jnp.arange(size, dtype=jnp.int32)
    own = order.at[starts[group][:, None] + offset].get(mode="clip")
    # Indices of no row differ, too, as scatters with unique indices need.
    none = len(flat) + choice.shape[1] * jnp.arange(size, dtype=jnp.int32)
    rows = jnp.where(offset < counts[group][:, None], own, none)
    return GroupTiles(rows.reshape(-1), group, first, counts)


class Arguments(NamedTuple):
    """Arguments of `grouped.apply`, with the tiles."""

    weights: Any
    x: jax.Array
    scale: jax.Array
    tiles: GroupTiles


def rows_at(x: jax.Array, rows: jax.Array) -> jax.Array:
    """Rows `rows` of x, 0 where an index is out of range."""
    return x.at[rows].get(mode="fill", fill_value=0)


def is_primal(x: Any) -> bool:
    """True if x is an argument of a rule with symbolic zeros."""
    return hasattr(x, "perturbed")


def flags(primals) -> list[jax.Array]:
    """An array per primal, whose shape says if the primal is differentiated.

    The backward pass reads them by `flagged`. They are residuals, and jax takes the
    residuals of all ways in which a traced call is differentiated to be one tree of
    arrays: a shape is known while that is traced, where a boolean could not be kept.
    """
    return [jnp.zeros((int(w.perturbed), 0)) for w in primals]


def flagged(flags) -> list[int]:
    """Indices of the primals that are differentiated, from `flags`."""
    return [i for i, flag in enumerate(flags) if flag.shape[0]]
