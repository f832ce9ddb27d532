"""Attention of one new token per row to a KV cache, by Pallas's Triton backend.

A program reads the keys and values of one row and key-value head once, for all queries
that share it, in blocks of slots, and only as far as slots are in use. It reads the
stack of all layers in place, so that no layer is sliced out, and its scores never leave
registers. Where rows and heads are too few to occupy the device, several programs share
the slots of a head, and their results are combined by their logsumexps.
"""

import functools
import math

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

BLOCK = 64  # slots that a program reads at once
_QUERIES = 16  # rows of a tensor core's smallest product; a group is padded to it
_PROGRAMS = 264  # two for each multiprocessor of an H200
_STAGES = 3  # blocks in flight
# Finite, so that a program without a slot subtracts no infinities; see kernels.logits.
_MASK_VALUE = -(2.0**100)


def supports(query: jax.Array, keys: jax.Array) -> bool:
    """Whether `attend` can run on these types and shapes."""
    width = query.shape[-1]
    return (
        query.dtype == keys.dtype
        and query.dtype in (jnp.bfloat16, jnp.float16)
        and query.shape[-2] <= _QUERIES
        and 16 <= width <= 256
        and width & (width - 1) == 0  # the sides of Triton's tiles are powers of two
    )


def attend(
    query: jax.Array,
    token: tuple[jax.Array, jax.Array],
    cached: tuple[jax.Array, jax.Array],
    layer: jax.Array,
    seen: jax.Array,
    slots: jax.Array,
    *,
    scale: float,
    softcap: float | None = None,
) -> jax.Array:
    """Attention of one new token per row to the cached tokens and to itself.

        out = Σ_t p_t v_t,   p = softmax(scale q·k),   t cached or new

    With a softcap, scores s become softcap·tanh(s / softcap) before the softmax.

    Args:
        query: [B, kv_heads, group, head_dim], rotated.
        token: keys and values of the new tokens, [B, kv_heads, head_dim].
        cached: of all layers, [layers, B, kv_heads, T, head_dim].
        layer: int32 scalar, the layer whose keys and values are read.
        seen: [B, T] bool, slots to attend to.
        slots: int32 scalar; `seen` is false from there on.
        scale: factor of the scores.
        softcap: bound of the scores; None: they are not capped.

    Returns:
        An array like `query`.

    **Memory**: 4·splits·B·heads·(head_dim + 1) where several programs share a head.
    """
    rows, heads, group, width = query.shape
    blocks = pl.cdiv(cached[0].shape[3], BLOCK)
    splits = max(1, min(_PROGRAMS // (rows * heads), blocks // 2))

    def whole(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda *_: (0,) * len(shape))

    def of_head(*tile: int) -> pl.BlockSpec:
        place = (0,) * len(tile)
        return pl.BlockSpec((None, None, *tile), lambda b, h, s: (b, h, *place))

    def of_split(*tile: int) -> pl.BlockSpec:
        place = (0,) * len(tile)
        return pl.BlockSpec(
            (None, None, None, *tile), lambda b, h, s: (s, b, h, *place)
        )

    shape = splits, rows, heads, group
    dtype = query.dtype if splits == 1 else jnp.float32
    out, lse = pl.pallas_call(
        functools.partial(_kernel, group=group, scale=scale, softcap=softcap),
        grid=(rows, heads, splits),
        in_specs=[
            whole(1), whole(1), of_head(_QUERIES, width), of_head(width),
            of_head(width), *[pl.no_block_spec] * 3,
        ],
        out_specs=[of_split(_QUERIES, width), of_split(_QUERIES)],
        out_shape=[
            jax.ShapeDtypeStruct((*shape, width), dtype),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=_STAGES),
        name="cached_attention",
    )(
        *(jnp.reshape(x, (1,)).astype(jnp.int32) for x in (layer, slots)),
        query, *token, *cached, seen.astype(jnp.int8),
    )  # fmt: skip
    if splits == 1:
        return out[0]
    shares = jax.nn.softmax(lse, axis=0)[..., None]
    return jnp.sum(shares * out, axis=0).astype(query.dtype)


def _kernel(
    layer_ref, slots_ref, query_ref, own_key_ref, own_value_ref, keys_ref, values_ref,
    seen_ref, out_ref, lse_ref, *, group, scale, softcap,
):  # fmt: skip
    row, head, split = (pl.program_id(i) for i in range(3))
    layer, slots = layer_ref[0], slots_ref[0]
    length = keys_ref.shape[3]
    real = jnp.arange(_QUERIES) < group
    query = plgpu.load(query_ref.at[:, :], mask=real[:, None], other=0.0)

    def capped(scores):
        scores = scores * scale
        return scores if softcap is None else softcap * jnp.tanh(scores / softcap)

    def block(i, carry):
        largest, total, mixed = carry
        place = i * BLOCK + jnp.arange(BLOCK)
        inside = place < length
        here = pl.ds(i * BLOCK, BLOCK)

        def read(ref):
            at = ref.at[layer, row, head, here, :]
            return plgpu.load(at, mask=inside[:, None], other=0.0)

        scores = capped(_product(query, read(keys_ref).T))
        seen = plgpu.load(seen_ref.at[row, here], mask=inside, other=0) != 0
        scores = jnp.where(seen[None, :], scores, -math.inf)
        new = jnp.maximum(largest, jnp.max(scores, axis=1))
        kept = jnp.exp(largest - new)
        weights = jnp.exp(scores - new[:, None])
        total = total * kept + jnp.sum(weights, axis=1)
        more = _product(weights.astype(query.dtype), read(values_ref))
        return new, total, mixed * kept[:, None] + more

    # The new token itself, in the first program of a head.
    own = own_key_ref[...].astype(jnp.float32)[None, :]
    scores = capped(jnp.sum(query.astype(jnp.float32) * own, axis=1))
    first = split == 0
    largest = jnp.where(first, scores, _MASK_VALUE)
    total = jnp.where(first, jnp.full(scores.shape, 1.0), jnp.full(scores.shape, 0.0))
    mixed = total[:, None] * own_value_ref[...].astype(jnp.float32)[None, :]
    share = pl.cdiv(pl.cdiv(slots, BLOCK), pl.num_programs(2))
    end = jnp.minimum((split + 1) * share, pl.cdiv(slots, BLOCK))
    carry = largest, total, mixed
    largest, total, mixed = lax.fori_loop(split * share, end, block, carry)
    out = mixed / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[:, None]
    plgpu.store(out_ref.at[:, :], out.astype(out_ref.dtype), mask=real[:, None])
    plgpu.store(lse_ref.at[:], largest + jnp.log(total), mask=real)


def _product(a, b):
    return jnp.dot(a, b, preferred_element_type=jnp.float32)
