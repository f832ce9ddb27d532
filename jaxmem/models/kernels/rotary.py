"""Queries, keys and values of new tokens from one product.

XLA needs five kernels for it, as it fuses neither the norms of queries and keys with
their rotation nor one with the other. Here a program reads one head of one row.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxmem.head.kernels.row_tiles import store

# No program reads what it writes.
_PARAMS = plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True)


class Norms(NamedTuple):
    """The RMS norms of queries and keys, see `jaxmem.models.norms.rms_normalize`.

    The scales are those of all layers, as XLA would copy one layer's for a kernel.
    """

    layer: jax.typing.ArrayLike  # the one to use
    scales: tuple[jax.Array, ...]  # of both, [layers, head_dim]
    offset: float
    epsilon: float


def supports(width: int) -> bool:
    """True if `split` can run on heads of this width."""
    return width in (64, 128, 256, 512)  # halves that the threads of a warp share


def split(
    joined: jax.Array, kv_heads: int, tables: tuple[jax.Array, ...],
    norms: Norms | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Queries and keys, normalised and rotated, and values, [B, heads, head_dim] each.

        q_h = R(n(x_h)),   k_h = R(n(x_(heads + h))),   v_h = x_(heads + kv_heads + h)

    x is `joined`, of one token per row. R is `jaxmem.models.positions.apply_rope`, for
    tables of cosines and sines, [B, head_dim / 2] float32. Both n and R compute in
    float32, and their results are rounded.
    """
    rows, all_heads, width = joined.shape
    sizes = all_heads - 2 * kv_heads, kv_heads, kv_heads
    scaling, options = (), (0.0, 0.0)
    if norms is not None:
        layer = jnp.reshape(norms.layer, (1,)).astype(jnp.int32)
        scaling, options = (layer, *norms.scales), (norms.offset, norms.epsilon)
    kernel = plgpu.kernel(
        _RotaryKernel(sizes, width // 2, *options),
        out_type=[jax.ShapeDtypeStruct((rows, n, width), joined.dtype) for n in sizes],
        grid=(all_heads, rows),
        grid_names=("head", "row"),
        compiler_params=_PARAMS,
    )
    return kernel(joined, *tables, *scaling)


@dataclasses.dataclass(frozen=True)
class _RotaryKernel:
    """One program: a head of a row."""

    sizes: tuple[int, int, int]
    half: int
    offset: float
    epsilon: float

    __name__ = "rotary"

    def __call__(self, x_ref, cos_ref, sin_ref, *refs: Any):
        # Operands of the norms come before the three results.
        scaling, (query_ref, key_ref, value_ref) = refs[:-3], refs[-3:]
        row, head = lax.axis_index("row"), lax.axis_index("head")
        queries, keys = self.sizes[:2]
        own = self._read_halves(x_ref.at[row, head])
        cos, sin = self._load_half(cos_ref.at[row]), self._load_half(sin_ref.at[row])

        def put(ref, head, x):
            for half, part in zip(self._halves, x, strict=True):
                store(ref.at[row, head, half], part.astype(ref.dtype))

        def rotated(scale_index):
            low, high = (x.astype(jnp.float32) for x in own)
            if scaling:
                layer_ref, *scale_refs = scaling
                scales = self._read_halves(scale_refs[scale_index].at[layer_ref[0]])
                normal = self._normalise(low, high, scales)
                low, high = (x.astype(x_ref.dtype).astype(jnp.float32) for x in normal)
            return low * cos - high * sin, high * cos + low * sin

        @pl.when(head < queries)
        def _():
            put(query_ref, head, rotated(0))

        @pl.when((head >= queries) & (head < queries + keys))
        def _():
            put(key_ref, head - queries, rotated(1))

        @pl.when(head >= queries + keys)
        def _():
            put(value_ref, head - queries - keys, own)

    @property
    def _halves(self):
        return pl.ds(0, self.half), pl.ds(self.half, self.half)

    def _load_half(self, ref):
        """Half a head in each warp, so that its sums need no other warp."""
        layout = plgpu.Layout.TILED(
            plgpu.Tiling(((self.half,), (self.half // 32,))),
            warp_dims=(plgpu.Replicated(4),), lane_dims=(-2,), vector_dim=-1,
        )  # fmt: skip
        return plgpu.load(ref, layout=layout, optimized=False)

    def _read_halves(self, ref):
        return tuple(self._load_half(ref.at[half]) for half in self._halves)

    def _normalise(self, low, high, scales):
        square = (jnp.sum(low * low) + jnp.sum(high * high)) / (2 * self.half)
        rms = lax.rsqrt(square + self.epsilon)
        scales = (self.offset + scale.astype(jnp.float32) for scale in scales)
        return (x * rms * s for x, s in zip((low, high), scales, strict=True))
