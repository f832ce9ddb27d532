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
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.triton as plt
import jax.numpy as jnp
from jax import lax

from jaxmem.core import sampling as _sampling
from jaxmem.core.sampling import Entries, Sampling
from jaxmem.core.stats import Normaliser
from jaxmem.kernels.forward import Kept
from jaxmem.kernels.typed import alike, result

# A bound's relative error: rounding of exponentials to bfloat16, and of their sums.
_ROUNDED = 2.0**-8 + 2.0**-12
# Absolute errors relative to a tile's largest: subnormal float16, and the rounding of
# m, which grows with |m|.
_BELOW, _OF_MAX = 2.0**-16, 2.0**-22
MARGIN = 2.0**-7  # of `Sampling`: relative excess of the bounds over the units

# Of a program that finds entries: 8 slots, or 4, with as many warps, 2 or 8, are within
# 10% of this, as are fewer programs that each find more slots, one after another.
_SLOTS, _PICK_WARPS = 16, 4
_SEARCHED = 32  # tiles whose running sums a slot reads
# Rows and tiles at a time of a program that sums bounds. All tiles of a vocabulary of
# 262,144 are summed at once.
_SUM_ROWS, _SUM_TILES, _SUM_WARPS = 4, 1024, 4


class OfRows(NamedTuple):
    """What entries depend on besides the exponentials; arrays of [n_rows]."""

    ids: Any  # int32, where their entries belong; past the end: nowhere
    labels: jax.Array  # int32
    starts: Any  # int32
    label_logit: jax.Array
    max: jax.Array  # of this shard of the vocabulary
    normaliser: Normaliser  # of the whole vocabulary


def add_entries(
    sampling: Sampling, width: int, kept: Kept, rows: OfRows, n_active, so_far: Entries
) -> Entries:
    """Entries of all tokens, with those of rows whose exponentials are stored.

    Args:
        sampling: static facts, with `MARGIN`.
        width: columns of a tile.
        kept: exponentials, 0 at the labels, tiles' largest logits and sums.
        rows: of the launch.
        n_active: int32; only the first n_active rows have entries.
        so_far: of all tokens; overwritten. The rows' own slots are empty.

    Returns:
        The entries.
    """
    sums = running_sums(sampling, width, kept, rows, n_active)
    return pick(sampling, width, kept, sums, rows, so_far)


def bounds(sampling, width, tile, part_max, sums, rows: OfRows) -> jax.Array:
    """Upper bounds of the sum of units of a tile's columns, int32.

    The largest exponential of a tile is 1 and its column is kept at most once. Unless
    it is the label's, the bound is the smaller one of that of all columns, and that of
    the other columns plus one.

    Args:
        sampling: static facts.
        width: columns of a tile.
        tile: int32 [T, 1].
        part_max: of the tiles, [T, R].
        sums: of the tiles' exponentials, [T, R].
        rows: of R rows.
    """
    label_on_top = (lax.div(rows.labels, width) == tile) & (
        rows.label_logit >= part_max
    )
    below = _BELOW + jnp.abs(rows.max) * _OF_MAX
    scale = _sampling.scale(part_max, rows.normaliser)

    def of(sums):
        return sampling.rate * scale * (sums * (1 + _ROUNDED) + below)

    uncapped, capped = of(sums), 1 + of(jnp.maximum(sums - 1, 0))
    bound = jnp.where(label_on_top, uncapped, jnp.minimum(uncapped, capped))
    units = jnp.ceil(bound * sampling.one).astype(jnp.int32) + width
    return jnp.where(scale > 0, units, 0)


def running_sums(
    sampling: Sampling, width: int, kept: Kept, rows: OfRows, n_active
) -> jax.Array:
    """Running sums over the tiles of their bounds, int32 [n_rows, n_tiles]."""
    n_tiles, n_rows = kept.max.shape
    size = min(pl.next_power_of_2(n_tiles), _SUM_TILES)
    leaves, structure = jax.tree.flatten(rows._replace(ids=None, starts=None))
    n_active = jnp.reshape(n_active, 1).astype(jnp.int32)
    operands = alike(n_active, kept.max, kept.sums, *leaves)

    def kernel(n_active_ref, max_ref, others_ref, *refs):
        *row_refs, sums_ref = refs
        row = pl.program_id(0) * _SUM_ROWS + jnp.arange(_SUM_ROWS, dtype=jnp.int32)
        inside = row < n_rows
        of_rows = [plt.load(ref.at[row], mask=inside, other=0) for ref in row_refs]
        here = jax.tree.unflatten(structure, [x[None] for x in of_rows])
        active = row < n_active_ref[0]

        def part(i, total):
            tile = i * size + jnp.arange(size, dtype=jnp.int32)
            there = (tile < n_tiles)[:, None] & inside[None]
            at = tile[:, None], row[None]
            part_max = plt.load(max_ref.at[at], mask=there, other=0.0)
            others = plt.load(others_ref.at[at], mask=there, other=0.0)
            found = bounds(sampling, width, tile[:, None], part_max, others, here)
            found = jnp.where(there & active[None], found, 0)
            sums = total[None] + jnp.cumsum(found, axis=0)
            plt.store(sums_ref.at[at[::-1]], sums, mask=there)
            return total + jnp.sum(found, axis=0)

        total = jnp.zeros(_SUM_ROWS, jnp.int32)
        jax.lax.fori_loop(0, pl.cdiv(n_tiles, size), part, total)

    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(n_rows, _SUM_ROWS),),
        out_shape=result((n_rows, n_tiles), jnp.int32, *operands),
        compiler_params=plt.CompilerParams(num_warps=_SUM_WARPS, num_stages=1),
        name="sampled_running_sums",
    )(*operands)


@functools.partial(jax.jit, static_argnums=(0, 1))
def pick(
    sampling: Sampling, width: int, kept: Kept, sums, rows: OfRows, so_far: Entries
) -> Entries:
    """`add_entries`, given the running sums of the tiles' bounds.

    Args:
        sampling: static facts, with `MARGIN`.
        width: columns of a tile.
        kept: exponentials, 0 at the labels, of which columns from V on are ignored,
            and tiles' largest logits.
        sums: int32 [n_rows, n_tiles].
        rows: of the launch.
        so_far: of all tokens; overwritten.

    Returns:
        The entries.
    """
    operands = alike(
        sums, kept.exps, kept.max, rows.ids, rows.starts, *rows.normaliser, *so_far
    )
    first = len(operands) - len(so_far)
    columns_and_p = pl.pallas_call(
        functools.partial(_pick, sampling, width),
        grid=(sums.shape[0], pl.cdiv(sampling.slots, _SLOTS)),
        out_shape=[result(x.shape, x.dtype, *operands) for x in so_far],
        input_output_aliases={first + i: i for i in range(len(so_far))},
        compiler_params=plt.CompilerParams(num_warps=_PICK_WARPS, num_stages=1),
        name="sampled_pick",
    )(*operands)
    return Entries(*columns_and_p)


def _pick(sampling, width, *refs):
    """`_SLOTS` slots of one row; refs are `pick`'s operands and the two results."""
    sums_ref, exps_ref, max_ref, ids_ref, starts_ref, *refs = refs
    *normaliser_refs, _, _, columns_ref, p_ref = refs
    row, first = pl.program_id(0), pl.program_id(1) * _SLOTS
    start, total = plt.load(starts_ref.at[row]), sums_ref[row, sums_ref.shape[1] - 1]
    to = plt.load(ids_ref.at[row])
    any_live = (first + 1) * sampling.one - start <= total

    @pl.when(any_live & (to < columns_ref.shape[0]))
    def _some():
        slot = first + jnp.arange(_SLOTS, dtype=jnp.int32)
        there = slot < sampling.slots
        rest = (slot + 1) * sampling.one - start
        live = there & (rest <= total)
        tile, passed = search(sums_ref, row, rest, live)
        begin = tile * width

        def exps_at(column, mask):
            return plt.load(exps_ref.at[row, column], mask=mask, other=0.0)

        column = jnp.arange(pl.next_power_of_2(width), dtype=jnp.int32)
        at = begin[:, None] + column[None]
        inside = live[:, None] & (column < width)[None] & (at < sampling.columns)
        exps = exps_at(at, inside)
        part_max = plt.load(max_ref.at[tile, row], mask=live, other=0.0)
        rows = Normaliser(*(plt.load(ref.at[row]) for ref in normaliser_refs))
        scale = _sampling.scale(part_max, rows)
        units = _units(sampling, exps.astype(jnp.float32) * scale[:, None])
        sums = jnp.cumsum(units, axis=1)
        column = jnp.sum((sums < (rest - passed)[:, None]).astype(jnp.int32), axis=1)
        # A bound that is not tight may contain a multiple that no column reaches.
        hit = live & (column < width) & (begin + column < sampling.columns)
        exps = exps_at(begin + column, hit).astype(jnp.float32)
        columns = jnp.where(hit, begin + column, sampling.columns)
        plt.store(columns_ref.at[to, slot], columns, mask=there)
        plt.store(p_ref.at[to, slot], jnp.where(hit, exps * scale, 0.0), mask=there)


def _units(sampling, p):
    """`sampling.units` of float32 p ≥ 0, whose bits are the integer 0 only for 0."""
    bits = lax.bitcast_convert_type(p, jnp.int32)
    return jnp.minimum(_sampling.units_of_positive(sampling, p), bits)


def search(sums_ref, row, rest, live):
    """(tile whose running sum first reaches `rest`, the running sum before it).

    Every `_SEARCHED`-th running sum is compared, then those in between.
    """
    n_tiles = sums_ref.shape[1]
    n_parts = pl.cdiv(n_tiles, _SEARCHED)
    part = jnp.arange(pl.next_power_of_2(n_parts), dtype=jnp.int32)
    ends = jnp.minimum((part + 1) * _SEARCHED, n_tiles) - 1
    most = 2**31 - 1
    sums = plt.load(sums_ref.at[row, ends], mask=part < n_parts, other=most)
    part, passed = _below(sums[None], rest)
    tile = part[:, None] * _SEARCHED + jnp.arange(_SEARCHED, dtype=jnp.int32)[None]
    inside = live[:, None] & (tile < n_tiles)
    sums = plt.load(sums_ref.at[row, tile], mask=inside, other=most)
    n_below, passed_here = _below(sums, rest)
    return part * _SEARCHED + n_below, jnp.maximum(passed, passed_here)


def _below(sums, rest):
    """(number, largest) of ascending sums [slots, n] that are smaller than `rest`."""
    below = sums < rest[:, None]
    return (
        jnp.sum(below.astype(jnp.int32), axis=1),
        jnp.max(jnp.where(below, sums, 0), axis=1),
    )
