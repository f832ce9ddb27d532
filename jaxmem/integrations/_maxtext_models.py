"""Heads of MaxText's transformers, and the hidden states that they multiply."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmem.head.maths.head import Head
from jaxmem.integrations._head import (
    ModelHead,
    NotServed,
    check_parameters,
    check_product,
    plain_array,
)
from jaxmem.integrations._substitutes import holding


def head_of(model: Any) -> ModelHead:
    """The head of a MaxText transformer; raises `NotServed` for other kinds."""
    config, decoder = model.config, model.decoder
    if hasattr(decoder, "to_nnx__module"):
        raise NotServed(
            "its decoder is a Linen module inside NNX (pure_nnx_decoder=False)"
        )
    if getattr(config, "parameter_memory_host_offload", False):
        raise NotServed(
            "parameter_memory_host_offload keeps the head's weights on the host"
        )
    compute = jnp.float32 if config.logits_dot_in_fp32 else config.dtype
    if config.logits_via_embedding:
        table, cap = model.token_embedder.embedding[...], config.final_logits_soft_cap
        # MaxText multiplies in bfloat16 whatever the table's dtype. It computes
        # cap tanh(z / s cap) from z / s: a softcap of s cap on z, divided by s.
        scale = math.sqrt(table.shape[1]) if config.normalize_embedding_logits else 1.0
        table, softcap = table.astype(jnp.bfloat16), cap * scale if cap else None
        head = Head(table, softcap=softcap, layout="vd")
        return ModelHead(head, config.dtype, temperature=scale)
    dense = decoder.logits_dense
    check_parameters("logits_dense", dense)
    if getattr(dense, "quant", None) or getattr(dense, "weight_quant", None):
        raise NotServed("logits_dense is quantised")
    kernel = plain_array("logits_dense", dense.kernel)
    if kernel.ndim != 2:
        raise NotServed("logits_dense holds no plain matrix")
    bias = getattr(dense, "bias", None)
    bias = None if bias is None else bias[...]
    return ModelHead(Head(kernel, bias, layout="dv"), compute)


def final_states(model: Any, hidden: jax.Array, deterministic: bool) -> jax.Array:
    """The operand of the head's product, after MaxText's norm and dropout."""
    decoder = model.decoder
    normed = decoder.decoder_norm(hidden)
    return decoder.dropout(normed, deterministic=deterministic)


class DeferredHeadCall(NamedTuple):
    """A call of a decoder's head that was not made."""

    states: jax.Array  # before the norm
    deterministic: bool  # no dropout
    placeholder: jax.Array  # returned for logits


@contextlib.contextmanager
def stopped_before_head(decoder: Any) -> Iterator[list[DeferredHeadCall]]:
    """Record the calls of one decoder's head, which return placeholders."""
    calls: list[DeferredHeadCall] = []

    def keep(original, self, shared_embedding, y, deterministic, model_mode, **kwargs):
        if self is not decoder:
            return original(
                self, shared_embedding, y, deterministic, model_mode, **kwargs
            )
        if not self.config.logits_via_embedding:
            check_product("logits_dense", self.logits_dense, y)
        placeholder = jnp.zeros((*y.shape[:-1], 1), jnp.float32)
        calls.append(DeferredHeadCall(y, deterministic, placeholder))
        return placeholder

    with holding(type(decoder), "apply_output_head", keep):
        yield calls
