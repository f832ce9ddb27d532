"""Scaled logits in registers: what both kernels of a head share."""

import dataclasses
import math

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmem.core.options import Layout
from jaxmem.kernels import padding
from jaxmem.kernels.ring import Extent, Product, ceil_div
from jaxmem.kernels.tiles import Tiles

# Masked logits. Finite, so that 0 · (z - max) is 0 and max - max is 0, without a test;
# a power of two, so that this holds of any multiple, rounded or not.
NOTHING = -(2.0**100)

# What part of itself a tensor core's sum lacks on average, for each of its terms: it is
# rounded towards zero as it grows (sm_90; measured over 512 to 8192 terms, see
# benchmarks/results/rounding_h200.csv).
SHORT = 9.3e-10

LOG2_E, LN_2 = math.log2(math.e), math.log(2)


@dataclasses.dataclass(frozen=True)
class Env:
    """Static facts of one launch over a head's logits."""

    tiles: Tiles
    n_rows: int  # a multiple of the cluster's rows
    depth: int
    columns: int  # of W
    vocab_size: int  # columns from here on are masked
    layout: Layout
    dtype: np.dtype
    softcap: float | None
    n_blocks: int

    @property
    def product(self) -> Product:
        """h Wᵀ."""
        rhs = "nk" if self.layout == "vd" else "kn"
        return Product(self.tiles, self.dtype, "mk", rhs, self.n_blocks)

    def extent(self, n_rows, n_tiles, first_tile=0) -> Extent:
        """Logits of some rows and tiles."""
        n_steps = ceil_div(self.depth, self.tiles.depth)
        return Extent(n_rows, n_tiles, n_steps, first_tile)

    @property
    def restored(self) -> float:
        """What h Wᵀ is multiplied by, for what its sums lack on average."""
        return 1 + SHORT * self.depth

    @property
    def n_tiles(self) -> int:
        """Tiles that cover W's columns."""
        return -(-self.columns // self.tiles.columns)


def weights(env: Env, W) -> dict:
    """W as the kernels read it."""
    first, last = padding.split(W, env.layout, env.tiles.columns)
    return {"w": first} if last is None else {"w": first, "w_last": last}


def odd_tiles(env: Env, labels):
    """Where a warpgroup's tile has labels or masked columns, [n_rows / rows, n_tiles].

    Few have: the others need not look at each column's number.
    """
    t = env.tiles
    tile = jnp.where(labels < 0, env.n_tiles, labels // t.columns)
    of_rows = jnp.arange(env.n_rows, dtype=jnp.int32) // t.rows
    masked = jnp.arange(env.n_tiles) >= env.vocab_size // t.columns
    tiles = jnp.broadcast_to(masked, (env.n_rows // t.rows, env.n_tiles))
    return tiles.astype(jnp.int32).at[of_rows, tile].set(1, mode="drop")


def parts(z, width):
    """The same columns, a few at a time: what is made of few fits in the registers."""
    return [z[:, i : i + width] for i in range(0, z.shape[1], width)]


def along(row, shape):
    """A number a row, over the columns."""
    return lax.broadcast_in_dim(row, shape, (0,))


def whole_tiles(env: Env, bias):
    """Bias [V], padded: no element of a copy of one axis may lie outside."""
    n = env.n_tiles * env.tiles.columns
    return jnp.pad(bias, (0, n - bias.shape[0]))


def fetch(loaded, x_gmem, x_smem):
    """A few numbers, waited for."""
    plgpu.copy_gmem_to_smem(x_gmem, x_smem, loaded)
    plgpu.barrier_wait(loaded)
    return x_smem[...]


def to_base_2(env: Env, bias) -> float:
    """Times this, what `scale` returns is log2 of an exponential, as the chip takes it.

    Where nothing before needs the logits themselves, `restored` waits for this factor,
    and so costs nothing.
    """
    waits = bias is None and env.softcap is None
    return LOG2_E * (env.restored if waits else 1.0)


def scale(env: Env, z, bias, inverse_temperature):
    """Logits after bias, softcap and temperature; see `to_base_2`."""
    if bias is not None:
        z = z * env.restored + lax.broadcast_in_dim(bias, z.shape, (1,))
    if env.softcap is not None:
        # tanh(x) as 1 - 2/(1 + e^2x): the chip's own tanh is good to 11 bits only.
        factor = (env.restored if bias is None else 1) * 2 / env.softcap
        z = env.softcap - 2 * env.softcap / (1 + jnp.exp(z * factor))
    if inverse_temperature is not None:
        z = z * inverse_temperature
    return z if bias is None else jnp.maximum(z, NOTHING)


def column(shape, first):
    """Where each logit stands in the vocabulary."""
    return lax.broadcasted_iota(jnp.int32, shape, 1) + first
