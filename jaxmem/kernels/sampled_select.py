"""Kernels that find each token's sampled entries among stored exponentials.

The forward kernel stores e^(z - m) in 16 bits, m the largest logit of a tile, and each
tile's m and sum. They give upper bounds of the units (`core.sampling`) of a tile's
columns, and systematic sampling uses the bounds: only tiles whose bound contains a
multiple of u are read. In these, the units of all columns are computed and summed. A
column is kept if its own units reach the multiple; if none does, because a bound is not
tight, the slot stays empty. Each column is kept for exactly as many starts as it has
units, so the bounds change which columns are drawn together, but no probability.
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.triton as plt
import jax.numpy as jnp

from jaxmem.core import sampling as _sampling
from jaxmem.core.sampling import Entries, Sampling
from jaxmem.core.stats import Outputs, Stats
from jaxmem.kernels.forward import Kept
from jaxmem.kernels.typed import alike, result

# A bound's relative error: rounding of exponentials to bfloat16, and of their sums.
_ROUNDED = 2.0**-8 + 2.0**-12
# Absolute errors relative to a tile's largest: subnormal float16, and the rounding of
# m, which grows with |m|.
_BELOW, _OF_MAX = 2.0**-16, 2.0**-22
MARGIN = 2.0**-7  # of `Sampling`: relative excess of the bounds over the units

_SLOTS = 16  # of a program
_SUM_TILES, _SUM_ROWS = 64, 16  # of a program that sums bounds
_WARPS = 4


def entries(
    sampling: Sampling, width: int, kept: Kept, stats: Stats, rows: Outputs, of_rows
) -> Entries:
    """Entries of rows from the exponentials that the forward kernel stored.

    Args:
        sampling: static facts, with `MARGIN`.
        width: columns of a tile.
        kept: exponentials, tiles' largest logits and sums.
        stats: of this shard of the vocabulary, [n_rows].
        rows: of the whole vocabulary.
        of_rows: (labels, starts, n_active): int32 [n_rows], [n_rows] and a scalar. Only
            the first n_active rows have entries.

    Returns:
        The entries.
    """
    labels, starts, n_active = of_rows
    active = jnp.arange(labels.shape[0], dtype=jnp.int32) < n_active
    scale = _sampling.scale(kept.max, rows)
    scale = jnp.where(active, scale, 0)
    sums = running_sums(bounds(sampling, width, kept, scale, stats, labels))
    return pick(sampling, width, sums, kept.exps, scale, labels, starts)


def bounds(sampling, width, kept: Kept, scale, stats: Stats, labels) -> jax.Array:
    """Upper bounds of the sum of units of a tile's columns, int32 [n_tiles, n_rows].

    The largest exponential of a tile is 1 and its column is kept at most once. Unless
    it is the label's, the bound is the smaller one of that of all columns, and that of
    the other columns plus one.
    """
    tile = jnp.arange(scale.shape[0], dtype=jnp.int32)[:, None]
    label_on_top = (labels // width == tile) & (stats.label_logit >= kept.max)
    below = _BELOW + jnp.abs(stats.max) * _OF_MAX

    def of(sums):
        return sampling.rate * scale * (sums * (1 + _ROUNDED) + below)

    uncapped, capped = of(kept.sums), 1 + of(jnp.maximum(kept.sums - 1, 0))
    bound = jnp.where(label_on_top, uncapped, jnp.minimum(uncapped, capped))
    units = jnp.ceil(bound * sampling.one).astype(jnp.int32) + width
    return jnp.where(scale > 0, units, 0)


def running_sums(bounds: jax.Array) -> jax.Array:
    """Running sums over the tiles of int32 [n_tiles, n_rows], [n_rows, n_tiles]."""
    n_tiles, n_rows = bounds.shape

    def kernel(bounds_ref, sums_ref):
        row = pl.program_id(0) * _SUM_ROWS + jnp.arange(_SUM_ROWS, dtype=jnp.int32)
        total = jnp.zeros(_SUM_ROWS, jnp.int32)

        def part(i, total):
            tile = i * _SUM_TILES + jnp.arange(_SUM_TILES, dtype=jnp.int32)
            there = (tile < n_tiles)[:, None] & (row < n_rows)[None]
            at = tile[:, None], row[None]
            here = plt.load(bounds_ref.at[at], mask=there, other=0)
            sums = total[None] + jnp.cumsum(here, axis=0)
            plt.store(sums_ref.at[at[::-1]], sums, mask=there)
            return total + jnp.sum(here, axis=0)

        jax.lax.fori_loop(0, pl.cdiv(n_tiles, _SUM_TILES), part, total)

    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(n_rows, _SUM_ROWS),),
        out_shape=result((n_rows, n_tiles), jnp.int32, bounds),
        compiler_params=plt.CompilerParams(num_warps=_WARPS, num_stages=1),
        name="sampled_running_sums",
    )(bounds)


@functools.partial(jax.jit, static_argnums=(0, 1))
def pick(sampling: Sampling, width: int, sums, exps, scale, labels, starts) -> Entries:
    """Entries of rows, given the running sums of their tiles' bounds.

    Args:
        sampling: static facts, with `MARGIN`.
        width: columns of a tile.
        sums: int32 [n_rows, n_tiles].
        exps: [n_rows, V or more], in 16 bits; columns from V on are ignored.
        scale: [n_tiles, n_rows], the factor from exponentials to probabilities.
        labels: int32 [n_rows].
        starts: int32 [n_rows].

    Returns:
        The entries.
    """
    n_rows = sums.shape[0]
    shape = n_rows, sampling.slots
    operands = alike(sums, exps, scale, labels, starts)
    columns_and_p = pl.pallas_call(
        functools.partial(_pick, sampling, width),
        grid=(n_rows, pl.cdiv(sampling.slots, _SLOTS)),
        out_shape=[
            result(shape, jnp.int32, *operands),
            result(shape, jnp.float32, *operands),
        ],
        compiler_params=plt.CompilerParams(num_warps=_WARPS, num_stages=1),
        name="sampled_pick",
    )(*operands)
    return Entries(*columns_and_p)


def _pick(sampling, width, *refs):
    """`_SLOTS` slots of one row; refs are `pick`'s operands and the two results."""
    sums_ref, exps_ref, scale_ref, labels_ref, starts_ref, columns_ref, p_ref = refs
    row, first = pl.program_id(0), pl.program_id(1) * _SLOTS
    n_tiles = sums_ref.shape[1]
    slot = first + jnp.arange(_SLOTS, dtype=jnp.int32)
    start = plt.load(starts_ref.at[row])
    total = sums_ref[row, n_tiles - 1]
    there = slot < sampling.slots

    def store(columns, p):
        plt.store(columns_ref.at[row, slot], columns, mask=there)
        plt.store(p_ref.at[row, slot], p, mask=there)

    @pl.when((first + 1) * sampling.one - start <= total)
    def _some():
        rest = (slot + 1) * sampling.one - start
        live = there & (rest <= total)
        tile, passed = _search(sums_ref, row, rest)
        scale = plt.load(scale_ref.at[tile, row], mask=live, other=0.0)
        of_tile = jnp.arange(pl.next_power_of_2(width), dtype=jnp.int32)
        at = tile[:, None] * width + of_tile[None]
        inside = live[:, None] & (at < (tile[:, None] + 1) * width)
        inside = inside & (at < sampling.columns)
        exps = plt.load(exps_ref.at[row, at], mask=inside, other=0.0)
        p = exps.astype(jnp.float32) * scale[:, None]
        p = jnp.where(at == plt.load(labels_ref.at[row]), 0.0, p)
        units = _sampling.units(sampling, p)
        over = jnp.cumsum(units, axis=1) - (rest - passed)[:, None]
        hit = (over >= 0) & (over < units)
        p = jnp.sum(jnp.where(hit, p, 0.0), axis=1)
        columns = jnp.sum(jnp.where(hit, at, 0), axis=1)
        store(jnp.where(p > 0, columns, sampling.columns), p)

    @pl.when((first + 1) * sampling.one - start > total)
    def _none():
        store(
            jnp.full(_SLOTS, sampling.columns, jnp.int32),
            jnp.zeros(_SLOTS, jnp.float32),
        )


def _search(sums_ref, row, rest):
    """(tile whose running sum first reaches `rest`, the running sum before it)."""
    n_tiles = sums_ref.shape[1]
    tile = passed = jnp.zeros_like(rest)
    step = pl.next_power_of_2(n_tiles)
    while (step := step // 2) > 0:
        at = tile + step
        inside = at < n_tiles
        sums = plt.load(sums_ref.at[row, at - 1], mask=inside, other=2**31 - 1)
        short = inside & (sums < rest)
        tile = jnp.where(short, at, tile)
        passed = jnp.where(short, sums, passed)
    return tile, passed
