"""`grouped.apply` by kernels that multiply all rows, sorted by group, in one launch.

Rows are gathered into tiles of one group, the function runs on all of them, and the
results of a row's choices are gathered and added: nothing is scattered, so sums are
deterministic. Stored are up to N K + 128 groups sorted rows, their results, and in the
backward pass the gradients of both; weights of other types have a copy in that of x.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxmem.head.backends import hopper
from jaxmem.models.experts import grouped_rows
from jaxmem.models.experts.grouped_rows import Arguments, Function, rows_at
from jaxmem.models.kernels import grouped_products


def tile_rows(rows: int, groups: int) -> int:
    """Rows of a tile: the kernels' own number, whatever `rows` and `groups` are."""
    del rows, groups
    return grouped_products.ROWS


class SortedRows(NamedTuple):
    """`GroupedRows` of all groups: weights are those of all."""

    offsets: grouped_products.GroupOffsets

    @classmethod
    def from_tiles(cls, tiles: grouped_rows.GroupTiles) -> "SortedRows":
        """The rows of `tiles`, by offsets and counts of their groups."""
        return cls(
            grouped_products.GroupOffsets(tiles.groups, tiles.first, tiles.counts)
        )

    def products(self, x: jax.Array, *weights: jax.Array) -> list[jax.Array]:
        """Each row times the matrices of its group."""
        return _multiply(self.offsets, x, weights)

    def own(self, vectors: jax.Array) -> jax.Array:
        """The vector of each row's group."""
        return _repeat_vectors(self.offsets, vectors)


def sums(function: Function, arguments: Arguments) -> jax.Array:
    """Float32 [N, D']: of each row, the sum over its choices."""
    rows, weights = SortedRows.from_tiles(arguments.tiles), arguments.weights
    out = function(rows, weights, *sorted_rows(arguments))
    return added(out, sorted_positions(arguments))


def gradients(
    function: Callable, some: list[jax.Array], arguments: Arguments, slope: jax.Array
) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    """Gradients of some weights, x, and the scale [N K]; see `grouped_loop`."""
    rows, weights = SortedRows.from_tiles(arguments.tiles), arguments.weights

    def run(some, x, scale):
        return function(rows, some, weights, x, scale)

    out, pull = jax.vjp(run, some, *sorted_rows(arguments))
    x_rows = arguments.tiles.rows // arguments.scale.shape[1]
    dsome, dx, dscale = pull(_pairs_at(slope.astype(out.dtype), x_rows))
    positions = sorted_positions(arguments)
    return dsome, added(dx, positions), dscale[positions.reshape(-1)]


def sorted_rows(arguments: Arguments) -> tuple[jax.Array, jax.Array]:
    """(x [P, D], scale [P]) of the sorted rows, 0 where there is none."""
    rows, scale = arguments.tiles.rows, arguments.scale
    x = _pairs_at(arguments.x, rows // scale.shape[1])
    return x, rows_at(scale.reshape(-1), rows)


def _pairs_at(x, rows):
    """`rows_at` of 16-bit numbers, two at a time, which takes XLA less time."""
    if x.shape[1] % 2:
        return rows_at(x, rows)
    pairs = lax.bitcast_convert_type(x.reshape(len(x), -1, 2), jnp.uint32)
    taken = lax.bitcast_convert_type(rows_at(pairs, rows), x.dtype)
    return taken.reshape(len(rows), -1)


def sorted_positions(arguments: Arguments) -> jax.Array:
    """Index of each choice's row among the sorted rows, int32 [N, K]."""
    rows, shape = arguments.tiles.rows, arguments.scale.shape
    positions = jnp.zeros(math.prod(shape), jnp.int32)
    each = jnp.arange(len(rows), dtype=jnp.int32)
    return positions.at[rows].set(each, mode="drop").reshape(shape)


def added(rows: jax.Array, positions: jax.Array) -> jax.Array:
    """Float32 [N, D], Σ_k rows[positions_nk], added in the order of k."""
    parts = (
        rows[positions[:, k]].astype(jnp.float32) for k in range(positions.shape[1])
    )
    return functools.reduce(jnp.add, parts)


@jax.custom_vjp
def _repeat_vectors(offsets, vectors):
    return _repeat_forward(offsets, vectors)[0]


def _repeat_forward(offsets, vectors):
    rows = jnp.repeat(vectors[offsets.groups], grouped_products.ROWS, axis=0)
    return rows, (offsets, vectors)


def _repeat_backward(residuals, slope):
    offsets, vectors = residuals
    wide = slope.astype(jnp.float32).reshape(
        len(offsets.groups), grouped_products.ROWS, -1
    )
    # Rows that pad a group are undefined.
    is_row = jnp.arange(grouped_products.ROWS) < offsets.rows()[:, None]
    sums = jnp.sum(jnp.where(is_row[:, :, None], wide, 0), axis=1)
    total = jnp.zeros((len(vectors), wide.shape[2]), jnp.float32)
    return None, total.at[offsets.groups].add(sums).astype(vectors.dtype)


_repeat_vectors.defvjp(_repeat_forward, _repeat_backward)


class _ProductResiduals(NamedTuple):
    """Arrays that the backward pass of `_multiply` reads."""

    flags: list[jax.Array]  # of the weights, for `grouped_rows.flagged`
    offsets: grouped_products.GroupOffsets
    x: jax.Array  # [P, K] sorted rows
    weights: tuple[jax.Array, ...]  # [groups, K, N] each


@jax.custom_vjp
def _multiply(offsets, x, weights):
    launch = grouped_products.launch(x.dtype, hopper.n_blocks())
    return grouped_products.of_rows(
        launch, [x], [w.astype(x.dtype) for w in weights], offsets
    )


def _multiply_forward(offsets, x, weights):
    offsets, x, values = jax.tree.map(
        lambda a: a.value, (offsets, x, weights), is_leaf=grouped_rows.is_primal
    )
    flags = grouped_rows.flags(weights)
    return _multiply(offsets, x, values), _ProductResiduals(flags, offsets, x, values)


def _multiply_backward(residuals: _ProductResiduals, slopes):
    offsets, x, weights = residuals.offsets, residuals.x, residuals.weights
    n_blocks = hopper.n_blocks()
    typed = [w.astype(x.dtype) for w in weights]
    (dx,) = grouped_products.of_rows(
        grouped_products.launch(x.dtype, n_blocks),
        slopes,
        typed,
        offsets,
        transposed=True,
    )
    dweights = [None] * len(weights)
    trained = grouped_rows.flagged(residuals.flags)
    if trained:
        dtype = weights[0].dtype
        launch = grouped_products.launch(dtype, n_blocks)
        some = [slopes[i] for i in trained]
        sums = grouped_products.of_groups(launch, x, some, offsets, dtype)
        for i, total in zip(trained, sums, strict=True):
            dweights[i] = total
    return None, dx, tuple(dweights)


_multiply.defvjp(_multiply_forward, _multiply_backward, symbolic_zeros=True)
