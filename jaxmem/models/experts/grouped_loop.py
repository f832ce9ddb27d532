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
    """`GroupedRows` of one group: weights are those of the group."""

    def products(self, x: jax.Array, *weights: jax.Array) -> list[jax.Array]:
        """Rows times each matrix."""
        return [x @ w.astype(x.dtype) for w in weights]

    def own(self, vectors: jax.Array) -> jax.Array:
        """The vector."""
        return vectors


def sums(function: Function, arguments: Arguments) -> jax.Array:
    """Float32 [N, D']: of each row, the sum over its choices."""

    def body(t, total):
        tile = _take_tile(arguments, t)
        part = function(Alike(), tile.weights, tile.x, tile.scale)
        return _add_rows(total, tile.x_rows, part)

    x = arguments.x
    first = jax.tree.map(lambda w: w[0], arguments.weights)
    run = functools.partial(function, Alike())
    width = jax.eval_shape(run, first, x, arguments.scale[:, 0]).shape[1]
    n_tiles = arguments.tiles.first[-1]
    zeros = _varying_zeros((len(x), width), arguments)
    return lax.fori_loop(0, n_tiles, body, zeros)


def gradients(
    function: Callable, some: list[jax.Array], arguments: Arguments, slope: jax.Array
) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    """Float32 gradients of some weights, x, and the scale [N K].

    The function is as in `sums`, with an argument more before the weights: `some` of
    them, which are differentiated. `slope` is the gradient of the result of `sums`,
    float32 [N, D'].
    """

    def body(t, totals: _Gradients) -> _Gradients:
        tile = _take_tile(arguments, t)

        def run(some, x, scale):
            return function(Alike(), some, tile.weights, x, scale).astype(jnp.float32)

        own = [_take_index(w, tile.group) for w in some]
        _, pull = jax.vjp(run, own, tile.x, tile.scale)
        dsome, dx, dscale = pull(rows_at(slope, tile.x_rows))

        def add(total, part):
            after = _take_index(total, tile.group) + part.astype(total.dtype)
            return lax.dynamic_update_index_in_dim(total, after, tile.group, 0)

        return _Gradients(
            jax.tree.map(add, totals.some, dsome),
            _add_rows(totals.x, tile.x_rows, dx),
            _add_rows(totals.scale, tile.rows, dscale),
        )

    like = arguments, slope
    start = _Gradients(
        [_varying_zeros(w.shape, like) for w in some],
        _varying_zeros(arguments.x.shape, like),
        _varying_zeros(arguments.scale.size, like),
    )
    return lax.fori_loop(0, arguments.tiles.first[-1], body, start)


class _Gradients(NamedTuple):
    """Float32 sums of gradients over tiles."""

    some: list[jax.Array]  # of the differentiated weights
    x: jax.Array  # [N, D]
    scale: jax.Array  # [N K]


class _Tile(NamedTuple):
    """Operands of one tile of R rows."""

    group: jax.Array
    weights: Any
    rows: jax.Array  # [R] indices n K + k of choices
    x_rows: jax.Array  # [R] indices n
    x: jax.Array  # [R, D], 0 where there is no row
    scale: jax.Array  # [R], likewise


def _take_tile(arguments: Arguments, t) -> _Tile:
    tiles, scale = arguments.tiles, arguments.scale
    size = len(tiles.rows) // len(tiles.groups)
    rows = lax.dynamic_slice(tiles.rows, (t * size,), (size,))
    group, x_rows = _take_index(tiles.groups, t), rows // scale.shape[1]
    own = jax.tree.map(lambda w: _take_index(w, group), arguments.weights)
    scale = rows_at(scale.reshape(-1), rows)
    return _Tile(group, own, rows, x_rows, rows_at(arguments.x, x_rows), scale)


def _take_index(array, i):
    return lax.dynamic_index_in_dim(array, i, keepdims=False)


def _add_rows(total, rows, part):
    part = part.astype(total.dtype)
    return total.at[rows].add(part, mode="drop", unique_indices=True)


def _varying_zeros(shape, like):
    return vocab_shards.vary(jnp.zeros(shape, jnp.float32), vocab_shards.varying(like))
