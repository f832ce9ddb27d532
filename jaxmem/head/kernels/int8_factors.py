"""The forward kernel with operands of 8 bits: scales, and channels in 16 bits.

The sums of a tile's products, int32, are scaled by a number for each row of hidden and
one for each row of W; then the product of the channels that are in 16 bits is added. A
label's column is masked, as the statistics are of the others.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxmem.head.kernels import logits, padding, ring
from jaxmem.head.kernels.logits import Env
from jaxmem.head.kernels.tiles import N_COMPUTE
from jaxmem.head.maths.eight_bits import CHANNELS, Rounded


def padded(x: Rounded) -> Rounded:
    """Rows whose numbers, and their channels, are multiples of a swizzle."""
    n, depth = x.values.shape
    rows, depth = padding.whole(n) - n, padding.whole(depth) - depth
    values = jnp.pad(x.values, ((0, rows), (0, depth)))
    return Rounded(
        values, jnp.pad(x.scale, (0, rows)), jnp.pad(x.wide, ((0, rows), (0, 0)))
    )


def operands(env: Env, hidden: Rounded, W: Rounded) -> dict[str, Any]:
    """The kernel's operands by name; both are `padded`."""
    return {
        "h": hidden.values, "w": W.values, "h_scale": hidden.scale,
        "w_scale": logits.whole_tiles(env, W.scale),
        "h_wide": hidden.wide, "w_wide": W.wide,
    }  # fmt: skip


def scratch(env: Env) -> dict[str, Any]:
    """Buffers of the warpgroups, by name."""
    t, dtype = env.tiles, env.exps_dtype
    transforms = ring.swizzle(dtype, CHANNELS)
    smem = functools.partial(plgpu.SMEM, dtype=dtype, transforms=transforms)
    return {
        "h_scale_smem": plgpu.SMEM((N_COMPUTE, t.rows), jnp.float32),
        "w_scale_smem": plgpu.SMEM((N_COMPUTE, t.columns), jnp.float32),
        "h_wide_smem": smem((N_COMPUTE, t.rows, CHANNELS)),
        "w_wide_smem": smem((N_COMPUTE, t.columns, CHANNELS)),
        "scales": plgpu.Barrier(num_arrivals=2, num_barriers=N_COMPUTE),
    }


def load_rows(rows, gmem, smem) -> jax.Array:
    """The scales of a unit's rows, whose channels in 16 bits are loaded, too."""
    scale = logits.fetch(smem["loaded"], gmem["h_scale"].at[rows], smem["h_scale_smem"])
    wide = gmem["h_wide"].at[rows, :]
    plgpu.copy_gmem_to_smem(wide, smem["h_wide_smem"], smem["loaded"])
    plgpu.barrier_wait(smem["loaded"])
    return scale


def load_columns(env: Env, tile, gmem, smem) -> None:
    """Starts to load what `scaled` waits for; all have read those of the last tile."""
    columns = pl.ds(tile * env.tiles.columns, env.tiles.columns)
    scales = gmem["w_scale"].at[columns]
    plgpu.copy_gmem_to_smem(scales, smem["w_scale_smem"], smem["scales"])
    wide = gmem["w_wide"].at[columns, :]
    plgpu.copy_gmem_to_smem(wide, smem["w_wide_smem"], smem["scales"])


def scaled(env: Env, sums: jax.Array, h_scale: jax.Array, smem) -> jax.Array:
    """The logits of a tile."""
    plgpu.barrier_wait(smem["scales"])
    width, z = env.tiles.stored, []
    for i, part in enumerate(logits.parts(sums, width)):
        columns = pl.ds(i * width, width)
        scale = lax.broadcast_in_dim(smem["w_scale_smem"][columns], part.shape, (1,))
        part = part.astype(jnp.float32) * scale * logits.along(h_scale, part.shape)
        wide = smem["w_wide_smem"].at[columns].transpose((1, 0))
        z.append(part + _multiply(smem["h_wide_smem"], wide, part.shape))
    return jnp.concatenate(z, axis=1)


def _multiply(lhs, rhs, shape):
    """The product of a warpgroup's rows and some columns, in registers."""

    @functools.partial(
        pl.run_scoped, acc_ref=plgpu.WGMMAAccumulatorRef(shape, jnp.float32)
    )
    def product(acc_ref):
        plgpu.wgmma(acc_ref, lhs, rhs)
        return acc_ref[...]

    return product
