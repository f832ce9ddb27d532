"""Kernels that find sampled entries among logits in memory, by blocks of columns.

Given upper bounds of the units (`core.sampling`) of each block, systematic sampling
uses the bounds, and only blocks whose bound contains a multiple of u are read, as
`sampled_select` does with stored exponentials. A column is kept for exactly as many
starts as it has units, so the bounds change no probability.
"""

import functools
from collections.abc import Callable

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.triton as plt
import jax.numpy as jnp

from jaxmem.core import sampling as _sampling
from jaxmem.core.sampling import Entries, Sampling
from jaxmem.kernels.sampled_select import search
from jaxmem.kernels.typed import alike, result

# Of a block's mass: its rounding, and that of exponentials that are computed anew.
_ROUNDED = 2.0**-14
MARGIN = 2.0**-13  # of `Sampling`: relative excess of the bounds over the units
_SLOTS, _PICK_WARPS = 16, 4  # of a program that finds entries
_SUM_WARPS = 4


def bounds(
    sampling: Sampling, width: int, mass: jax.Array, others: jax.Array, tops: int
) -> jax.Array:
    """Upper bounds of the sum of units of a block's columns, int32.

    A column is kept at most once, so that the largest ones count as 1 each, or less.

    Args:
        sampling: static facts, with `MARGIN`.
        width: columns of a block.
        mass: Σ density over the block, [C, n].
        others: the same without `tops` of the columns.
        tops: how many.
    """
    capped = tops + sampling.rate * others
    bound = jnp.minimum(sampling.rate * mass, capped)
    bound += sampling.rate * mass * _ROUNDED
    units = jnp.ceil(bound * sampling.one).astype(jnp.int32) + width
    return jnp.where(mass > 0, units, 0)


def select(
    sampling: Sampling,
    density: Callable[..., jax.Array],
    bounds: jax.Array,
    width: int,
    tiles: tuple[jax.Array, ...],
    rows: tuple[jax.Array, ...],
    starts: jax.Array,
) -> Entries:
    """Entries of rows of logits that are in memory.

    Args:
        sampling: static facts, with `MARGIN`.
        density: of tiles [slots, width] and numbers of their row [1], all float32, to
            probabilities [slots, width]. The tiles are -inf beyond V.
        bounds: of the units of each block, int32 [C, n].
        width: columns of a block, a power of two.
        tiles: density's first arguments, [C, V].
        rows: the others, [C].
        starts: int32 [C].

    Returns:
        The entries, with their densities as p.
    """
    sums = running_sums(bounds)
    operands = alike(starts, sums, *tiles, *rows)
    shape = len(starts), sampling.slots
    columns, p = pl.pallas_call(
        functools.partial(_pick, sampling, density, width, len(tiles)),
        grid=(shape[0], pl.cdiv(sampling.slots, _SLOTS)),
        in_specs=[pl.no_block_spec] * len(operands),
        out_specs=[pl.no_block_spec] * 2,
        out_shape=[
            result(shape, jnp.int32, *operands),
            result(shape, jnp.float32, *operands),
        ],
        compiler_params=plt.CompilerParams(num_warps=_PICK_WARPS, num_stages=1),
        name="sampled_pick_logits",
    )(*operands)
    return Entries(columns, p)


def running_sums(x: jax.Array) -> jax.Array:
    """Running sums of rows, int32 [C, n]."""
    (x,) = alike(x)
    n = x.shape[1]

    def kernel(x_ref, sums_ref):
        row, at = pl.program_id(0), jnp.arange(pl.next_power_of_2(n), dtype=jnp.int32)
        here = plt.load(x_ref.at[row, at], mask=at < n, other=0)
        plt.store(sums_ref.at[row, at], jnp.cumsum(here), mask=at < n)

    return pl.pallas_call(
        kernel,
        grid=(len(x),),
        in_specs=[pl.no_block_spec],
        out_specs=pl.no_block_spec,
        out_shape=result(x.shape, jnp.int32, x),
        compiler_params=plt.CompilerParams(num_warps=_SUM_WARPS, num_stages=1),
        name="sampled_block_sums",
    )(x)


def _pick(sampling, density, width, n_tiles, starts_ref, sums_ref, *refs):
    """`_SLOTS` slots of one row."""
    *refs, columns_ref, p_ref = refs
    tile_refs, row_refs = refs[:n_tiles], refs[n_tiles:]
    row, first = pl.program_id(0), pl.program_id(1) * _SLOTS
    start, total = plt.load(starts_ref.at[row]), sums_ref[row, sums_ref.shape[1] - 1]
    slot = first + jnp.arange(_SLOTS, dtype=jnp.int32)
    there = slot < sampling.slots
    any_live = (first + 1) * sampling.one - start <= total

    @pl.when(any_live)
    def _some():
        of_row = [plt.load(ref.at[pl.ds(row, 1)]) for ref in row_refs]
        n_columns = tile_refs[0].shape[1]
        rest = (slot + 1) * sampling.one - start
        live = there & (rest <= total)
        block, passed = search(sums_ref, row, rest, live)
        begin = block * width
        place = jnp.arange(width, dtype=jnp.int32)[None]
        columns = begin[:, None] + place
        inside = live[:, None] & (columns < n_columns)
        tiles = (
            plt.load(ref.at[row, columns], mask=inside, other=-jnp.inf)
            for ref in tile_refs
        )
        p = density(*tiles, *of_row)
        sums = jnp.cumsum(_sampling.units(sampling, p), axis=1)
        column = jnp.sum((sums < (rest - passed)[:, None]).astype(jnp.int32), axis=1)
        # A bound that is not tight may contain a multiple that no column reaches.
        hit = live & (column < width) & (begin + column < n_columns)
        p = jnp.sum(jnp.where(place == column[:, None], p, 0.0), axis=1)
        found = jnp.where(hit, begin + column, sampling.columns)
        plt.store(columns_ref.at[row, slot], found, mask=there)
        plt.store(p_ref.at[row, slot], jnp.where(hit, p, 0.0), mask=there)

    @pl.when(jnp.logical_not(any_live))
    def _none():
        empty = jnp.full(_SLOTS, sampling.columns, jnp.int32)
        plt.store(columns_ref.at[row, slot], empty, mask=there)
        plt.store(p_ref.at[row, slot], jnp.zeros(_SLOTS, jnp.float32), mask=there)
