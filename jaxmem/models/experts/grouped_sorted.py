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
    """Rows of a tile of the kernels, whatever there are."""
    del rows, groups
    return grouped_products.ROWS


class SortedRows(NamedTuple):
    """`grouped_rows.Rows` of all groups: weights are those of all."""

    where: grouped_products.GroupOffsets

    @classmethod
    def of(cls, found: grouped_rows.GroupTiles) -> "SortedRows":
        """Those of some tiles."""
        return cls(
            grouped_products.GroupOffsets(found.groups, found.first, found.counts)
        )

    def products(self, x: jax.Array, *weights: jax.Array) -> list[jax.Array]:
        """Each row times the matrices of its group."""
        return _products(self.where, x, weights)

    def own(self, vectors: jax.Array) -> jax.Array:
        """The vector of each row's group."""
        return _own(self.where, vectors)


def sums(function: Function, arguments: Arguments) -> jax.Array:
    """Float32 [N, D']: of each row, the sum over its choices."""
    rows, weights = SortedRows.of(arguments.tiles), arguments.weights
    out = function(rows, weights, *sorted_rows(arguments))
    return added(out, places(arguments))


def gradients(
    function: Callable, some: list[jax.Array], arguments: Arguments, slope: jax.Array
) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    """Gradients of some weights, x, and the scale [N K]; see `grouped_loop`."""
    rows, weights = SortedRows.of(arguments.tiles), arguments.weights

    def run(some, x, scale):
        return function(rows, some, weights, x, scale)

    out, pull = jax.vjp(run, some, *sorted_rows(arguments))
    at = arguments.tiles.rows // arguments.scale.shape[1]
    by_some, by_x, by_scale = pull(_pairs_at(slope.astype(out.dtype), at))
    found = places(arguments)
    return by_some, added(by_x, found), by_scale[found.reshape(-1)]


def sorted_rows(arguments: Arguments) -> tuple[jax.Array, jax.Array]:
    """(x [P, D], scale [P]) of the sorted rows, 0 where there is none."""
    _, x, scale, found = arguments
    at = found.rows // scale.shape[1]
    return _pairs_at(x, at), rows_at(scale.reshape(-1), found.rows)


def _pairs_at(x, at):
    """`rows_at` of 16-bit numbers, two at a time, which takes XLA less time."""
    if x.shape[1] % 2:
        return rows_at(x, at)
    pairs = lax.bitcast_convert_type(x.reshape(len(x), -1, 2), jnp.uint32)
    found = lax.bitcast_convert_type(rows_at(pairs, at), x.dtype)
    return found.reshape(len(at), -1)


def places(arguments: Arguments) -> jax.Array:
    """Where each choice [N, K] is among the sorted rows."""
    rows, shape = arguments.tiles.rows, arguments.scale.shape
    found = jnp.zeros(math.prod(shape), jnp.int32)
    each = jnp.arange(len(rows), dtype=jnp.int32)
    return found.at[rows].set(each, mode="drop").reshape(shape)


def added(rows: jax.Array, places: jax.Array) -> jax.Array:
    """Float32 [N, D], the sum of the rows at several places [N, K], in their order."""
    parts = (rows[places[:, k]].astype(jnp.float32) for k in range(places.shape[1]))
    return functools.reduce(jnp.add, parts)


@jax.custom_vjp
def _own(where, vectors):
    return _own_forward(where, vectors)[0]


def _own_forward(where, vectors):
    rows = jnp.repeat(vectors[where.groups], grouped_products.ROWS, axis=0)
    return rows, (where, vectors)


def _own_backward(residuals, slope):
    where, vectors = residuals
    wide = slope.astype(jnp.float32).reshape(
        len(where.groups), grouped_products.ROWS, -1
    )
    # Rows that are not there may be anything.
    there = jnp.arange(grouped_products.ROWS) < where.rows()[:, None]
    sums = jnp.sum(jnp.where(there[:, :, None], wide, 0), axis=1)
    total = jnp.zeros((len(vectors), wide.shape[2]), jnp.float32)
    return None, total.at[where.groups].add(sums).astype(vectors.dtype)


_own.defvjp(_own_forward, _own_backward)


@jax.custom_vjp
def _products(where, x, weights):
    launch = grouped_products.launch(x.dtype, hopper.n_blocks())
    return grouped_products.of_rows(
        launch, [x], [w.astype(x.dtype) for w in weights], where
    )


def _products_forward(where, x, weights):
    where, x, values = jax.tree.map(
        lambda a: a.value, (where, x, weights), is_leaf=grouped_rows.is_primal
    )
    residuals = grouped_rows.flags(weights), where, x, values
    return _products(where, x, values), residuals


def _products_backward(residuals, slopes):
    found, where, x, weights = residuals
    n_blocks = hopper.n_blocks()
    typed = [w.astype(x.dtype) for w in weights]
    (by_x,) = grouped_products.of_rows(
        grouped_products.launch(x.dtype, n_blocks),
        slopes,
        typed,
        where,
        transposed=True,
    )
    by_weights = [None] * len(weights)
    trained = grouped_rows.flagged(found)
    if trained:
        dtype = weights[0].dtype
        launch = grouped_products.launch(dtype, n_blocks)
        some = [slopes[i] for i in trained]
        sums = grouped_products.of_groups(launch, x, some, where, dtype)
        for i, total in zip(trained, sums, strict=True):
            by_weights[i] = total
    return None, by_x, tuple(by_weights)


_products.defvjp(_products_forward, _products_backward, symbolic_zeros=True)
