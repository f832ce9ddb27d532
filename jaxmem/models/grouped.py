"""A function of each row and of the weights of the groups that the row chooses.

Rows are sorted by group into tiles of one group each. One loop runs the tiles that are
there: it reads a tile's rows and its group's weights, and adds to the rows' results. No
row meets a group that it does not choose, and no copy of the sorted rows is stored.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxmem.core import vocab_shards

_FEWEST, _MOST = 8, 128  # rows of a tile


def apply(function: Callable, weights: Any, x: jax.Array, choice, scale) -> jax.Array:
    """The sum over a row's choices of a scaled function of it and the group's weights.

        out_n = Σ_k scale_nk function(weights[choice_nk], x_n)

    Args:
        function: maps a group's weights and rows [R, D] to rows [R, D']; it computes
            each row alone. It is hashable, and closes over no arrays.
        weights: pytree of arrays [groups, ...].
        x: [N, D].
        choice: int32 [N, K] groups, all different in a row.
        scale: f32 [N, K].

    Returns:
        f32 [N, D'].

    **Memory**: the result; in the backward pass the gradients, in float32, and nothing
    else that grows with the rows or groups. Residuals are the arguments: the function
    runs again.
    """
    around = vocab_shards.varying((weights, x, choice, scale))
    weights, x, choice, scale = vocab_shards.vary((weights, x, choice, scale), around)
    return _apply(function, weights, x, choice, scale)


def tile_rows(rows: int, groups: int) -> int:
    """Rows of a tile: the power of two below a group's share of all, within bounds."""
    share = max(rows // groups, 1)
    return min(max(1 << (share.bit_length() - 1), _FEWEST), _MOST)


class Tiles(NamedTuple):
    """Rows by group. An index n K + k means row n and its choice k."""

    rows: jax.Array  # int32 [tiles R] indices; at least N K where there is none
    groups: jax.Array  # int32 [tiles]
    count: jax.Array  # int32 scalar, tiles that have rows


def tiles(choice: jax.Array, groups: int) -> Tiles:
    """The tiles of rows that choose groups [N, K]."""
    flat = choice.reshape(-1)
    size = tile_rows(len(flat), groups)
    most = min(groups, len(flat))
    most += (len(flat) - most) // size
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    ends = jnp.searchsorted(flat[order], jnp.arange(groups), side="right")
    counts = jnp.diff(ends, prepend=0).astype(jnp.int32)
    needed = -(-counts // size)
    last = jnp.cumsum(needed)
    group = jnp.searchsorted(last, jnp.arange(most), side="right")
    group = jnp.minimum(group, groups - 1).astype(jnp.int32)
    place = (jnp.arange(most) - (last - needed)[group])[:, None] * size
    place = place + jnp.arange(size)
    first = (ends - counts)[group][:, None]
    own = order.at[first + place].get(mode="clip")
    # Those of no row are different, too, as unique indices have to be.
    none = len(flat) + choice.shape[1] * jnp.arange(size, dtype=jnp.int32)
    rows = jnp.where(place < counts[group][:, None], own, none)
    return Tiles(rows.reshape(-1), group, last[-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _apply(function, weights, x, choice, scale):
    return _sums(function, weights, x, choice, scale)[0]


class _Tile(NamedTuple):
    """What the loops read of a tile."""

    group: jax.Array
    rows: jax.Array  # [R] indices n K + k
    at: jax.Array  # [R] indices n
    weights: Any
    x: jax.Array  # [R, D], 0 where there is no row
    scale: jax.Array  # [R], likewise


def _tile(found: Tiles, t, weights, x, scale) -> _Tile:
    size = len(found.rows) // len(found.groups)
    rows = lax.dynamic_slice(found.rows, (t * size,), (size,))
    group = lax.dynamic_index_in_dim(found.groups, t, keepdims=False)
    at = rows // scale.shape[1]
    own = jax.tree.map(
        lambda w: lax.dynamic_index_in_dim(w, group, keepdims=False), weights
    )
    return _Tile(group, rows, at, own, _rows(x, at), _rows(scale.reshape(-1), rows))


def _rows(x, at):
    return x.at[at].get(mode="fill", fill_value=0)


def _add(total, at, part):
    part = part.astype(total.dtype)
    return total.at[at].add(part, mode="drop", unique_indices=True)


def _scaled(function, weights, x, scale):
    return function(weights, x).astype(jnp.float32) * scale[:, None]


def _zeros(shape, *like):
    return vocab_shards.vary(jnp.zeros(shape, jnp.float32), vocab_shards.varying(like))


def _sums(function, weights, x, choice, scale):
    found = tiles(choice, len(jax.tree.leaves(weights)[0]))

    def body(t, total):
        tile = _tile(found, t, weights, x, scale)
        part = _scaled(function, tile.weights, tile.x, tile.scale)
        return _add(total, tile.at, part)

    one = jax.tree.map(lambda w: w[0], weights)
    width = jax.eval_shape(function, one, x).shape[1]
    start = _zeros((len(x), width), weights, x, choice, scale)
    return lax.fori_loop(0, found.count, body, start), found


def _forward(function, *arguments):
    flags = [jnp.zeros((int(w.perturbed), 0)) for w in _primals(arguments[0])]
    values = jax.tree.map(lambda x: x.value, arguments, is_leaf=_is_primal)
    out, found = _sums(function, *values)
    # Known from shapes while the backward pass is traced: jax takes the residuals of
    # all ways in which a traced call is differentiated to be one tree.
    return out, (flags, *values, found)


def _is_primal(x):
    return hasattr(x, "perturbed")


def _primals(tree):
    return jax.tree.leaves(tree, is_leaf=_is_primal)


def _backward(function, residuals, slope):
    flags, weights, x, choice, scale, found = residuals
    del choice
    leaves, structure = jax.tree.flatten(weights)
    trained = [i for i, flag in enumerate(flags) if flag.shape[0]]

    def body(t, totals):
        by_weights, by_x, by_scale = totals
        tile = _tile(found, t, weights, x, scale)
        own = jax.tree.leaves(tile.weights)

        def run(some, x, scale):
            all_of_them = dict(enumerate(own)) | dict(zip(trained, some, strict=True))
            group = structure.unflatten(all_of_them[i] for i in range(len(own)))
            return _scaled(function, group, x, scale)

        _, pull = jax.vjp(run, [own[i] for i in trained], tile.x, tile.scale)
        of_weights, of_x, of_scale = pull(_rows(slope, tile.at))

        def add(total, part):
            before = lax.dynamic_index_in_dim(total, tile.group, keepdims=False)
            after = before + part.astype(total.dtype)
            return lax.dynamic_update_index_in_dim(total, after, tile.group, 0)

        by_weights = jax.tree.map(add, by_weights, of_weights)
        return (
            by_weights, _add(by_x, tile.at, of_x), _add(by_scale, tile.rows, of_scale)
        )  # fmt: skip

    like = weights, x, scale, slope
    start = [_zeros(leaves[i].shape, *like) for i in trained]
    start = start, _zeros(x.shape, *like), _zeros(scale.size, *like)
    by_weights, by_x, by_scale = lax.fori_loop(0, found.count, body, start)
    every = [None] * len(leaves)
    for i, gradient in zip(trained, by_weights, strict=True):
        every[i] = gradient.astype(leaves[i].dtype)
    by_weights = jax.tree.unflatten(structure, every)
    return by_weights, by_x.astype(x.dtype), None, by_scale.reshape(scale.shape)


_apply.defvjp(_forward, _backward, symbolic_zeros=True)
