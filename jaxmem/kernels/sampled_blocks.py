"""A kernel that finds sampled entries among numbers in memory, by blocks of columns.

Given upper bounds of the units (`core.column_sampling`) of each block, systematic
sampling uses the bounds: only blocks whose bound contains a multiple of u are read. In
these, the units of all columns are computed and summed. A column is kept if its own
units reach the multiple; if none does, because a bound is not tight, the slot stays
empty. Each column is kept for exactly as many starts as it has units, so the bounds
change which columns are drawn together, but no probability.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxmem.core import column_sampling
from jaxmem.core.column_sampling import Entries, Sampling
from jaxmem.kernels import typed
from jaxmem.kernels.row_tiles import PARAMS, beside, store

# Of a block's mass: its rounding, and that of exponentials that are computed anew.
_ROUNDED = 2.0**-14
MARGIN = 2.0**-13  # of `Sampling`: relative excess of the bounds over the units
_SLOTS = 8  # of a program, some in each of its four warps
_SUMS = 128  # running sums that they are compared with at a time


class Density(NamedTuple):
    """Probabilities of columns, from what is in memory.

    Attributes:
        of: of tiles [slots, width], of numbers of their blocks [slots, width] and of
            their row [], all float32, to probabilities [slots, width].
        tiles: its first arguments, [C, V]; the tiles have no columns from V on.
        blocks: the next ones, [C, n].
        rows: the last ones, [C].
    """

    of: Callable[..., jax.Array]
    tiles: tuple[jax.Array, ...]
    blocks: tuple[jax.Array, ...] = ()
    rows: tuple[jax.Array, ...] = ()


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
    sampling: Sampling, density: Density, bounds: jax.Array, width: int,
    starts: jax.Array,
) -> Entries:  # fmt: skip
    """Entries of rows that are in memory.

    Args:
        sampling: static facts, with a margin that the bounds keep to.
        density: of the columns.
        bounds: of the units of each block, int32 [C, n].
        width: columns of a block, 64, 128 or 256.
        starts: int32 [C].

    Returns:
        The entries, with their densities as p.
    """
    sums = running_sums(bounds)
    n_live = (jnp.max(sums, axis=1) + starts) >> sampling.bits
    operands = (
        starts,
        n_live,
        bounds,
        sums,
        *density.tiles,
        *density.blocks,
        *density.rows,
    )
    groups = pl.cdiv(sampling.slots, _SLOTS)
    shape = len(starts), groups * _SLOTS
    kernel = plgpu.kernel(
        _Select(sampling, density, width, bounds.shape[1]).kernel(sums.shape[1]),
        out_type=[
            jax.ShapeDtypeStruct(shape, jnp.int32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        ],
        grid=(groups, len(starts)),
        grid_names=("group", "row"),
        scratch_types=[plgpu.SMEM((_SLOTS,), jnp.int32)],
        compiler_params=PARAMS,
    )
    columns, p = typed.run(kernel, *operands)
    return Entries(columns[:, : sampling.slots], p[:, : sampling.slots])


def running_sums(x: jax.Array) -> jax.Array:
    """Running sums of rows, int32 [C, n], n to a multiple of 128 with the last one."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % _SUMS)))
    n_rows, n = x.shape
    layout = plgpu.Layout.WG_STRIDED((n,), 1)

    def sampled_running_sums(x_ref, sums_ref, so_far):
        row = lax.axis_index("row")
        sums = plgpu.load(x_ref.at[row], layout=layout, optimized=False)
        so_far[pl.ds(0, n)] = plgpu.layout_cast(jnp.zeros(n, jnp.int32), layout)
        distance = 1
        while distance < n:
            so_far[pl.ds(n, n)] = sums
            sums += plgpu.load(so_far.at[pl.ds(n - distance, n)], layout=layout)
            distance *= 2
        sums_ref[row] = sums

    kernel = plgpu.kernel(
        sampled_running_sums,
        out_type=jax.ShapeDtypeStruct(x.shape, jnp.int32),
        grid=(n_rows,),
        grid_names=("row",),
        scratch_types=[plgpu.SMEM((2 * n,), jnp.int32)],
        compiler_params=PARAMS,
    )
    return typed.run(kernel, x)


class _Select:
    """What a program does for one row."""

    def __init__(self, sampling: Sampling, density: Density, width: int, n_blocks: int):
        self.sampling, self.density, self.width = sampling, density, width
        self.n_blocks = n_blocks
        self.length = density.tiles[0].shape[1]
        self.last = self.length - width  # where the last block of a row is read
        at_once = math.gcd(width // 32, self.length)
        self.of_column, self.of_columns = _layouts(at_once)
        self.of_sum, self.of_sums = _layouts(_SUMS // 32)

    def kernel(self, n_sums: int) -> Callable[..., None]:
        """The kernel, of a padded number of blocks."""
        sizes = [len(x) for x in self.density[1:]]

        def sampled_pick(starts_ref, live_ref, *refs):
            *refs, columns_ref, p_ref, block = refs
            row, first = lax.axis_index("row"), lax.axis_index("group") * _SLOTS
            here, n_live = pl.ds(first, _SLOTS), live_ref[row]
            slot = lax.broadcasted_iota(jnp.int32, (_SLOTS,), 0) + first

            @pl.when(first < n_live)
            def _some():
                bounds_ref, sums_ref, *others = (ref.at[row] for ref in refs)
                others = iter(others)
                tiles, blocks, rows = ([next(others) for _ in range(n)] for n in sizes)
                rows = [ref[...] for ref in rows]
                rest = (slot + 1) * self.sampling.one - starts_ref[row]
                block[...] = self._block_of(rest, sums_ref, n_sums)
                loaded = self._load(block, (bounds_ref, sums_ref), tiles, blocks)
                columns, p = self._columns(rest, rows, *loaded)
                columns = jnp.where(slot < n_live, columns, self.sampling.columns)
                store(columns_ref.at[row, here], columns)
                store(p_ref.at[row, here], jnp.where(slot < n_live, p, 0.0))

            @pl.when(first >= n_live)
            def _none():
                none = jnp.where(slot < 0, 0, self.sampling.columns)
                store(columns_ref.at[row, here], none)
                store(p_ref.at[row, here], jnp.where(slot < 0, 1.0, 0.0))

        return sampled_pick

    def _block_of(self, rest, sums_ref, n_sums):
        """The block whose running sum first reaches each of `rest`."""
        before = jnp.zeros(_SLOTS, jnp.int32)
        wanted = beside(rest, (_SLOTS, _SUMS))
        for first in range(0, n_sums, _SUMS):
            here = sums_ref.at[pl.ds(first, _SUMS)]
            here = plgpu.load(here, layout=self.of_sum, optimized=False)
            here = lax.broadcast_in_dim(here, (_SLOTS, _SUMS), (1,))
            here = plgpu.layout_cast(here, self.of_sums)
            before += jnp.sum(jnp.where(here < wanted, 1, 0), axis=1)
        return jnp.minimum(before, self.n_blocks - 1)

    def _load(self, block, sum_refs, tile_refs, block_refs):
        """(first columns, those of the blocks, sums before them, tiles, numbers).

        Each warp loads the blocks of all slots, and keeps those of its own.
        """
        shape, (bounds_ref, sums_ref) = (_SLOTS, self.width), sum_refs
        slot = lax.broadcasted_iota(jnp.int32, (_SLOTS,), 0)
        slot_of = plgpu.layout_cast(
            lax.broadcasted_iota(jnp.int32, shape, 0), self.of_columns
        )
        first = begin = passed = jnp.zeros(_SLOTS, jnp.int32)
        tiles = [jnp.zeros(shape, ref.dtype) for ref in tile_refs]
        numbers = [jnp.zeros(_SLOTS, jnp.float32) for _ in block_refs]
        for i in range(_SLOTS):
            here = block[i]
            at = jnp.minimum(here * self.width, self.last)
            own = slot == i
            first, begin = (
                jnp.where(own, x, old)
                for x, old in ((at, first), (here * self.width, begin))
            )
            passed = jnp.where(own, sums_ref[here] - bounds_ref[here], passed)
            numbers = [
                jnp.where(own, ref[here], old)
                for ref, old in zip(block_refs, numbers, strict=True)
            ]
            for j, ref in enumerate(tile_refs):
                x = ref.at[pl.ds(at, self.width)]
                x = plgpu.load(x, layout=self.of_column, optimized=False)
                x = lax.broadcast_in_dim(x, shape, (1,))
                x = plgpu.layout_cast(x, self.of_columns)
                tiles[j] = jnp.where(slot_of == i, x, tiles[j])
        return first, begin, passed, tiles, numbers

    def _columns(self, rest, rows, first, begin, passed, tiles, numbers):
        """(columns whose units reach `rest`, their densities) of each slot."""
        shape, sampling = (_SLOTS, self.width), self.sampling
        tiles = [x.astype(jnp.float32) for x in tiles]
        p = self.density.of(*tiles, *(beside(x, shape) for x in numbers), *rows)
        place = plgpu.layout_cast(
            lax.broadcasted_iota(jnp.int32, shape, 1), self.of_columns
        )
        column = beside(first, shape) + place
        inside = (column >= beside(begin, shape)) & (column < sampling.columns)
        units = jnp.where(inside, column_sampling.units(sampling, p), 0)
        rest, at, step = rest - passed, jnp.zeros(_SLOTS, jnp.int32), self.width // 2
        while step:  # the most columns whose units do not reach it
            before = jnp.where(place < beside(at + step, shape), units, 0)
            at = jnp.where(jnp.sum(before, axis=1) < rest, at + step, at)
            step //= 2
        # A bound that is not tight may contain a multiple that no column reaches.
        hit = jnp.sum(units, axis=1) >= rest
        p = jnp.sum(jnp.where(place == beside(at, shape), p, 0.0), axis=1)
        return jnp.where(hit, first + at, sampling.columns), jnp.where(hit, p, 0.0)


def _layouts(at_once):
    """Shapes of one slot's columns in every warp, and of slots that warps share."""
    tiled, width = plgpu.Layout.TILED, 32 * at_once
    of_column = tiled(
        plgpu.Tiling(((width,), (at_once,))),
        warp_dims=(plgpu.Replicated(4),), lane_dims=(-2,), vector_dim=-1,
    )  # fmt: skip
    of_columns = tiled(
        plgpu.Tiling(((4, width), (at_once,))),
        warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1,
    )  # fmt: skip
    return of_column, of_columns
