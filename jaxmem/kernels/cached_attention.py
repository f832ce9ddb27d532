"""Attention of one new token per row to a KV cache, by Pallas's Triton backend.

A program reads the keys and values of one row and key-value head once, for all queries
that share it, in blocks of slots, and only as far as slots are in use. It reads the
stack of all layers in place, so that no layer is sliced out, and its scores never leave
registers. Where rows and heads are too few to occupy the device, several programs share
the slots of a head, and their results are combined by their logsumexps.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

BLOCK = 64  # slots that a program reads at once
_QUERIES = 16  # rows of a tensor core's smallest product; a group is padded to it
_PROGRAMS = 264  # two for each multiprocessor of an H200
_STAGES = 2  # blocks in flight; four programs then fit into a multiprocessor at once
# Finite, so that a program without a slot subtracts no infinities; see kernels.logits.
_MASK_VALUE = -(2.0**100)


class Place(NamedTuple):
    """Where keys and values are read."""

    layer: jax.Array  # int32 scalar, of the stack
    seen: jax.Array  # [B, T] bool, slots to attend to
    slots: jax.Array  # int32 scalar; `seen` is false from there on


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
    place: Place,
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
        place: the layer and slots to attend to.
        scale: factor of the scores.
        softcap: bound of the scores; None: they are not capped.

    Returns:
        An array like `query`.

    **Memory**: 4·splits·B·heads·(head_dim + 1), if several programs share a head.
    """
    rows, heads, group, width = query.shape
    blocks = pl.cdiv(cached[0].shape[3], BLOCK)
    splits = max(1, min(_PROGRAMS // (rows * heads), blocks // 2))
    shape = splits, rows, heads, group
    out, lse = pl.pallas_call(
        _Kernel(group, scale, softcap),
        grid=(rows, heads, splits),
        in_specs=[
            _scalar(), _scalar(), _of_head(_QUERIES, width), _of_head(width),
            _of_head(width), *[pl.no_block_spec] * 3,
        ],
        out_specs=[_of_split(_QUERIES, width), _of_split(_QUERIES)],
        out_shape=[
            jax.ShapeDtypeStruct(
                (*shape, width), query.dtype if splits == 1 else jnp.float32
            ),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=_STAGES),
        name="cached_attention",
    )(
        *(jnp.reshape(x, (1,)).astype(jnp.int32) for x in (place.layer, place.slots)),
        query, *token, *cached, place.seen,
    )  # fmt: skip
    if splits == 1:
        return out[0]
    shares = jax.nn.softmax(lse, axis=0)[..., None]
    return jnp.sum(shares * out, axis=0).astype(query.dtype)


def _scalar() -> pl.BlockSpec:
    return pl.BlockSpec((1,), lambda *_: (0,))


def _of_head(*tile: int) -> pl.BlockSpec:
    """A tile of an array [B, kv_heads, *tile], for a program of a row and head."""
    zeros = (0,) * len(tile)
    return pl.BlockSpec((None, None, *tile), lambda b, h, s: (b, h, *zeros))


def _of_split(*tile: int) -> pl.BlockSpec:
    """A tile of an array [splits, B, kv_heads, *tile]."""
    zeros = (0,) * len(tile)
    return pl.BlockSpec((None, None, None, *tile), lambda b, h, s: (s, b, h, *zeros))


class _Softmax(NamedTuple):
    """The softmax of the scores so far, and the values that it weights."""

    largest: jax.Array  # [queries]
    total: jax.Array  # [queries]
    mixed: jax.Array  # [queries, head_dim]


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """One program: a row, a key-value head and a share of the slots."""

    group: int
    scale: float
    softcap: float | None

    def __call__(self, layer_ref, slots_ref, query_ref, *refs: Any):
        key_ref, value_ref, keys_ref, values_ref, seen_ref, out_ref, lse_ref = refs
        row, head, split = (pl.program_id(i) for i in range(3))
        real = jnp.arange(_QUERIES) < self.group
        query = plgpu.load(query_ref.at[:, :], mask=real[:, None], other=0.0)
        layer, length = layer_ref[0], keys_ref.shape[3]

        def block(i, softmax: _Softmax):
            here, place = pl.ds(i * BLOCK, BLOCK), i * BLOCK + jnp.arange(BLOCK)
            inside = place < length

            def read(ref):
                at = ref.at[layer, row, head, here, :]
                return plgpu.load(at, mask=inside[:, None], other=0.0)

            seen = plgpu.load(seen_ref.at[row, here], mask=inside, other=False)
            scores = self._capped(_product(query, read(keys_ref).T))
            scores = jnp.where(seen[None, :], scores, -math.inf)
            return _with(softmax, scores, read(values_ref))

        blocks = pl.cdiv(slots_ref[0], BLOCK)
        share = pl.cdiv(blocks, pl.num_programs(2))
        end = jnp.minimum((split + 1) * share, blocks)
        own = self._of_token(query, key_ref[...], value_ref[...], split == 0)
        largest, total, mixed = lax.fori_loop(split * share, end, block, own)
        out = mixed / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[:, None]
        plgpu.store(out_ref.at[:, :], out.astype(out_ref.dtype), mask=real[:, None])
        plgpu.store(lse_ref.at[:], largest + jnp.log(total), mask=real)

    def _of_token(self, query, key, value, counts) -> _Softmax:
        """Softmax of the new token alone; empty where it does not count."""
        key, value = (x.astype(jnp.float32)[None, :] for x in (key, value))
        scores = self._capped(jnp.sum(query.astype(jnp.float32) * key, axis=1))
        ones = jnp.full(scores.shape, 1.0)
        total = jnp.where(counts, ones, jnp.zeros_like(ones))
        largest = jnp.where(counts, scores, _MASK_VALUE)
        return _Softmax(largest, total, total[:, None] * value)

    def _capped(self, scores):
        scores = scores * self.scale
        if self.softcap is None:
            return scores
        return self.softcap * jnp.tanh(scores / self.softcap)


def _with(softmax: _Softmax, scores, values) -> _Softmax:
    """The softmax with more scores [queries, n] and values [n, head_dim]."""
    largest = jnp.maximum(softmax.largest, jnp.max(scores, axis=1))
    kept = jnp.exp(softmax.largest - largest)
    weights = jnp.exp(scores - largest[:, None])
    total = softmax.total * kept + jnp.sum(weights, axis=1)
    mixed = softmax.mixed * kept[:, None]
    return _Softmax(
        largest, total, mixed + _product(weights.astype(values.dtype), values)
    )


def _product(a, b):
    return jnp.dot(a, b, preferred_element_type=jnp.float32)
