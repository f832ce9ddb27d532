"""Tiles of scaled logits in registers: what both kernels of a head share.

Three warpgroups a block. One copies tiles of hidden and W into a ring of buffers in
shared memory and runs ahead, over the ends of tiles; the other two multiply 64 rows
each and hand a finished tile of f32 logits to an epilogue.

      memory warpgroup     wait free[s] ─ TMA h, W → ring[s] ─ full[s]
      compute warpgroups   wait full[s] ─ wgmma ─ arrive free[s-1] ─ … ─ epilogue(tile)

Blocks are persistent: block b takes units b, b + n_blocks, … A unit is one tile of
rows times a group of tiles of the vocabulary. Which columns a group holds depends on
the vocabulary alone, so the order of a row's sums does not depend on the other rows.
"""

import dataclasses
import functools
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmem._spec import Layout
from jaxmem.kernels.tiles import N_COMPUTE, Tiles

# Masked logits. Finite, so that 0 · (z - max) is 0 and max - max is 0, without a test.
NOTHING = -1e30

MEMORY_REGISTERS = 40  # a thread; the fewest that hold the addresses
COMPUTE_REGISTERS = 232  # what is left to each of the others


@dataclasses.dataclass(frozen=True)
class Env:
    """Static facts of one launch."""

    tiles: Tiles
    n_rows: int  # a multiple of the block's rows
    depth: int
    columns: int  # of W
    visited: int  # columns to make tiles of, from the first
    vocab_size: int  # columns from here on are masked
    layout: Layout
    dtype: np.dtype
    softcap: float | None
    n_blocks: int

    @property
    def n_tiles(self) -> int:
        """Tiles that cover the columns to visit."""
        return pl.cdiv(self.visited, self.tiles.columns)

    @property
    def n_groups(self) -> int:
        """Units of one tile of rows."""
        return pl.cdiv(self.n_tiles, self.tiles.group)

    def tile(self, group, i):
        """Number of a group's i-th tile; neighbours are taken at the same time."""
        return group + i * self.n_groups

    @property
    def n_steps(self) -> int:
        """Stages of the ring that one tile takes."""
        return pl.cdiv(self.depth, self.tiles.depth)


@dataclasses.dataclass(frozen=True)
class Ring:
    """Buffers between the memory warpgroup and the others."""

    h_smem: Any
    w_smem: Any
    full: Any
    free: Any

    @classmethod
    def scratch(cls, env: Env) -> dict:
        """What to allocate, by field."""
        t = env.tiles
        swizzled = swizzle()
        w_tile = (t.columns, t.depth) if env.layout == "vd" else (t.depth, t.columns)
        return dict(
            h_smem=plgpu.SMEM(
                (t.stages, t.block_rows, t.depth), env.dtype, transforms=swizzled
            ),
            w_smem=plgpu.SMEM((t.stages, *w_tile), env.dtype, transforms=swizzled),
            full=plgpu.Barrier(num_arrivals=2, num_barriers=t.stages),
            free=plgpu.Barrier(num_arrivals=N_COMPUTE, num_barriers=t.stages),
        )


def swizzle(width: int = 64):
    """How wgmma and TMA lay out 16-bit tiles without bank conflicts."""
    width = min(width, 64)
    tiling = plgpu.TilingTransform((8, width))  # pyright: ignore[reportAbstractUsage]
    swizzling = plgpu.SwizzleTransform(2 * width)  # pyright: ignore[reportAbstractUsage]
    return tiling, swizzling


def for_each_unit(env: Env, n_active, unit, carry):
    """carry = unit(row tile, group, tiles of it, carry), for this block's units."""
    t = env.tiles
    n_row_tiles = lax.div(n_active + t.block_rows - 1, t.block_rows)
    n_units = n_row_tiles * env.n_groups
    block = lax.axis_index("block")
    n_mine = lax.div(n_units - block + env.n_blocks - 1, env.n_blocks)

    def body(i, carry):
        at = i * env.n_blocks + block
        panel = lax.div(at, t.panel * env.n_groups)
        at = at - panel * (t.panel * env.n_groups)
        width = lax.min(n_row_tiles - panel * t.panel, t.panel)
        row_tile = panel * t.panel + lax.rem(at, width)
        group = lax.div(at, width)
        n_tiles = lax.div(env.n_tiles - group + env.n_groups - 1, env.n_groups)
        return unit(row_tile, group, n_tiles, carry)

    return lax.fori_loop(0, n_mine, body, carry)


def load_tiles(env: Env, n_active, h_gmem, w_gmem, ring: Ring):
    """The memory warpgroup: every stage of every tile, in the order of use."""
    t = env.tiles
    plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")

    def unit(row_tile, group, n_tiles, step):
        rows = pl.ds(row_tile * t.block_rows, t.block_rows)

        def stage(i, step):
            tile = env.tile(group, lax.div(i, env.n_steps))
            columns = pl.ds(tile * t.columns, t.columns)
            deep = pl.ds(lax.rem(i, env.n_steps) * t.depth, t.depth)
            slot = lax.rem(step, t.stages)

            @pl.when(step >= t.stages)
            def _wait_until_read():
                plgpu.barrier_wait(ring.free.at[slot])

            full = ring.full.at[slot]
            w_tile = (columns, deep) if env.layout == "vd" else (deep, columns)
            plgpu.copy_gmem_to_smem(h_gmem.at[rows, deep], ring.h_smem.at[slot], full)
            plgpu.copy_gmem_to_smem(w_gmem.at[w_tile], ring.w_smem.at[slot], full)
            return step + 1

        return lax.fori_loop(0, n_tiles * env.n_steps, stage, step)

    n_steps = for_each_unit(env, n_active, unit, jnp.int32(0))

    # A barrier must not be given up with an arrival that nobody has seen.
    @pl.loop(lax.max(n_steps - t.stages, 0), n_steps)
    def _wait_until_all_are_read(step):
        plgpu.barrier_wait(ring.free.at[lax.rem(step, t.stages)])


def multiply(env: Env, ring: Ring, step, epilogue) -> Any:
    """epilogue(h Wᵀ of this warpgroup), from the stages `step`, `step` + 1, …"""
    t = env.tiles
    mine = pl.ds(lax.axis_index("wg") * t.rows, t.rows)

    def stage(i, acc_ref):
        slot = lax.rem(step + i, t.stages)
        plgpu.barrier_wait(ring.full.at[slot])
        w_smem = ring.w_smem.at[slot]
        w_smem = w_smem.transpose((1, 0)) if env.layout == "vd" else w_smem
        plgpu.wgmma(acc_ref, ring.h_smem.at[slot, mine], w_smem)
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
        acc_ref = lax.fori_loop(0, env.n_steps, stage, acc_ref)
        z = acc_ref[...]
        last = lax.rem(step + env.n_steps - 1, t.stages)
        plgpu.barrier_arrive(ring.free.at[last])
        return epilogue(z)

    return made


def along(row, shape):
    """A number a row, over the columns."""
    return lax.broadcast_in_dim(row, shape, (0,))


def whole_tiles(env: Env, bias):
    """Bias [V], padded: no element of a copy of one axis may lie outside."""
    n = env.n_tiles * env.tiles.columns
    return jnp.pad(bias[:n], (0, max(n - bias.shape[0], 0)))


def fetch(loaded, x_gmem, x_smem):
    """A few numbers, waited for."""
    plgpu.copy_gmem_to_smem(x_gmem, x_smem, loaded)
    plgpu.barrier_wait(loaded)
    return x_smem[...]


def scale(env: Env, z, bias, inverse_temperature):
    """(capped, z): logits after the softcap, and after all of it."""
    if bias is not None:
        z = z + lax.broadcast_in_dim(bias, z.shape, (1,))
    if env.softcap is not None:
        # tanh(x) as 1 - 2/(1 + e^2x): the chip's own tanh is good to 11 bits only.
        z = env.softcap - 2 * env.softcap / (1 + jnp.exp(z * (2 / env.softcap)))
    capped = z
    if inverse_temperature is not None:
        z = z * inverse_temperature
    if bias is not None:
        z = jnp.maximum(z, NOTHING)
    return capped, z


def column(env: Env, shape, tile):
    """Where each logit of a tile stands in the vocabulary."""
    return lax.broadcasted_iota(jnp.int32, shape, 1) + tile * env.tiles.columns
