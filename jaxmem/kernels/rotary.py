"""Queries, keys and values of new tokens from one product, by Pallas's Triton backend.

XLA needs five kernels for it, as it fuses neither the norms of queries and keys with
their rotation nor one with the other. Here a program reads one head of one row.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu


class Norms(NamedTuple):
    """The RMS norms of queries and keys, see `jaxmem.models.norms.rms_normalize`.

    The scales are those of all layers, as XLA would copy one layer's for a kernel.
    """

    layer: jax.typing.ArrayLike  # the one to use
    scales: tuple[jax.Array, ...]  # of both, [layers, head_dim]
    offset: float
    epsilon: float


def supports(width: int) -> bool:
    """Whether `split` can run on heads of this width."""
    return 32 <= width <= 512 and width & (width - 1) == 0  # as Triton's tiles are


def split(
    joined: jax.Array, kv_heads: int, tables: tuple[jax.Array, ...],
    norms: Norms | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Queries and keys, normalised and rotated, and values.

        q_h = R(n(x_h)),   k_h = R(n(x_(heads + h))),   v_h = x_(heads + kv_heads + h)

    R is `jaxmem.models.positions.apply_rope`. Both n and R compute in float32, and
    their results are rounded.

    Args:
        joined: [B, heads + 2·kv_heads, head_dim], of one token per row.
        kv_heads: heads of keys, and of values.
        tables: cosines and sines of each row's angles, [B, head_dim / 2] float32.
        norms: n; None for no norms.

    Returns:
        Arrays [B, heads, head_dim], [B, kv_heads, head_dim] and the same, in the dtype
        of `joined`.
    """
    rows, all_heads, width = joined.shape
    sizes = all_heads - 2 * kv_heads, kv_heads, kv_heads
    scaling, options = (), (None, None)
    if norms is not None:
        layer = jnp.reshape(norms.layer, (1,)).astype(jnp.int32)
        scaling, options = (layer, *norms.scales), (norms.offset, norms.epsilon)
    of_row = pl.BlockSpec((None, width // 2), lambda b, h: (b, 0))
    return pl.pallas_call(
        functools.partial(_kernel, sizes, *options),
        grid=(rows, all_heads),
        in_specs=[
            pl.BlockSpec((None, None, width), lambda b, h: (b, h, 0)),
            of_row, of_row, *[pl.no_block_spec for _ in scaling],
        ],
        out_specs=[pl.no_block_spec] * 3,
        out_shape=[
            jax.ShapeDtypeStruct((rows, n, width), joined.dtype) for n in sizes
        ],
        compiler_params=plgpu.CompilerParams(num_warps=1),
        name="rotary",
    )(joined, *tables, *scaling)  # fmt: skip


def _kernel(sizes, offset, epsilon, x_ref, cos_ref, sin_ref, *refs: Any):
    *scaling, query_ref, key_ref, value_ref = refs
    row, head = pl.program_id(0), pl.program_id(1)
    queries, keys, _ = sizes
    half = x_ref.shape[0] // 2
    # Halves of a head are tiles of their own: Triton cannot rotate within a tile.
    halves = pl.ds(0, half), pl.ds(half, half)
    own = tuple(x_ref[at] for at in halves)

    def put(ref, head, x):
        for at, part in zip(halves, x, strict=True):
            plgpu.store(ref.at[row, head, at], part.astype(ref.dtype))

    def rotated(which):
        low, high = (x.astype(jnp.float32) for x in own)
        if scaling:
            layer_ref, *scale_refs = scaling
            scale_ref, layer = scale_refs[which], layer_ref[0]
            square = (jnp.sum(low * low) + jnp.sum(high * high)) / (2 * half)
            rms = lax.rsqrt(square + epsilon)
            scale = (offset + scale_ref[layer, at].astype(jnp.float32) for at in halves)
            normal = (x * rms * s for x, s in zip((low, high), scale, strict=True))
            low, high = (x.astype(x_ref.dtype).astype(jnp.float32) for x in normal)
        cos, sin = cos_ref[...], sin_ref[...]
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
