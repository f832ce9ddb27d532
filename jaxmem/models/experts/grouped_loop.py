"""`grouped.apply` by one loop over tiles of rows, which stores one tile at a time.

It reads a tile's rows and its group's weights, and adds to the rows' results. No copy
of the sorted rows is stored.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxmem.head.maths import vocab_shards
from jaxmem.models.experts.grouped_rows import Arguments, Function, rows_at

_FEWEST, _MOST = 8, 128  # rows of a tile


def tile_rows(rows: int, groups: int) -> int:
    """Rows of a tile: the power of two below a group's share of all, within bounds."""
    share = max(rows // groups, 1)
    return min(max(1 << (share.bit_length() - 1), _FEWEST), _MOST)


class Alike:
    """`grouped_rows.Rows` of one group: weights are those of the group."""

    def products(self, x: jax.Array, *weights: jax.Array) -> list[jax.Array]:
        """Rows times each matrix."""
        return [x @ w.astype(x.dtype) for w in weights]

    def own(self, vectors: jax.Array) -> jax.Array:
        """The vector."""
        return vectors


def sums(function: Function, arguments: Arguments) -> jax.Array:
    """Float32 [N, D']: of each row, the sum over its choices."""

    def body(t, total):
        tile = _tile(arguments, t)
        part = function(Alike(), tile.weights, tile.x, tile.scale)
        return _add(total, tile.at, part)

    weights, x, scale, found = arguments
    one = jax.tree.map(lambda w: w[0], weights)
    run = functools.partial(function, Alike())
    width = jax.eval_shape(run, one, x, scale[:, 0]).shape[1]
    return lax.fori_loop(0, found.first[-1], body, _zeros((len(x), width), arguments))


def gradients(
    function: Callable, some: list[jax.Array], arguments: Arguments, slope: jax.Array
) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    """Float32 gradients of some weights, x, and the scale [N K].

    The function is as in `sums`, with those weights also as an argument before others;
    `slope` is of its result, float32 [N, D'].
    """

    def body(t, totals):
        by_some, by_x, by_scale = totals
        tile = _tile(arguments, t)

        def run(some, x, scale):
            return function(Alike(), some, tile.weights, x, scale).astype(jnp.float32)

        own = [_of(w, tile.group) for w in some]
        _, pull = jax.vjp(run, own, tile.x, tile.scale)
        of_some, of_x, of_scale = pull(rows_at(slope, tile.at))

        def add(total, part):
            after = _of(total, tile.group) + part.astype(total.dtype)
            return lax.dynamic_update_index_in_dim(total, after, tile.group, 0)

        return (
            jax.tree.map(add, by_some, of_some), _add(by_x, tile.at, of_x),
            _add(by_scale, tile.rows, of_scale),
        )  # fmt: skip

    like = arguments, slope
    start = (
        [_zeros(w.shape, like) for w in some], _zeros(arguments.x.shape, like),
        _zeros(arguments.scale.size, like),
    )  # fmt: skip
    return lax.fori_loop(0, arguments.tiles.first[-1], body, start)


class _Tile(NamedTuple):
    """What the loops read of a tile."""

    group: jax.Array
    weights: Any
    rows: jax.Array  # [R] indices n K + k
    at: jax.Array  # [R] indices n
    x: jax.Array  # [R, D], 0 where there is no row
    scale: jax.Array  # [R], likewise


def _tile(arguments: Arguments, t) -> _Tile:
    weights, x, scale, found = arguments
    size = len(found.rows) // len(found.groups)
    rows = lax.dynamic_slice(found.rows, (t * size,), (size,))
    group, at = _of(found.groups, t), rows // scale.shape[1]
    own = jax.tree.map(lambda w: _of(w, group), weights)
    scale = rows_at(scale.reshape(-1), rows)
    return _Tile(group, own, rows, at, rows_at(x, at), scale)


def _of(array, i):
    return lax.dynamic_index_in_dim(array, i, keepdims=False)


def _add(total, at, part):
    part = part.astype(total.dtype)
    return total.at[at].add(part, mode="drop", unique_indices=True)


def _zeros(shape, like):
    return vocab_shards.vary(jnp.zeros(shape, jnp.float32), vocab_shards.varying(like))
