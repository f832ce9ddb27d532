"""Sums over rows of logits in memory.

XLA stores arrays of the logits' size where a sum's terms share an exponential. Here all
sums are one pass that stores nothing. A program works on a share of one row, a tile of
columns at a time; each of the tile's columns has sums of its own.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxmem.head.kernels import row_tiles, typed

SHARES = 16  # programs of a row; with fewer, some processors idle at the end


def supports(columns: int, dtype: Any) -> bool:
    """True if the kernels take rows of logits of this length and type."""
    return dtype == jnp.float32 and columns >= row_tiles.TILE


def sums(
    terms: Callable[..., Sequence[jax.Array]],
    tiles: tuple[jax.Array, ...],
    rows: tuple[jax.Array, ...],
) -> list[jax.Array]:
    """Sums over V, [C] each, of terms of tiles [C, V] and numbers of their rows [C].

    The terms' arguments are float32 and broadcast against each other.
    """
    operands = typed.alike(*tiles, *rows)
    n_rows, columns = tiles[0].shape
    layout = plgpu.Layout.WG_STRIDED((row_tiles.TILE,), row_tiles.at_once(columns))
    n_whole, n = columns // row_tiles.TILE, len(tiles)
    share = pl.cdiv(n_whole, SHARES)

    def row_sums(*refs):
        row, first = lax.axis_index("row"), lax.axis_index("share") * share
        row_numbers = [ref[row] for ref in refs[n : len(operands)]]

        def add(i, totals):
            tile = row, pl.ds(i * row_tiles.TILE, row_tiles.TILE)
            loaded = [
                row_tiles.load(r.at[tile], (row_tiles.TILE,), layout) for r in refs[:n]
            ]
            new = terms(*loaded, *row_numbers)
            return tuple(a + b for a, b in zip(totals, new, strict=True))

        outputs = refs[len(operands) :]
        zeros = plgpu.layout_cast(jnp.zeros(row_tiles.TILE, jnp.float32), layout)
        end = jnp.minimum(first + share, n_whole)
        totals = lax.fori_loop(first, end, add, (zeros,) * len(outputs))
        for ref, total in zip(outputs, totals, strict=True):
            ref[row, lax.axis_index("share")] = jnp.sum(total)

    tail = [x[:, n_whole * row_tiles.TILE :] for x in operands[:n]]
    tail_terms = terms(*tail, *(x[:, None] for x in operands[n:]))
    out = jax.ShapeDtypeStruct((n_rows, SHARES), jnp.float32)
    grid, outs = {"share": SHARES, "row": n_rows}, (out,) * len(tail_terms)
    partial = typed.launch(row_sums, outs, grid, row_tiles.PARAMS, operands)
    return [
        jnp.sum(x, axis=1) + jnp.sum(last, axis=1)
        for x, last in zip(partial, tail_terms, strict=True)
    ]
