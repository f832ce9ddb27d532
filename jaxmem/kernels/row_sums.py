"""Sums over rows of logits in memory, by Pallas's Triton backend.

XLA stores arrays of the logits' size where a sum's terms share an exponential. Here all
sums are one pass that stores nothing. A program works on a share of one row, a block of
columns at a time; each lane of the block has sums of its own.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.triton as plt
import jax.numpy as jnp
from jax import lax

from jaxmem.kernels.typed import alike, result

BLOCK = 512  # columns of a program at a time
SHARES = 16  # programs of a row; with fewer, some processors idle at the end
_PARAMS = plt.CompilerParams(num_warps=4, num_stages=2)


def supports(n_rows: int, columns: int, dtype: Any) -> bool:
    """Whether the kernels take logits of this shape and type."""
    return dtype == jnp.float32 and n_rows * columns < 2**31  # offsets are int32


def sums(
    terms: Callable[..., Sequence[jax.Array]],
    tiles: tuple[jax.Array, ...],
    rows: tuple[jax.Array, ...],
) -> list[jax.Array]:
    """Sums over V of terms of tiles [C, V] and numbers of their rows [C].

    Args:
        terms: of tiles [1, BLOCK] and rows [1], all float32, to arrays [1, BLOCK]. The
            tiles are -inf beyond V, where all terms must be 0.
        tiles: its first arguments, whole.
        rows: the others.

    Returns:
        An array [C] for each of the terms.
    """
    operands = alike(*tiles, *rows)
    n_rows, columns = tiles[0].shape
    tile, row = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((1, BLOCK), (1,)))
    n_terms = len(jax.eval_shape(terms, *[tile for _ in tiles], *[row for _ in rows]))
    partial = pl.pallas_call(
        functools.partial(_add_terms, terms, len(tiles), len(rows), columns),
        grid=(n_rows, SHARES),
        in_specs=[pl.no_block_spec] * len(operands),
        out_specs=[pl.no_block_spec] * n_terms,
        out_shape=[result((n_rows, SHARES), jnp.float32, *operands)] * n_terms,
        compiler_params=_PARAMS,
        name="row_sums",
    )(*operands)
    return [jnp.sum(x, axis=1) for x in partial]


def for_each_block(columns: int, width: int, body: Callable, initial: Any) -> Any:
    """Loop `carry = body(block, carry)` over a program's blocks of a row.

    Programs with small blocks, one after another, load more at a time than those of one
    large block: some programs of a processor load while others compute.
    """
    blocks = pl.cdiv(columns, width)
    share = pl.cdiv(blocks, SHARES)
    first = pl.program_id(1) * share
    return lax.fori_loop(first, jnp.minimum(first + share, blocks), body, initial)


def _add_terms(terms, n_tiles, n_rows, columns, *refs):
    n_operands = n_tiles + n_rows
    tile_refs, row_refs = refs[:n_tiles], refs[n_tiles:n_operands]
    row, share = pl.program_id(0), pl.program_id(1)
    of_row = [plt.load(ref.at[pl.ds(row, 1)]) for ref in row_refs]

    lanes = jnp.arange(BLOCK, dtype=jnp.int32)

    def block(i, totals):
        inside = i * BLOCK + lanes < columns
        # Of two axes from the start: another layout takes a detour by shared memory.
        at = pl.ds(row, 1), pl.ds(i * BLOCK, BLOCK)
        tiles = (
            plt.load(ref.at[at], mask=inside[None], other=-jnp.inf) for ref in tile_refs
        )
        new = terms(*tiles, *of_row)
        return tuple(a + b for a, b in zip(totals, new, strict=True))

    outputs = refs[n_operands:]
    zeros = (jnp.zeros((1, BLOCK), jnp.float32),) * len(outputs)
    totals = for_each_block(columns, BLOCK, block, zeros)
    for ref, total in zip(outputs, totals, strict=True):
        plt.store(ref.at[row, pl.ds(share, 1)], jnp.sum(total, axis=1))
