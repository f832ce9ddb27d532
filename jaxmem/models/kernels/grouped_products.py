"""Products of rows, sorted by group, with a matrix of each group.

    y_r = x_r · W[g]      x_r = y_r · W[g]ᵀ      W[g] = Σ_r x_rᵀ y_r      r in group g

The blocks are those of `ring`: one warpgroup loads, two multiply 64 rows each. Each
group's rows begin at a multiple of `ROWS`, so that a tile of a result has one group,
whose number is read from memory. A warpgroup without a row multiplies nothing.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmem.head.kernels import ring, typed
from jaxmem.head.kernels.logits import parts
from jaxmem.head.kernels.ring import ceil_div
from jaxmem.head.kernels.tiles import N_COMPUTE, Tiles

ROWS = 128  # of a tile
_SWIZZLED = 64  # numbers of a row that copies take at once, and columns of a tile


class GroupOffsets(NamedTuple):
    """Offsets and counts of the rows of each group."""

    groups: jax.Array  # int32 [tiles], of each tile of rows
    first: jax.Array  # int32 [groups + 1], the first tile of each, and their number
    counts: jax.Array  # int32 [groups], rows of each

    def rows(self) -> jax.Array:
        """Int32 [tiles], rows of its group from each tile on; 0 or less in no group."""
        tile = jnp.arange(len(self.groups), dtype=jnp.int32)
        of_group = tile - self.first[self.groups]
        return self.counts[self.groups] - of_group * ROWS


@dataclasses.dataclass(frozen=True)
class GroupedLaunch:
    """Static parameters of a launch."""

    tiles: Tiles  # of the largest results; `fitted` makes them narrower
    n_blocks: int

    def fitted(self, width: int, n_results: int) -> "GroupedLaunch":
        """This launch, with tiles no wider than `n_results` results of a width."""
        t, narrow = self.tiles, -(-width // _SWIZZLED) * _SWIZZLED
        columns = min(t.columns, narrow * n_results)
        slots = min(t.slots, columns // t.stored)
        tiles = dataclasses.replace(t, columns=columns, slots=slots)
        return dataclasses.replace(self, tiles=tiles)


def launch(dtype, n_blocks: int) -> GroupedLaunch:
    """The launch for results of a dtype, on `n_blocks` blocks."""
    size = np.dtype(dtype).itemsize
    return GroupedLaunch(Tiles(stored=128 // size, stored_bytes=size), n_blocks)


@functools.partial(jax.jit, static_argnames=("launch", "transposed"))
def of_rows(
    launch: GroupedLaunch,
    rows: Sequence[jax.Array],
    weights: Sequence[jax.Array],
    offsets: GroupOffsets,
    transposed: bool = False,
) -> list[jax.Array]:
    """Products of the rows with each of some matrices of their group, or their sum.

        [x W[g] for W in weights], or Σ_i y_i W_i[g]ᵀ if transposed

    Rows are one [P, K], or transposed as many [P, N] as weights; weights are one or
    two, [groups, K, N]. Rows of the results that are in no group are undefined.
    """
    n_rows, n_pairs, n_tiles = len(rows[0]), len(rows), len(offsets.groups)
    asked = weights[0].shape[1 if transposed else 2]
    rows, weights = _pad_axis(rows, 1), _pad_axis(_pad_axis(weights, 1), 2)
    depth, width = weights[0].shape[1:][:: -1 if transposed else 1]
    n_results = 1 if transposed else len(weights)
    launch = launch.fitted(width, n_results)
    own, stage = launch.tiles.columns // n_results, launch.tiles.depth
    n_columns, n_steps = -(-width // own), -(-depth // stage)
    kernel = _GroupedKernel(launch, "mk", "nk" if transposed else "kn", n_results)

    def unit(i, scalars) -> _Unit:
        tile = lax.div(i, n_columns)
        return _Unit(
            scalars[1 + tile], tile * ROWS, (i - tile * n_columns) * own,
            n_steps * n_pairs, scalars[1 + n_tiles + tile],
        )  # fmt: skip

    def load(unit, step, refs, put):
        def pair(i, step):
            k, columns = pl.ds(step * stage, stage), pl.ds(unit.column, own)
            put("lhs", 0, refs[i].at[pl.ds(unit.row, ROWS), k])
            for j in range(n_results):
                index = (
                    (unit.group, columns, k) if transposed else (unit.group, k, columns)
                )
                put("rhs", j, refs[n_pairs + i + j].at[index])

        for i in range(n_pairs):
            mine = lax.div(step, n_steps) == i
            once = functools.partial(pair, i, step - i * n_steps)
            pl.when(mine)(once) if n_pairs > 1 else once()

    def target(out, unit, rows, columns):
        return out.at[pl.ds(unit.row + rows, 64), columns]

    scalars = jnp.concatenate([offsets.first[-1:], offsets.groups, offsets.rows()])
    steps = _Steps(lambda s: s[0] * n_columns, unit, load, target)
    results = kernel.run(
        steps, (n_rows, width), rows[0].dtype, scalars, *rows, *weights
    )
    return [x[:, :asked] for x in results]


@functools.partial(jax.jit, static_argnames=("launch", "dtype"))
def of_groups(
    launch: GroupedLaunch,
    x: jax.Array,
    slopes: Sequence[jax.Array],
    offsets: GroupOffsets,
    dtype: np.dtype,
) -> list[jax.Array]:
    """Sums [groups, K, N] over each group's rows of x_rᵀ y_r, for each y of slopes.

    They are in float32 until they have the dtype, and 0 where a group has no rows. x
    [P, K] and one or two y [P, N] are 0 in rows that pad a group to a multiple of 64.
    """
    n_groups, n_results = len(offsets.first) - 1, len(slopes)
    asked = x.shape[1], slopes[0].shape[1]
    (x,), slopes = _pad_axis([x], 1), _pad_axis(slopes, 1)
    depth, width = x.shape[1], slopes[0].shape[1]
    launch = launch.fitted(width, n_results)
    own, stage = launch.tiles.columns // n_results, launch.tiles.depth
    n_columns, of_group = -(-width // own), -(-depth // ROWS) * -(-width // own)
    kernel = _GroupedKernel(launch, "km", "kn", n_results)

    def unit(i, scalars) -> _Unit:
        nth = lax.div(i, of_group)  # group in the order of their counts
        group, first, count = (scalars[j * n_groups + nth] for j in range(3))
        tile = i - nth * of_group
        row = lax.div(tile, n_columns)
        column = (tile - row * n_columns) * own
        n_steps = ceil_div(count, stage)
        return _Unit(group, row * ROWS, column, n_steps, ROWS, first * ROWS)

    def load(unit, step, refs, put):
        k = pl.ds(unit.first + step * stage, stage)
        put("lhs", 0, refs[0].at[k, pl.ds(unit.row, ROWS)])
        for j in range(n_results):
            put("rhs", j, refs[1 + j].at[k, pl.ds(unit.column, own)])

    def target(out, unit, rows, columns):
        return out.at[unit.group, pl.ds(unit.row + rows, 64), columns]

    steps = _Steps(lambda s: n_groups * of_group, unit, load, target)
    # Blocks that compute at the same time then have about as many rows.
    order = jnp.argsort(-offsets.counts).astype(jnp.int32)
    scalars = jnp.concatenate([order, offsets.first[order], offsets.counts[order]])
    shape = n_groups, depth, width
    results = kernel.run(steps, shape, dtype, scalars, x, *slopes)
    return [x[:, : asked[0], : asked[1]] for x in results]


def _pad_axis(arrays, axis):
    """The arrays, padded by zeros to a multiple of `_SWIZZLED` along an axis."""

    def pad(x):
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, -x.shape[axis] % _SWIZZLED)
        return jnp.pad(x, widths)

    return [pad(x) for x in arrays]


class _Unit(NamedTuple):
    """A tile of the results."""

    group: Any
    row: Any  # the result's first row
    column: Any
    n_steps: Any
    n_rows: Any  # rows of the result that count
    first: Any = 0  # first row of the factors, in sums over rows


class _Steps(NamedTuple):
    """The functions that distinguish one grouped kernel from another."""

    count: Callable  # (scalars) -> units of all blocks
    unit: Callable  # (index, scalars) -> _Unit
    load: Callable  # (unit, step, refs, put), with put(side, number, ref)
    target: Callable  # (result, unit, first row, columns) -> reference to a part


@dataclasses.dataclass(frozen=True)
class _GroupedKernel:
    """A launch whose blocks each compute tiles of one or two results."""

    launch: GroupedLaunch
    lhs: Literal["mk", "km"]  # axes in memory order
    rhs: Literal["kn", "nk"]
    n_results: int

    def run(self, steps: _Steps, shape, dtype, scalars, *operands) -> list[jax.Array]:
        run = plgpu.kernel(
            functools.partial(self._run_block, steps, operands[0].dtype),
            out_type=(jax.ShapeDtypeStruct(shape, dtype),) * self.n_results,
            grid=(self.launch.n_blocks,),
            grid_names=("block",),
            num_threads=N_COMPUTE + 1,
            thread_name="wg",
        )
        return list(typed.run(run, scalars, *operands))

    def _run_block(self, steps, dtype, scalars, *refs):
        tiles = self.launch.tiles
        refs, out = refs[: -self.n_results], refs[-self.n_results :]

        @functools.partial(
            pl.run_scoped,
            **self._scratch_types(dtype),
            out_smem=plgpu.SMEM(
                (N_COMPUTE, tiles.slots, tiles.rows, tiles.stored),
                out[0].dtype,
                transforms=ring.swizzle(out[0].dtype, tiles.stored),
            ),
            collective_axes="wg",
        )
        def _run_scope(out_smem, full, free, **smem):
            wg, barriers = lax.axis_index("wg"), (full, free)
            each = functools.partial(self._run_units, steps, scalars)

            @pl.when(wg == N_COMPUTE)
            def _run_loads():
                load = functools.partial(self._load_unit, steps, refs, barriers, smem)
                self._run_memory(functools.partial(each, load), free)

            @pl.when(wg < N_COMPUTE)
            def _run_compute():
                plgpu.set_max_registers(ring.COMPUTE_REGISTERS, action="increase")
                store = functools.partial(self._store_unit, steps, out, out_smem.at[wg])
                each(functools.partial(self._compute_unit, barriers, smem, store))
                plgpu.wait_smem_to_gmem(0)

    def _run_units(self, steps, scalars, run):
        """run(unit, first stage) of each unit of this block; returns all stages.

        Every second time blocks take units from the last to the first: where units
        become smaller, all blocks then have about as much to do.
        """
        n_blocks, block = self.launch.n_blocks, lax.axis_index("block")

        def order(i):
            return jnp.where(lax.rem(i, 2) == 0, block, n_blocks - 1 - block)

        def run_unit(i, stage):
            unit = steps.unit(i * n_blocks + order(i), scalars)
            run(unit, stage)
            return stage + unit.n_steps

        n_units = steps.count(scalars)
        n_mine = lax.div(n_units, n_blocks)
        n_mine += jnp.int32(n_mine * n_blocks + order(n_mine) < n_units)
        return lax.fori_loop(0, n_mine, run_unit, jnp.int32(0))

    def _run_memory(self, load, free):
        stages = self.launch.tiles.stages
        plgpu.set_max_registers(ring.MEMORY_REGISTERS, action="decrease")
        n_stages = load()

        # As in `ring`: no arrival may be left at the end.
        @pl.loop(lax.max(n_stages - stages, 0), n_stages)
        def _wait_until_all_are_read(step):
            plgpu.barrier_wait(free.at[lax.rem(step, stages)])

    def _compute_unit(self, barriers, smem, store, unit, step):
        has_rows = unit.n_rows > lax.axis_index("wg") * self.launch.tiles.rows

        @pl.when(has_rows)
        def _multiply_rows():
            own = functools.partial(store, unit)
            self._multiply_unit(unit, step, barriers, smem, own)

        @pl.when(~has_rows)
        def _pass_over_rows():
            self._pass_over(unit, step, barriers)

    def _scratch_types(self, dtype) -> dict:
        t = self.launch.tiles
        columns = t.columns // self.n_results
        lhs = (ROWS, t.depth) if self.lhs == "mk" else (t.depth, ROWS)
        rhs = (columns, t.depth) if self.rhs == "nk" else (t.depth, columns)
        smem = functools.partial(plgpu.SMEM, transforms=ring.swizzle(dtype))
        buffers = {
            f"rhs{j}": smem((t.stages, *rhs), dtype) for j in range(self.n_results)
        }
        return buffers | dict(
            lhs0=smem((t.stages, *lhs), dtype),
            full=plgpu.Barrier(num_arrivals=1 + self.n_results, num_barriers=t.stages),
            free=plgpu.Barrier(num_arrivals=N_COMPUTE, num_barriers=t.stages),
        )

    def _load_unit(self, steps, refs, barriers, smem, unit, first):
        full, free = barriers
        stages = self.launch.tiles.stages

        @pl.loop(0, unit.n_steps)
        def _run_stage(i):
            slot = lax.rem(first + i, stages)

            @pl.when(first + i >= stages)
            def _wait_until_read():
                plgpu.barrier_wait(free.at[slot])

            def put(side, number, ref):
                target = smem[f"{side}{number}"].at[slot]
                plgpu.copy_gmem_to_smem(ref, target, full.at[slot])

            steps.load(unit, i, refs, put)

    def _pass_over(self, unit, first, barriers):
        full, free = barriers

        @pl.loop(0, unit.n_steps)
        def _run_stage(i):
            slot = lax.rem(first + i, self.launch.tiles.stages)
            plgpu.barrier_wait(full.at[slot])
            plgpu.barrier_arrive(free.at[slot])

    def _multiply_unit(self, unit, first, barriers, smem, epilogue):
        full, free = barriers
        t, n = self.launch.tiles, self.n_results
        mine = pl.ds(lax.axis_index("wg") * t.rows, t.rows)

        def stage(i, accs):
            slot = lax.rem(first + i, t.stages)
            plgpu.barrier_wait(full.at[slot])
            lhs = smem["lhs0"]
            lhs = (
                lhs.at[slot, mine]
                if self.lhs == "mk"
                else lhs.at[slot, :, mine].transpose((1, 0))
            )
            for j, acc in enumerate(accs):
                rhs = smem[f"rhs{j}"].at[slot]
                rhs = rhs.transpose((1, 0)) if self.rhs == "nk" else rhs
                plgpu.wgmma(acc, lhs, rhs)
            # This stage's products stay in flight, as in `ring`.
            plgpu.wgmma_wait(n)

            @pl.when(i > 0)
            def _release_previous():
                plgpu.barrier_arrive(free.at[lax.rem(first + i - 1, t.stages)])

            return accs

        acc = plgpu.WGMMAAccumulatorRef((t.rows, t.columns // n), jnp.float32)

        @functools.partial(pl.run_scoped, **{f"acc{j}": acc for j in range(n)})
        def _run_products(**accs):
            done = lax.fori_loop(0, unit.n_steps, stage, tuple(accs.values()))
            sums = [acc[...] for acc in done]

            @pl.when(unit.n_steps > 0)
            def _release_last():
                last = lax.rem(first + unit.n_steps - 1, t.stages)
                plgpu.barrier_arrive(free.at[last])

            epilogue(sums)

    def _store_unit(self, steps, out, smem, unit, sums):
        t = self.launch.tiles
        row, targets, sources = lax.axis_index("wg") * t.rows, [], []
        for gmem, own in zip(out, sums, strict=True):
            for j, part in enumerate(parts(own, t.stored)):
                columns = pl.ds(unit.column + j * t.stored, t.stored)
                targets.append(steps.target(gmem, unit, row, columns))
                sources.append(lambda x=part, d=gmem.dtype: x.astype(d))
        ring.store(targets, sources, smem)
