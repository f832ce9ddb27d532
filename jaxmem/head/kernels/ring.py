"""A persistent, warp-specialised matrix product with an epilogue per tile.

Each block has three warpgroups. One loads tiles of both factors by TMA into a ring of
SMEM buffers, ahead of their use and across tile boundaries; the other two multiply 64
rows each and pass the float32 accumulator of a finished tile to an epilogue.

      memory warpgroup     wait free[s] ─ TMA lhs, rhs → ring[s] ─ full[s]
      compute warpgroups   wait full[s] ─ wgmma ─ arrive free[s-1] ─ … ─ epilogue(tile)

Blocks are persistent, and the blocks of a cluster load the right factor once, by
multicast. Cluster c processes units c, c + n_clusters, … A unit is one row tile per
block times a group of column tiles.
"""

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmem.head.kernels.tiles import N_COMPUTE, Tiles

MEMORY_REGISTERS = 40  # per thread; the fewest that hold the addresses
COMPUTE_REGISTERS = 232  # per thread of the other warpgroups


@dataclasses.dataclass(frozen=True)
class RingProduct:
    """Static facts of a launch that computes lhs [M, K] · rhs [K, N], tile by tile."""

    tiles: Tiles
    dtype: np.dtype  # of both factors: 16 bits, or int8
    lhs: Literal["mk", "km"]  # its axes in memory order
    rhs: Literal["kn", "nk"]
    n_blocks: int
    splits: int = 1  # parts of K, each of which is summed by itself

    @property
    def sums_dtype(self) -> np.dtype:
        """The dtype of the accumulators."""
        return np.dtype(np.int32 if self.dtype == np.int8 else np.float32)

    def launch(self) -> dict:
        """Arguments of the launch: one block per SM, one warpgroup that loads."""
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
        """As many clusters as the chip runs at a time."""
        return max(self.n_blocks // self.tiles.cluster, 1)


class Extent(NamedTuple):
    """The part of the product to compute; int32, static or read by the kernel."""

    n_rows: Any  # of lhs, from the first
    n_tiles: Any  # of columns
    n_steps: Any  # pipeline stages of the sum over K, or a part of it; at least one
    first_tile: Any = 0  # of rhs' columns
    first_step: Any = 0  # of rhs' K; that of lhs starts at 0


class Tile(NamedTuple):
    """Position of a tile of the product."""

    first_row: Any  # of the block
    column: Any  # index of the tile among those of rhs
    split: Any = 0  # part of K


class Ring(NamedTuple):
    """SMEM buffers and barriers between the memory warpgroup and the others."""

    lhs_smem: Any
    rhs_smem: Any
    full: Any
    free: Any

    @classmethod
    def scratch(cls, product: RingProduct) -> dict:
        """The buffers and barriers to allocate, by field."""
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
    """All blocks that a multicast writes to must have released the buffer."""
    if t.cluster == 1:
        return plgpu.Barrier(num_arrivals=N_COMPUTE, num_barriers=t.stages)
    return plgpu.ClusterBarrier(
        collective_axes=("peer",), num_arrivals=N_COMPUTE, num_barriers=t.stages
    )


def swizzle(dtype, width: int = 64):
    """The layout of tiles that wgmma and TMA share: swizzled rows of 128 bytes."""
    size = np.dtype(dtype).itemsize
    width = min(width, 128 // size)
    tiling = plgpu.TilingTransform((8, width))  # pyright: ignore[reportAbstractUsage]
    swizzling = plgpu.SwizzleTransform(  # pyright: ignore[reportAbstractUsage]
        size * width
    )
    return tiling, swizzling


def in_place(run, x):
    """Return x after `run(ref of x)`, a kernel that writes to it in place.

    If x is a slice of a larger array, or becomes one, as the outputs that a scan stacks
    do, XLA (jaxlib 0.11.2) passes the larger array to the kernel and forgets that the
    kernel writes into its operand: the result is uninitialised memory. An optimization
    barrier prevents that; this function puts one after the kernel. If x may be a slice,
    the caller puts another one before it, but not in a loop that carries x: if XLA
    unrolls that loop, as `xla_gpu_enable_while_loop_double_buffering` asks, the barrier
    becomes its own control predecessor, and compilation fails.
    """
    return lax.optimization_barrier(pl.run_state(run)(x))


def run(product: RingProduct, extent: Extent, ring: Ring, lhs_gmem, rhs_gmem, unit):
    """Runs each warpgroup's role; unit(tile, n_tiles, step) as in `for_each_unit`.

    rhs_gmem is a pair: the part of the right factor with whole tiles along its long
    axis, or with whole stages, and the padded remainder, or None.
    """
    wg = lax.axis_index("wg")

    @pl.when(wg == N_COMPUTE)
    def _run_memory_warpgroup():
        plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")
        _load_tiles(product, extent, lhs_gmem, rhs_gmem, ring)

    @pl.when(wg < N_COMPUTE)
    def _run_compute_warpgroup():
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        for_each_unit(product, extent, unit, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)


def for_each_unit(product: RingProduct, extent: Extent, unit, carry):
    """Loop `carry = unit(tile, n_tiles, carry)` over the units of this block.

    tile(i) is the i-th `Tile` of the unit's `n_tiles`; neighbouring units process
    neighbouring tiles at the same time. The column tiles of a group depend only on how
    many there are, so the order of a row's reduction does not depend on other rows: a
    product of one split is batch-invariant.
    """
    t = product.tiles
    n_of_split = ceil_div(extent.n_rows, t.cluster_rows)
    n_row_tiles = n_of_split * product.splits
    n_groups = ceil_div(extent.n_tiles, t.group)
    cluster = lax.axis_index("cluster")
    n_mine = ceil_div(n_row_tiles * n_groups - cluster, product.n_clusters)

    def body(i, carry):
        unit_id = i * product.n_clusters + cluster
        panel = lax.div(unit_id, t.panel * n_groups)
        in_panel = unit_id - panel * (t.panel * n_groups)
        width = lax.min(n_row_tiles - panel * t.panel, t.panel)
        row_tile = panel * t.panel + lax.rem(in_panel, width)
        group, split = lax.div(in_panel, width), 0
        if product.splits > 1:
            split = lax.div(row_tile, n_of_split)
            row_tile = lax.rem(row_tile, n_of_split)
        first_row = (row_tile * t.cluster + lax.axis_index("peer")) * t.block_rows

        def tile(i):
            column = extent.first_tile + group + i * n_groups
            return Tile(first_row, column, split)

        return unit(tile, ceil_div(extent.n_tiles - group, n_groups), carry)

    return lax.fori_loop(0, n_mine, body, carry)


def ceil_div(n, divisor):
    """⌈n / divisor⌉ of non-negative int32."""
    return lax.div(jnp.int32(n + divisor - 1), jnp.int32(divisor))


def _load_tiles(product, extent, lhs_gmem, rhs_gmem, ring):
    """Loads every stage of every tile, in the order of use."""
    t = product.tiles

    def unit(tile, n_tiles, step):
        def stage(i, step):
            position = tile(lax.div(i, extent.n_steps))
            k = lax.rem(i, extent.n_steps)
            if product.splits > 1:
                k = position.split * extent.n_steps + k
            slot = lax.rem(step, t.stages)

            @pl.when(step >= t.stages)
            def _wait_until_read():
                plgpu.barrier_wait(ring.free.at[slot])

            full = ring.full.at[slot]
            rows = pl.ds(position.first_row, t.block_rows)
            columns = pl.ds(position.column * t.columns, t.columns)
            lhs_k = pl.ds(k * t.depth, t.depth)
            rhs_k = pl.ds((extent.first_step + k) * t.depth, t.depth)
            lhs = (rows, lhs_k) if product.lhs == "mk" else (lhs_k, rows)
            plgpu.copy_gmem_to_smem(lhs_gmem.at[lhs], ring.lhs_smem.at[slot], full)
            _load_rhs(product, rhs_gmem, columns, rhs_k, ring.rhs_smem.at[slot], full)
            return step + 1

        return lax.fori_loop(0, n_tiles * extent.n_steps, stage, step)

    n_stages = for_each_unit(product, extent, unit, jnp.int32(0))

    # A kernel must not exit while a barrier has an arrival that was not waited for.
    @pl.loop(lax.max(n_stages - t.stages, 0), n_stages)
    def _wait_until_all_are_read(step):
        plgpu.barrier_wait(ring.free.at[lax.rem(step, t.stages)])


def _load_rhs(product, gmem, columns, k, smem, full):
    """Loads from the first array, or from the remainder in the second."""

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
    # Tiles or stages along the axis that is split.
    along = columns if product.rhs == "nk" else k
    in_first = along.start < first.shape[0]
    pl.when(in_first)(lambda: load(first, columns, k))
    start = pl.ds(along.start - first.shape[0], along.size)
    of_last = (start, k) if product.rhs == "nk" else (columns, start)
    pl.when(~in_first)(lambda: load(last, *of_last))


def multiply(product: RingProduct, extent: Extent, ring: Ring, step, epilogue) -> Any:
    """epilogue(this warpgroup's rows of a tile), accumulated from stage `step` on."""
    t = product.tiles
    rows = pl.ds(lax.axis_index("wg") * t.rows, t.rows)

    def stage(i, acc_ref):
        slot = lax.rem(step + i, t.stages)
        plgpu.barrier_wait(ring.full.at[slot])
        lhs, rhs = ring.lhs_smem, ring.rhs_smem.at[slot]
        lhs = (
            lhs.at[slot, rows]
            if product.lhs == "mk"
            else lhs.at[slot, :, rows].transpose((1, 0))
        )
        plgpu.wgmma(acc_ref, lhs, rhs.transpose((1, 0)) if product.rhs == "nk" else rhs)
        # One wgmma stays in flight: releasing its own stage here would wait for it.
        plgpu.wgmma_wait(1)

        @pl.when(i > 0)
        def _release_previous():
            plgpu.barrier_arrive(ring.free.at[lax.rem(step + i - 1, t.stages)])

        return acc_ref

    @functools.partial(
        pl.run_scoped,
        acc_ref=plgpu.WGMMAAccumulatorRef((t.rows, t.columns), product.sums_dtype),
    )
    def accumulated(acc_ref):
        acc_ref = lax.fori_loop(0, extent.n_steps, stage, acc_ref)
        sums = acc_ref[...]
        last = lax.rem(step + extent.n_steps - 1, t.stages)
        plgpu.barrier_arrive(ring.free.at[last])
        return epilogue(sums)

    return accumulated


def store(parts_gmem, parts, smem, add=False):
    """Multi-buffered SMEM → GMEM stores of a tile's parts; none out of bounds."""
    for i, (part_gmem, part) in enumerate(zip(parts_gmem, parts, strict=True)):
        store_part(i, part_gmem, part, smem, add)


def store_part(i, part_gmem, part, smem, add=False, mend=None):
    """Stores the i-th part, computed once its buffer is free; `mend` may change it."""
    n_slots = smem.shape[0]
    plgpu.wait_smem_to_gmem(n_slots - 1, wait_read_only=True)
    smem[i % n_slots] = part()
    if mend is not None:
        mend(smem.at[i % n_slots])
    plgpu.commit_smem()
    copy = add_to if add else plgpu.copy_smem_to_gmem
    copy(smem.at[i % n_slots], part_gmem)


def add_to(smem, gmem):
    """Adds SMEM to GMEM, once per element and launch: sums are deterministic."""
    plgpu.copy_smem_to_gmem(smem, gmem, reduction_op="add")
