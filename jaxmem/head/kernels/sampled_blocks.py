"""A kernel that selects sampled entries from numbers in memory, by blocks of columns.

Systematic sampling uses upper bounds of the units (`maths.column_sampling`) of each
block: only blocks whose bound contains a multiple of u are read. In these, a column is
kept if its own units reach the multiple; if none does, because a bound is not tight,
the slot stays empty. Each column is kept for exactly as many starts as it has units, so
the bounds change which columns are drawn together, but no probability.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxmem.head.kernels import row_tiles, typed
from jaxmem.head.kernels.row_tiles import PARAMS, beside, store
from jaxmem.head.maths import column_sampling
from jaxmem.head.maths.block_sums import Density
from jaxmem.head.maths.column_sampling import Entries, Sampling

# Of a block's mass: its rounding, and that of exponentials that are computed anew.
_ROUNDED = 2.0**-14
MARGIN = 2.0**-13  # of `Sampling`: relative excess of the bounds over the units
_SLOTS = 8  # of a program, some in each of its four warps
_LANES = 32  # threads of a warp
# What is written to SMEM is committed before it is read, and written once.
_PARAMS = dataclasses.replace(PARAMS, unsafe_no_auto_barriers=True)
_SUMS = 128  # running sums that they are compared with at a time


def bounds(
    sampling: Sampling, width: int, mass: jax.Array, others: jax.Array, tops: int
) -> jax.Array:
    """Upper bounds of the sum of units of a block's columns, int32.

    A column is kept at most once, so that the largest ones count as 1 each, or less.
    `mass` is Σ density over the block [C, n], `others` that without `tops` columns.
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
    """Entries of rows that are in memory, with their densities as p.

    The bounds are of the units of each block, int32 [C, n], and keep to the sampling's
    margin; blocks have 64, 128 or 256 columns.
    """
    sums = running_sums(bounds)
    operands = starts, sums, *density.tiles, *density.blocks, *density.rows
    groups = pl.cdiv(sampling.slots, _SLOTS)
    shape = len(starts), groups * _SLOTS
    outs = [jax.ShapeDtypeStruct(shape, x) for x in (jnp.int32, jnp.float32)]
    scratch = [
        plgpu.SMEM((_SLOTS,), jnp.int32),
        plgpu.SMEM((_SLOTS * width,), jnp.float32),
    ]
    body = _SelectKernel(sampling, density, width, bounds.shape[1]).kernel(
        sums.shape[1]
    )
    grid = {"group": groups, "row": len(starts)}
    columns, p = typed.launch(body, outs, grid, _PARAMS, operands, scratch)
    return Entries(columns[:, : sampling.slots], p[:, : sampling.slots])


def running_sums(x: jax.Array) -> jax.Array:
    """Running sums of rows, int32 [C, n], n to a multiple of 128 with the last one."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % _SUMS)))
    n_rows, n = x.shape
    layout = plgpu.Layout.WG_STRIDED((n,), 1)

    def sampled_running_sums(x_ref, sums_ref, sums_smem):
        row = lax.axis_index("row")
        sums = plgpu.load(x_ref.at[row], layout=layout, optimized=False)
        sums_smem[pl.ds(0, n)] = plgpu.layout_cast(jnp.zeros(n, jnp.int32), layout)
        distance = 1
        while distance < n:
            sums_smem[pl.ds(n, n)] = sums
            sums += plgpu.load(sums_smem.at[pl.ds(n - distance, n)], layout=layout)
            distance *= 2
        sums_ref[row] = sums

    out = jax.ShapeDtypeStruct(x.shape, jnp.int32)
    scratch = [plgpu.SMEM((2 * n,), jnp.int32)]
    grid = {"row": n_rows}
    return typed.launch(sampled_running_sums, out, grid, PARAMS, (x,), scratch)


class _SelectKernel:
    """The work of a program: it selects entries of one row."""

    def __init__(self, sampling: Sampling, density: Density, width: int, n_blocks: int):
        self.sampling, self.density, self.width = sampling, density, width
        self.n_blocks = n_blocks
        self.length = density.tiles[0].shape[1]
        self.last = self.length - width  # first column that a row's last block reads
        self.group_columns = min(width // _LANES, 4)  # of a thread, neighbours
        self.groups = width // self.group_columns
        tiling = ((4, self.groups, self.group_columns), (_LANES, self.group_columns))
        exceeds_warp = self.groups > _LANES
        self.of_slots = plgpu.Layout.TILED(
            plgpu.Tiling(tiling[: 1 + exceeds_warp]),
            warp_dims=(-5 if exceeds_warp else -3,), lane_dims=(-2,), vector_dim=-1,
        )  # fmt: skip

    def kernel(self, n_sums: int) -> Callable[..., None]:
        """The kernel, of a padded number of blocks."""
        sizes = [len(x) for x in self.density[1:]]

        def sampled_pick(starts_ref, *refs):
            *refs, columns_ref, p_ref, block_smem, p_smem = refs
            row, first = lax.axis_index("row"), lax.axis_index("group") * _SLOTS
            slots, start = pl.ds(first, _SLOTS), starts_ref[row]
            n_live = (refs[0][row, n_sums - 1] + start) >> self.sampling.bits
            slot = lax.broadcasted_iota(jnp.int32, (_SLOTS,), 0) + first

            @pl.when(first < n_live)
            def _select_entries():
                sums_ref, *density_refs = (ref.at[row] for ref in refs)
                density_refs = iter(density_refs)
                tiles, blocks, rows = (
                    [next(density_refs) for _ in range(n)] for n in sizes
                )
                rows = [ref[...] for ref in rows]
                targets = (slot + 1) * self.sampling.one - start
                block, passed = self._find_block(targets, sums_ref, n_sums)
                block_smem[...] = block
                plgpu.commit_smem()
                self._store_density(block_smem, tiles, blocks, rows, p_smem)
                plgpu.commit_smem()
                columns, p = self._find_column(targets - passed, block, p_smem)
                columns = jnp.where(slot < n_live, columns, self.sampling.columns)
                store(columns_ref.at[row, slots], columns)
                store(p_ref.at[row, slots], jnp.where(slot < n_live, p, 0.0))

            @pl.when(first >= n_live)
            def _leave_empty():
                none = jnp.where(slot < 0, 0, self.sampling.columns)
                store(columns_ref.at[row, slots], none)
                store(p_ref.at[row, slots], jnp.where(slot < 0, 1.0, 0.0))

        return sampled_pick

    def _find_block(self, targets, sums_ref, n_sums):
        """(block whose running sum first reaches each target, the sum before it)."""
        sum_layout, sums_layout = _slot_layouts(_SUMS // _LANES)
        before = passed = jnp.zeros((_SLOTS, _SUMS), jnp.int32)
        targets = beside(targets, (_SLOTS, _SUMS))
        for first in range(0, n_sums, _SUMS):
            sums = sums_ref.at[pl.ds(first, _SUMS)]
            sums = plgpu.load(sums, layout=sum_layout, optimized=False)
            sums = lax.broadcast_in_dim(sums, (_SLOTS, _SUMS), (1,))
            sums = plgpu.layout_cast(sums, sums_layout)
            before += jnp.where(sums < targets, 1, 0)
            passed = jnp.maximum(passed, jnp.where(sums < targets, sums, 0))
        block = jnp.minimum(jnp.sum(before, axis=1), self.n_blocks - 1)
        return block, jnp.max(passed, axis=1)

    def _store_density(self, block_smem, tile_refs, block_refs, rows, p_smem):
        """Stores the probabilities of all slots' blocks, 0 where there is no column.

        All threads share one block after another, so that each number is loaded once.
        """
        shape, n_threads = (self.width,), min(self.width, 128)
        at_once = math.gcd(self.width // n_threads, self.length)
        if self.width < 128:  # columns for each thread: every warp has all
            layout = _slot_layouts(at_once)[0]
        else:
            layout = plgpu.Layout.WG_STRIDED(shape, at_once)
        offset = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, shape, 0), layout)
        loaded = []
        for block in [block_smem[i] for i in range(_SLOTS)]:
            begin = block * self.width
            first = jnp.minimum(begin, self.last)
            tiles = [
                plgpu.load(
                    ref.at[pl.ds(first, self.width)], layout=layout, optimized=False
                )
                for ref in tile_refs
            ]
            numbers = [ref[block] for ref in block_refs]
            loaded.append((offset + first, begin, tiles, numbers))
        for i, (column, begin, tiles, numbers) in enumerate(loaded):
            tiles = [x.astype(jnp.float32) for x in tiles]
            p = self.density.function(*tiles, *numbers, *rows)
            inside = (column >= begin) & (column < self.sampling.columns)
            p_smem[pl.ds(i * self.width, self.width)] = jnp.where(inside, p, 0.0)

    def _find_column(self, targets, block, p_smem):
        """(columns whose units reach the targets, their densities) of each slot.

        The search is among sums of a few neighbours in a thread, then among these few.
        """
        shape = _SLOTS, self.groups, self.group_columns
        p = row_tiles.load(p_smem, shape, self.of_slots)
        units = column_sampling.units(self.sampling, p)
        sums = jnp.sum(units, axis=2)
        groups = lax.broadcasted_iota(jnp.int32, (_SLOTS, self.groups), 1)

        def sum_groups(chosen, x):
            return jnp.sum(jnp.where(chosen, x, 0), axis=1)

        group, passed = _count_leading(
            lambda n: sum_groups(groups < beside(n, groups.shape), sums),
            self.groups, targets,
        )  # fmt: skip
        is_group = groups == beside(group, groups.shape)
        offsets = plgpu.layout_cast(
            lax.broadcasted_iota(jnp.int32, shape, 2), self.of_slots
        )

        def sum_group(chosen, x):
            return sum_groups(is_group, jnp.sum(jnp.where(chosen, x, 0), axis=2))

        offset, _ = _count_leading(
            lambda n: sum_group(offsets < beside(n, shape), units),
            self.group_columns, targets - passed,
        )  # fmt: skip
        bits = lax.bitcast_convert_type(p, jnp.int32)
        p = lax.bitcast_convert_type(
            sum_group(offsets == beside(offset, shape), bits), jnp.float32
        )
        # A bound that is not tight may contain a multiple that no column reaches.
        hit = jnp.sum(sums, axis=1) >= targets
        first = jnp.minimum(block * self.width, self.last)
        column = first + group * self.group_columns + offset
        return jnp.where(hit, column, self.sampling.columns), jnp.where(hit, p, 0.0)


def _count_leading(total, size, targets):
    """(number of leading items whose sum is below each target, that sum).

    total(n) is the sum of the first n of `size` items, a power of two. The number is at
    most size - 1.
    """
    count = passed = jnp.zeros(_SLOTS, jnp.int32)
    while size := size // 2:
        before = total(count + size)
        count = jnp.where(before < targets, count + size, count)
        passed = jnp.where(before < targets, before, passed)
    return count, passed


def _slot_layouts(at_once):
    """Shapes of one slot's columns in every warp, and of slots that warps share."""
    tiled, width = plgpu.Layout.TILED, 32 * at_once
    slot_layout = tiled(
        plgpu.Tiling(((width,), (at_once,))),
        warp_dims=(plgpu.Replicated(4),), lane_dims=(-2,), vector_dim=-1,
    )  # fmt: skip
    slots_layout = tiled(
        plgpu.Tiling(((4, width), (at_once,))),
        warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1,
    )  # fmt: skip
    return slot_layout, slots_layout
