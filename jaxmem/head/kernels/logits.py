"""Scaled logits in registers, for the forward and backward kernels."""

import dataclasses
import math

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmem.head.kernels import padding
from jaxmem.head.kernels.ring import Extent, RingProduct, ceil_div
from jaxmem.head.kernels.tiles import Tiles
from jaxmem.head.maths.spec import Layout

# The logit of a masked column. Finite, so that 0 · (z - max) is 0 and max - max is 0,
# without a test; a power of two, so that this holds of any multiple, rounded or not.
MASK_VALUE = -(2.0**100)

# The mean relative error of a tensor core's sum per term: accumulation truncates
# towards zero (sm_90; measured over 512 to 8192 terms, see
# benchmarks/results/rounding_h200.csv).
TRUNCATION_BIAS = 9.3e-10

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
    def product(self) -> RingProduct:
        """The product h Wᵀ."""
        rhs = "nk" if self.layout == "vd" else "kn"
        return RingProduct(self.tiles, self.dtype, "mk", rhs, self.n_blocks)

    def extent(self, n_rows, n_tiles, first_tile=0) -> Extent:
        """The part of the product with some rows and tiles."""
        n_steps = ceil_div(self.depth, self.tiles.depth)
        return Extent(n_rows, n_tiles, n_steps, first_tile)

    @property
    def in_8_bits(self) -> bool:
        """True if the factors are int8 (`kernels.int8_factors`)."""
        return self.dtype == np.int8

    @property
    def exps_dtype(self) -> np.dtype:
        """The dtype of stored exponentials."""
        return np.dtype(jnp.bfloat16) if self.in_8_bits else self.dtype

    @property
    def bias_correction(self) -> float:
        """Factor that corrects h Wᵀ for the mean truncation of its sums."""
        return 1 if self.in_8_bits else 1 + TRUNCATION_BIAS * self.depth

    @property
    def n_tiles(self) -> int:
        """Tiles that cover W's columns."""
        return -(-self.columns // self.tiles.columns)


def weights(env: Env, W) -> dict:
    """W as the kernels read it, by operand name."""
    first, last = padding.split(W, env.layout, env.tiles.columns)
    return {"w": first} if last is None else {"w": first, "w_last": last}


def tiles_with_labels_or_mask(env: Env, labels):
    """1 for each tile with a label or a mask, int32 [n_rows / tiles.rows, n_tiles].

    A tile is a warpgroup's rows. Few tiles have either; the others skip the comparison
    of column indices.
    """
    t = env.tiles
    tile = jnp.where(labels < 0, env.n_tiles, labels // t.columns)
    row_tile = jnp.arange(env.n_rows, dtype=jnp.int32) // t.rows
    masked = jnp.arange(env.n_tiles) >= env.vocab_size // t.columns
    tiles = jnp.broadcast_to(masked, (env.n_rows // t.rows, env.n_tiles))
    return tiles.astype(jnp.int32).at[row_tile, tile].set(1, mode="drop")


def parts(z, width):
    """Slices of z of `width` columns, so that intermediates fit in registers."""
    return [z[:, i : i + width] for i in range(0, z.shape[1], width)]


def along(row, shape):
    """One number per row, broadcast over the columns."""
    return lax.broadcast_in_dim(row, shape, (0,))


def whole_tiles(env: Env, bias):
    """Bias [V], padded: a copy along one axis must not read out of bounds."""
    n = env.n_tiles * env.tiles.columns
    return jnp.pad(bias, (0, n - bias.shape[0]))


def fetch(loaded, x_gmem, x_smem):
    """Copies a few numbers to SMEM, waits, and returns them."""
    plgpu.copy_gmem_to_smem(x_gmem, x_smem, loaded)
    plgpu.barrier_wait(loaded)
    return x_smem[...]


def to_base_2(env: Env, bias) -> float:
    """The factor that turns the result of `scale` into base-2 logits, for exp2.

    Where neither bias nor softcap needs the logits themselves, `bias_correction` is
    folded into this factor and costs nothing.
    """
    folded = bias is None and env.softcap is None
    return LOG2_E * (env.bias_correction if folded else 1.0)


def scale(env: Env, z, bias, inverse_temperature):
    """Logits after bias, softcap and temperature; see `to_base_2`."""
    if bias is not None:
        z = z * env.bias_correction + lax.broadcast_in_dim(bias, z.shape, (1,))
    if env.softcap is not None:
        # tanh(x) as 1 - 2/(1 + e^2x): the chip's own tanh is good to 11 bits only.
        factor = (env.bias_correction if bias is None else 1) * 2 / env.softcap
        z = env.softcap - 2 * env.softcap / (1 + jnp.exp(z * factor))
    if inverse_temperature is not None:
        z = z * inverse_temperature
    return z if bias is None else jnp.maximum(z, MASK_VALUE)


def column(shape, first):
    """Column index of each logit."""
    return lax.broadcasted_iota(jnp.int32, shape, 1) + first
