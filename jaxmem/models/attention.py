"""Causal grouped-query attention within documents, by XLA or by cuDNN's kernel.

Both keep the operands, the output and one logsumexp per query and head as residuals,
and recompute the probabilities in the backward pass.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxmem import devices, remat
from jaxmem.head.backends import hopper
from jaxmem.models.config import ModelConfig
from jaxmem.models.kernels import packed_attention
from jaxmem.models.positions import Sight


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    sight: Sight,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Causal attention of each query to the keys that it sees, by XLA everywhere.

        out = softmax(s) v,   s = scale q·k,  or softcap tanh(scale q·k / softcap)

    Queries are [B, T, heads, head_dim]; keys and values [B, S, kv_heads, ...] are of
    the same tokens after S - T others. With sinks [heads], each head's softmax has one
    more score, whose value is 0. Residuals are the operands, the output, and the
    logsumexp, with the checkpoint names "attn_out" and "attn_lse".
    """
    return _attend_vjp(query, key, value, sight, sinks, scale, softcap)


def advice(config: ModelConfig) -> str | None:
    """A line about cuDNN's kernel of packed rows if it can run and is not chosen."""
    why_not = config.reason_without_cudnn()
    supported = config.self_attn.window is None and why_not is None
    if config.attention or not supported or hopper.refuses_machine() is not None:
        return None
    return (
        "attention runs in XLA; on this GPU, model.attention='cudnn' is faster and "
        "takes less memory (model.attention='xla' keeps it without this line)"
    )


@jax.custom_vjp
def _shapes_of_cudnn(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """CuDNN's result and residuals by shapes, for programs that are never compiled."""
    return _shapes_of_cudnn_forward(query, key, value)[0]


def _shapes_of_cudnn_forward(query, key, value):
    rows, tokens, heads, width = query.shape
    shapes = (
        jax.ShapeDtypeStruct((rows, tokens, heads, value.shape[-1]), query.dtype),
        jax.ShapeDtypeStruct((rows, heads, tokens), jnp.float32),
    )
    call = jax.ffi.ffi_call("jaxmem_shapes_of_cudnn", shapes)
    out, lse = remat.name(call(query, key, value), "attn_lse")
    return out, (query, key, value, out, lse)


def _shapes_of_cudnn_backward(residuals, slope):
    query, key, value, *_ = residuals
    rows, tokens, heads, width = query.shape
    like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (query, key, value)]
    # Its workspace, as planning.accounts has it.
    sums = jax.ShapeDtypeStruct((rows, heads, tokens, width + 1), jnp.float32)
    call = jax.ffi.ffi_call("jaxmem_shapes_of_cudnn_backward", (*like, sums))
    return tuple(call(*residuals, slope)[:3])


_shapes_of_cudnn.defvjp(_shapes_of_cudnn_forward, _shapes_of_cudnn_backward)


def attend_by_cudnn(
    query: jax.Array, key: jax.Array, value: jax.Array, sight: Sight, *, scale: float,
    window: int | None = None,
) -> jax.Array:  # fmt: skip
    """`attend` without a cap or sinks, by cuDNN's kernel.

    Its output and logsumexp share the checkpoint name "attn_lse". In rows of one
    document, `sight.window` is either `window`, whose kernel skips what is outside of
    it, or the whole row. With several documents, the kernel computes the scores within
    `sight.packed`; without these, cuDNN gets a bias and computes all scores of a row.
    """
    is_packed = sight.packed is not None and sight.prefix is None
    if is_packed and packed_attention.supports(query):
        return _attend_packed(query, key, value, sight, scale)
    if devices.is_stand_in():
        return _shapes_of_cudnn(query, key, value)
    kernel = functools.partial(_attend_masked, scale=scale)
    if sight.mask is not None:  # recompute the bias [B, 1, T, T] that cuDNN needs
        kernel = remat.recompute(kernel, save=["attn_lse"])
    elif sight.window is not None and window is not None and window < query.shape[1]:
        # Layers of one loop differ by data only. Without a loop, XLA knows the branch.
        near = functools.partial(kernel, window=window)
        is_near = jnp.asarray(sight.window) == window
        return jax.lax.cond(is_near, near, kernel, query, key, value, Sight())
    return kernel(query, key, value, sight)


def _attend_masked(query, key, value, sight, *, scale, window=None):
    """Attention by cuDNN, with a bias if rows have several documents."""
    if devices.is_stand_in():
        return _shapes_of_cudnn(query, key, value)
    mask, queries, keys = sight.mask, query.shape[1], key.shape[1]
    if keys > queries:  # causal attention would begin at the first key
        mask = mask & _causal_mask(queries, keys)
    try:
        return jax.nn.dot_product_attention(
            query, key, value, mask=mask, scale=scale, is_causal=keys == queries,
            local_window_size=window and (window - 1, 0), implementation="cudnn",
        )  # fmt: skip
    except RuntimeError as error:
        if devices.backend() == "gpu":
            raise
        raise ValueError(
            "model.attention='cudnn' needs an NVIDIA GPU, and jax's backend is "
            f"{devices.backend()!r}: set model.attention='xla'"
        ) from error


class _AttentionResiduals(NamedTuple):
    """Arrays that a backward pass of attention reads."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    sight: Sight
    sinks: jax.Array | None
    out: jax.Array  # [B, T, heads, head_dim]
    lse: jax.Array  # f32: [B, kv_heads, group, T] of XLA's, [heads, B · T] of packed


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend_packed(query, key, value, sight, scale):
    return _attend_packed_forward(query, key, value, sight, scale)[0]


def _attend_packed_forward(query, key, value, sight, scale):
    batch = sight.packed

    def packed(query, key, value):
        return packed_attention.attend_forward(query, key, value, batch, scale)

    def biased(query, key, value):
        tokens = query.shape[0] * query.shape[1]
        lse = jnp.zeros((query.shape[2], tokens), jnp.float32)  # not read
        return _attend_masked(query, key, value, sight, scale=scale), lse

    out, lse = jax.lax.cond(batch.fit, packed, biased, query, key, value)
    out, lse = remat.name(out, "attn_lse"), remat.name(lse, "attn_lse")
    return out, _AttentionResiduals(query, key, value, sight, None, out, lse)


def _attend_packed_backward(scale, residuals: _AttentionResiduals, dout):
    sight, forward = residuals.sight, (residuals.out, residuals.lse)
    batch = sight.packed
    assert batch is not None

    def packed(query, key, value):
        return packed_attention.attend_backward(
            query, key, value, batch, scale, forward, dout
        )

    def biased(query, key, value):
        attend = functools.partial(_attend_masked, sight=sight, scale=scale)
        return jax.vjp(attend, query, key, value)[1](dout)

    operands = residuals.query, residuals.key, residuals.value
    return *jax.lax.cond(batch.fit, packed, biased, *operands), None


_attend_packed.defvjp(_attend_packed_forward, _attend_packed_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _attend_vjp(query, key, value, sight, sinks, scale, softcap):
    return _attend_forward(query, key, value, sight, sinks, scale, softcap)[0]


def _attend_forward(query, key, value, sight, sinks, scale, softcap):
    scores = _scores(query, key, sight, scale, softcap)
    largest = jnp.max(scores, axis=-1, keepdims=True)  # finite: a query sees itself
    if sinks is not None:
        sink = _grouped_sinks(sinks, key.shape[2])
        largest = jnp.maximum(largest, sink)
    weights = jnp.exp(scores - largest)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sink - largest)
    lse = (largest + jnp.log(total))[..., 0]  # f32 [B, kv_heads, group, T]
    out = jnp.einsum(
        "bkgqt,btkd->bkgqd",
        weights.astype(value.dtype),
        value,
        preferred_element_type=jnp.float32,
    )
    # Normalise after the product, which has head_dim numbers per query instead of T.
    out = jnp.einsum("bkgqd->bqkgd", (out / total).astype(query.dtype))
    out = out.reshape(*query.shape[:-1], value.shape[-1])
    out, lse = remat.name(out, "attn_out"), remat.name(lse, "attn_lse")
    return out, _AttentionResiduals(query, key, value, sight, sinks, out, lse)


def _attend_backward(scale, softcap, residuals: _AttentionResiduals, dout):
    query, key, sinks = residuals.query, residuals.key, residuals.sinks
    scores = _scores(query, key, residuals.sight, scale, softcap)
    weights = jnp.exp(scores - residuals.lse[..., None])
    grouped = functools.partial(_split_heads, kv_heads=key.shape[2])
    dvalue = jnp.einsum("bkgqt,bqkgd->btkd", weights.astype(dout.dtype), grouped(dout))
    dweights = jnp.einsum(
        "bqkgd,btkd->bkgqt",
        grouped(dout),
        residuals.value,
        preferred_element_type=jnp.float32,
    )
    products = dout.astype(jnp.float32) * residuals.out.astype(jnp.float32)
    along = jnp.einsum("bqkg->bkgq", grouped(products).sum(-1))
    dsinks = None
    if sinks is not None:
        taken = jnp.exp(_grouped_sinks(sinks, key.shape[2])[..., 0] - residuals.lse)
        dsinks = -jnp.sum(taken * along, axis=(0, 3)).reshape(-1).astype(sinks.dtype)
    dscores = weights * (dweights - along[..., None])
    if softcap is not None:  # a masked score is -inf and has weight 0
        capped = jnp.where(weights > 0, scores / softcap, 0)
        dscores = dscores * (1 - capped * capped)
    dscores = (scale * dscores).astype(query.dtype)
    dquery = jnp.einsum("bkgqt,btkd->bqkgd", dscores, key).reshape(query.shape)
    dkey = jnp.einsum("bkgqt,bqkgd->btkd", dscores, grouped(query))
    return dquery, dkey, dvalue, None, dsinks


_attend_vjp.defvjp(_attend_forward, _attend_backward)


def _split_heads(x, kv_heads):
    """Split the heads axis into key-value heads and the queries that share each."""
    return x.reshape(*x.shape[:2], kv_heads, -1, x.shape[-1])


def _grouped_sinks(sinks, kv_heads):
    """Scores [heads] as float32 [kv_heads, group, 1, 1], in the layout of `_scores`."""
    return sinks.astype(jnp.float32).reshape(kv_heads, -1, 1, 1)


def _scores(query, key, sight, scale, softcap):
    """Scores, f32 [B, kv_heads, group, T, S]; -inf where a query does not see a key."""
    scores = scale * jnp.einsum(
        "bqkgd,btkd->bkgqt",
        _split_heads(query, key.shape[2]),
        key,
        preferred_element_type=jnp.float32,
    )
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    seen = _causal_mask(query.shape[1], key.shape[1])
    if sight.mask is not None:
        seen = seen & sight.mask[:, :, None]
    return jnp.where(seen, scores, -jnp.inf)


def _causal_mask(queries, keys):
    """Mask [T, S], true where a key is no later than a query; both end at one token."""
    return jnp.tril(jnp.ones((queries, keys), bool), keys - queries)
