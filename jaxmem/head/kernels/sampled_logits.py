"""Logits of sampled entries: products of rows of hidden with some rows of W.

    z_ik = h_i · W_(columns_ik)        over the entries k of a token i

A program computes some entries of a token. It is bound by bandwidth, as
`sampled_products` are, whose gradient of hidden reads the same rows.
"""

from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxmem.head.kernels import typed

_THREADS = 128
_SLOTS = 8  # entries of a program, whose rows are loaded at the same time
_AT_ONCE = 8  # columns of a row for each thread, at most
_TRANSPOSED_DEPTH = 256  # of W at a time, whose rows are transposed from [D, V]
_PARAMS = plgpu.CompilerParams(approx_math=True)


def at_entries(
    columns: jax.Array, W: jax.Array, hidden: jax.Array, layout
) -> jax.Array:
    """Logits of entries, float32 [N, K]; undefined in empty slots.

    Columns, int32 [N, K], are past the last one in empty slots.
    """
    n_columns = W.shape[0 if layout == "vd" else 1]
    slots = jnp.arange(1, columns.shape[1] + 1, dtype=jnp.int32)
    count = jnp.max(jnp.where(columns < n_columns, slots, 0), axis=1)
    columns = jnp.clip(columns, 0, n_columns - 1)
    if layout == "vd":
        return _entry_logits(count, columns, W, hidden)
    depth = len(W)
    width = min(depth, _TRANSPOSED_DEPTH)

    def part(i, z):
        first = jnp.minimum(i * width, depth - width)
        W_part = lax.dynamic_slice_in_dim(W, first, width, axis=0).T
        h = lax.dynamic_slice_in_dim(hidden, first, width, axis=1)
        new = first + jnp.arange(width) >= i * width  # the last part overlaps
        return z + _entry_logits(count, columns, W_part, jnp.where(new, h, 0))

    zeros = typed.alike(jnp.zeros(columns.shape, jnp.float32), hidden, W)[0]
    return lax.fori_loop(0, pl.cdiv(depth, width), part, zeros)


def _entry_logits(count, columns, W, hidden):
    """Logits of the first `count` entries of each row, for W [V, D]."""
    W, hidden = (
        jnp.pad(x, ((0, 0), (0, max(_THREADS - x.shape[1], 0)))) for x in (W, hidden)
    )
    n_rows, n_slots = columns.shape
    groups, parts = pl.cdiv(n_slots, _SLOTS), split_depth(W.shape[1])
    columns = jnp.pad(columns, ((0, 0), (0, groups * _SLOTS - n_slots)))

    def sampled_logits(count_ref, columns_ref, W_ref, h_ref, z_ref):
        row, first = lax.axis_index("row"), lax.axis_index("group") * _SLOTS

        @pl.when(first < count_ref[row])
        def _compute_logits():
            ids = [columns_ref[row, first + k] for k in range(_SLOTS)]
            for k, z in enumerate(_dot_products(parts, ids, W_ref, h_ref, row)):
                z_ref[row, first + k] = z

    out = jax.ShapeDtypeStruct(columns.shape, jnp.float32)
    grid, operands = {"group": groups, "row": n_rows}, (count, columns, W, hidden)
    return typed.launch(sampled_logits, out, grid, _PARAMS, operands)[:, :n_slots]


class DepthPart(NamedTuple):
    """Columns of the depth that all threads load at once."""

    first: int
    size: int
    skipped: int  # leading columns that the part before has covered


def split_depth(depth: int) -> list[DepthPart]:
    """Parts that cover the depth, those of one size one after the other.

    A last part with less than a column for each thread begins earlier.
    """
    parts, covered = [], 0
    sizes = [n * _THREADS for n in (8, 4, 2, 1) if n <= _AT_ONCE and depth % n == 0]
    while covered < depth:
        size = next((n for n in sizes if n <= depth - covered), _THREADS)
        first = min(covered, depth - size)
        parts.append(DepthPart(first, size, covered - first))
        covered = first + size
    return parts


def _dot_products(parts, columns, W_ref: Any, h_ref: Any, row):
    """Products of a row of hidden with some rows of W."""
    totals = [jnp.float32(0)] * len(columns)
    sums, last_size = None, None
    for first, size, skipped in [*parts, DepthPart(0, 0, 0)]:
        if sums is not None and size != last_size:
            totals = [total + jnp.sum(x) for total, x in zip(totals, sums, strict=True)]
            sums = None
        if not size:
            return totals
        layout = plgpu.Layout.WG_STRIDED((size,), size // _THREADS)

        def load(ref, row, first=first, size=size, layout=layout):
            x = ref.at[row, pl.ds(first, size)]
            return plgpu.load(x, layout=layout, optimized=False).astype(jnp.float32)

        h = load(h_ref, row)
        if skipped:
            column = lax.broadcasted_iota(jnp.int32, (size,), 0)
            column = plgpu.layout_cast(column, layout)
            h = jnp.where(column >= skipped, h, 0.0)
        terms = [load(W_ref, column) * h for column in columns]
        sums = (
            terms if sums is None else [a + b for a, b in zip(sums, terms, strict=True)]
        )
        last_size = size
    return totals
