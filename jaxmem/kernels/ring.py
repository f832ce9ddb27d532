"""Tiles of a matrix product in registers, fed through a ring of buffers.

Three warpgroups a block. One copies tiles of the two factors into a ring of buffers in
shared memory and runs ahead, over the ends of tiles; the other two multiply 64 rows
each and hand a finished tile of float32 sums to an epilogue.

      memory warpgroup     wait free[s] ─ TMA lhs, rhs → ring[s] ─ full[s]
      compute warpgroups   wait full[s] ─ wgmma ─ arrive free[s-1] ─ … ─ epilogue(tile)

Blocks are persistent, and a cluster of them shares what it loads of the right factor:
cluster c takes units c, c + n_clusters, … A unit is one tile of rows a block times a
group of tiles of columns.
"""

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmem.kernels.tiles import N_COMPUTE, Tiles

MEMORY_REGISTERS = 40  # a thread; the fewest that hold the addresses
COMPUTE_REGISTERS = 232  # what is left to each of the others


@dataclasses.dataclass(frozen=True)
class Product:
    """Static facts of a launch that makes lhs [M, K] · rhs [K, N], tile by tile."""

    tiles: Tiles
    dtype: np.dtype  # of both factors, 16 bits
    lhs: Literal["mk", "km"]  # how it lies in memory
    rhs: Literal["kn", "nk"]
    n_blocks: int

    def launch(self) -> dict:
        """Of the kernel: one block a multiprocessor, a warpgroup more than multiply."""
        return dict(
            grid=(self.n_clusters,),
            grid_names=("cluster",),
            cluster=(self.tiles.cluster,),
            cluster_names=("peer",),
            num_threads=N_COMPUTE + 1,
            thread_name="wg",
        )

    @property
    def n_clusters(self) -> int:
        """As many as the chip holds at a time."""
        return max(self.n_blocks // self.tiles.cluster, 1)


class Extent(NamedTuple):
    """What part of the product to make; int32, known when the kernel runs or before."""

    n_rows: Any  # of lhs, from the first
    n_tiles: Any  # of columns
    n_steps: Any  # stages of the ring that the sum over K takes; at least one
    first_tile: Any = 0  # of rhs' columns
    first_step: Any = 0  # of rhs' K; that of lhs starts at 0


class Tile(NamedTuple):
    """Where a tile of the product lies."""

    first_row: Any  # of the block
    column: Any  # number of the tile among those of rhs


class Ring(NamedTuple):
    """Buffers between the memory warpgroup and the others."""

    lhs_smem: Any
    rhs_smem: Any
    full: Any
    free: Any

    @classmethod
    def scratch(cls, product: Product) -> dict:
        """What to allocate, by field."""
        t = product.tiles
        rows, columns, k = t.block_rows, t.columns, t.depth
        lhs = (rows, k) if product.lhs == "mk" else (k, rows)
        rhs = (columns, k) if product.rhs == "nk" else (k, columns)
        smem = functools.partial(plgpu.SMEM, transforms=swizzle(product.dtype))
        return dict(
            lhs_smem=smem((t.stages, *lhs), product.dtype),
            rhs_smem=smem((t.stages, *rhs), product.dtype),
            full=plgpu.Barrier(num_arrivals=2, num_barriers=t.stages),
            free=_free_barriers(t),
        )


def _free_barriers(t: Tiles):
    """All blocks that a tile is copied to must be done with what it overwrites."""
    if t.cluster == 1:
        return plgpu.Barrier(num_arrivals=N_COMPUTE, num_barriers=t.stages)
    return plgpu.ClusterBarrier(
        collective_axes=("peer",), num_arrivals=N_COMPUTE, num_barriers=t.stages
    )


def swizzle(dtype, width: int = 64):
    """How wgmma and TMA lay tiles out without bank conflicts: rows of 128 bytes."""
    size = np.dtype(dtype).itemsize
    width = min(width, 128 // size)
    tiling = plgpu.TilingTransform((8, width))  # pyright: ignore[reportAbstractUsage]
    swizzling = plgpu.SwizzleTransform(  # pyright: ignore[reportAbstractUsage]
        size * width
    )
    return tiling, swizzling


def in_place(run, x):
    """x after run(ref of it), a kernel that writes to it.

    Where x is a slice of a larger array, or becomes one, as what a scan stacks, XLA
    would hand the kernel that array, and forget (jaxlib 0.11.2) that it writes into its
    operand: the result would be whatever its memory held. Not past a barrier, and one
    follows here. Where x may be a slice, callers put another before it, but not in a
    loop that carries x: where XLA unrolls that loop, as
    `xla_gpu_enable_while_loop_double_buffering` asks, the barrier would become an
    instruction that waits for itself, and nothing compiles.
    """
    return lax.optimization_barrier(pl.run_state(run)(x))


def run(product: Product, extent: Extent, ring: Ring, lhs_gmem, rhs_gmem, unit):
    """The roles of the warpgroups; unit(tiles, n_tiles, step) as in `for_each_unit`.

    rhs_gmem is a pair: of the right factor whole tiles along the axis that may be long,
    or whole stages; and what is left of it, in one of these, or None.
    """
    wg = lax.axis_index("wg")

    @pl.when(wg == N_COMPUTE)
    def _memory():
        plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")
        _load_tiles(product, extent, lhs_gmem, rhs_gmem, ring)

    @pl.when(wg < N_COMPUTE)
    def _compute():
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        for_each_unit(product, extent, unit, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)


def for_each_unit(product: Product, extent: Extent, unit, carry):
    """carry = unit(tile, n_tiles, carry) for this block's units.

    tile(i) is the i-th `Tile` of the unit's `n_tiles`; neighbouring units take
    neighbouring tiles at the same time. Which tiles of columns make a group depends on
    their number alone, so that the order of a row's sums does not depend on the rows.
    """
    t = product.tiles
    n_row_tiles = ceil_div(extent.n_rows, t.cluster_rows)
    n_groups = ceil_div(extent.n_tiles, t.group)
    cluster = lax.axis_index("cluster")
    n_mine = ceil_div(n_row_tiles * n_groups - cluster, product.n_clusters)

    def body(i, carry):
        at = i * product.n_clusters + cluster
        panel = lax.div(at, t.panel * n_groups)
        at = at - panel * (t.panel * n_groups)
        width = lax.min(n_row_tiles - panel * t.panel, t.panel)
        row_tile = panel * t.panel + lax.rem(at, width)
        group = lax.div(at, width)
        first_row = (row_tile * t.cluster + lax.axis_index("peer")) * t.block_rows

        def tile(i):
            return Tile(first_row, extent.first_tile + group + i * n_groups)

        return unit(tile, ceil_div(extent.n_tiles - group, n_groups), carry)

    return lax.fori_loop(0, n_mine, body, carry)


def ceil_div(n, by):
    """For int32 that is not negative."""
    return lax.div(jnp.int32(n + by - 1), jnp.int32(by))


def _load_tiles(product, extent, lhs_gmem, rhs_gmem, ring):
    """Every stage of every tile, in the order of use."""
    t = product.tiles

    def unit(tile, n_tiles, step):
        def stage(i, step):
            at, k = tile(lax.div(i, extent.n_steps)), lax.rem(i, extent.n_steps)
            slot = lax.rem(step, t.stages)

            @pl.when(step >= t.stages)
            def _wait_until_read():
                plgpu.barrier_wait(ring.free.at[slot])

            full = ring.full.at[slot]
            rows = pl.ds(at.first_row, t.block_rows)
            columns = pl.ds(at.column * t.columns, t.columns)
            lhs_k = pl.ds(k * t.depth, t.depth)
            rhs_k = pl.ds((extent.first_step + k) * t.depth, t.depth)
            lhs = (rows, lhs_k) if product.lhs == "mk" else (lhs_k, rows)
            plgpu.copy_gmem_to_smem(lhs_gmem.at[lhs], ring.lhs_smem.at[slot], full)
            _load_rhs(product, rhs_gmem, columns, rhs_k, ring.rhs_smem.at[slot], full)
            return step + 1

        return lax.fori_loop(0, n_tiles * extent.n_steps, stage, step)

    n_stages = for_each_unit(product, extent, unit, jnp.int32(0))

    # A barrier must not be given up with an arrival that nobody has seen.
    @pl.loop(lax.max(n_stages - t.stages, 0), n_stages)
    def _wait_until_all_are_read(step):
        plgpu.barrier_wait(ring.free.at[lax.rem(step, t.stages)])


def _load_rhs(product, gmem, columns, k, smem, full):
    """From the first array, or from what is left of it in the second."""

    def load(part, columns, k):
        plgpu.copy_gmem_to_smem(
            part.at[(columns, k) if product.rhs == "nk" else (k, columns)],
            smem,
            full,
            collective_axes="peer" if product.tiles.cluster > 1 else None,
        )

    first, last = gmem
    if last is None:
        return load(first, columns, k)
    # Tiles or stages along the axis that is cut.
    along = columns if product.rhs == "nk" else k
    in_first = along.start < first.shape[0]
    pl.when(in_first)(lambda: load(first, columns, k))
    start = pl.ds(along.start - first.shape[0], along.size)
    of_last = (start, k) if product.rhs == "nk" else (columns, start)
    pl.when(~in_first)(lambda: load(last, *of_last))


def multiply(product: Product, extent: Extent, ring: Ring, step, epilogue) -> Any:
    """epilogue(this warpgroup's rows of a tile), from stage `step` on."""
    t = product.tiles
    mine = pl.ds(lax.axis_index("wg") * t.rows, t.rows)

    def stage(i, acc_ref):
        slot = lax.rem(step + i, t.stages)
        plgpu.barrier_wait(ring.full.at[slot])
        lhs, rhs = ring.lhs_smem, ring.rhs_smem.at[slot]
        lhs = (
            lhs.at[slot, mine]
            if product.lhs == "mk"
            else lhs.at[slot, :, mine].transpose((1, 0))
        )
        plgpu.wgmma(acc_ref, lhs, rhs.transpose((1, 0)) if product.rhs == "nk" else rhs)
        # One product stays in flight: releasing its own stage would wait for it.
        plgpu.wgmma_wait(1)

        @pl.when(i > 0)
        def _release_previous():
            plgpu.barrier_arrive(ring.free.at[lax.rem(step + i - 1, t.stages)])

        return acc_ref

    @functools.partial(
        pl.run_scoped,
        acc_ref=plgpu.WGMMAAccumulatorRef((t.rows, t.columns), jnp.float32),
    )
    def made(acc_ref):
        acc_ref = lax.fori_loop(0, extent.n_steps, stage, acc_ref)
        sums = acc_ref[...]
        last = lax.rem(step + extent.n_steps - 1, t.stages)
        plgpu.barrier_arrive(ring.free.at[last])
        return epilogue(sums)

    return made


def store(parts_gmem, parts, smem, add=False):
    """Parts of a tile leave from buffers by turns; none beyond an array's end."""
    for i, (part_gmem, part) in enumerate(zip(parts_gmem, parts, strict=True)):
        store_part(i, part_gmem, part, smem, add)


def store_part(i, part_gmem, part, smem, add=False):
    """The i-th of them, made once there is a buffer for it."""
    n_slots = smem.shape[0]
    plgpu.wait_smem_to_gmem(n_slots - 1, wait_read_only=True)
    smem[i % n_slots] = part()
    plgpu.commit_smem()
    leave = add_to if add else plgpu.copy_smem_to_gmem
    leave(smem.at[i % n_slots], part_gmem)


def add_to(smem, gmem):
    """One addition an element and launch: the order of sums is that of the launches."""
    plgpu.copy_smem_to_gmem(smem, gmem, reduction_op="add")
