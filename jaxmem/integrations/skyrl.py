"""SkyRL-tx: float32 log-probabilities of its models, without storing logits.

The replaced method, whose log-probabilities are bfloat16 with bfloat16 weights, is

    LogitsProcessorMixin._compute_chunked_logprobs

of `skyrl.tx.utils.logits_processor`, if `skyrl` is installed (0.3.0, 0.4.0), or else
of `tx.utils.logits_processor`, if `skyrl-tx` is (0.3.0).

Tied and untied heads are supported, and so are adapters of the head: their matrices
become part of a wider head, [W; B_1; ...; B_n], applied to states [h; s_1 h A_1; ...],
in which only the part of the token's own adapter is not 0. That computes a gradient of
W too, and discards it. A call without `adapter_indices` uses the first adapter, as
SkyRL does. SkyRL's own method is used, and a message printed once, for a head of
another kind (such as a tied head of skyrl-tx 0.3.0, which is a plain function).
loss_chunk_size=0 requests logits, and returns them. A negative id counts from the end
of the vocabulary, as in SkyRL.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.head.maths.head import Head
from jaxmem.integrations._head import (
    ModelHead,
    NotServed,
    as_index,
    plain_array,
    scores,
)
from jaxmem.integrations._replace import Integration, ReplacedCall, replacing


def head_of(model: Any) -> ModelHead:
    """A model's head without adapters; raises `NotServed` for other kinds."""
    layer = getattr(model, "lm_head", None)
    if layer is None:
        inner = getattr(model, "model", None)
        inner = getattr(inner, "language_model", inner)  # of a multimodal model
        embed = getattr(inner, "embed_tokens", None)
        if embed is None:
            name = type(model).__name__
            raise NotServed(f"{name} has neither lm_head nor model.embed_tokens")
        # SkyRL multiplies states by the stored table, without its adapters.
        W = plain_array("model.embed_tokens", embed.embedding)
        return ModelHead(Head(W, layout="vd"), W.dtype)
    if not hasattr(layer, "kernel"):
        kind = type(layer).__name__
        raise NotServed(f"lm_head of {type(model).__name__} is a {kind}")
    W = plain_array("lm_head", layer.kernel)
    bias = None if layer.bias is None else layer.bias[...]
    return ModelHead(Head(W, bias, layout="dv"), layer.dtype or W.dtype)


def _with_adapters(
    head: ModelHead, layer: Any, hidden: jax.Array, adapters: jax.Array
) -> tuple[jax.Array, ModelHead]:
    """States [N, D + n·r], and the head widened by the adapters' matrices."""
    A, B, scaling = (x[...] for x in (layer.lora_A, layer.lora_B, layer.lora_scaling))
    count, _, rank = A.shape
    hidden = hidden.astype(head.dtype)
    mine = jax.nn.one_hot(adapters, count, dtype=head.dtype)
    mine = mine * scaling.astype(head.dtype)
    low = jnp.einsum("td,ndr->tnr", hidden, A.astype(head.dtype)) * mine[..., None]
    states = jnp.concatenate([hidden, low.reshape(-1, count * rank)], axis=1)
    W = head.head.W.astype(head.dtype)
    rows = B.astype(head.dtype).reshape(count * rank, -1)
    wider = dataclasses.replace(head.head, W=jnp.concatenate([W, rows]))
    return states, dataclasses.replace(head, head=wider)


def _chunked_logprobs(
    call: ReplacedCall, self, hidden_states, target_ids, chunk_size, adapter_indices
):
    head = head_of(self)
    states, labels = hidden_states, as_index(target_ids, head)
    layer = getattr(self, "lm_head", None)
    if getattr(layer, "max_lora_adapters", 0) > 0:
        mine = jnp.zeros(labels.size, jnp.int32)
        if adapter_indices is not None:
            mine = jnp.repeat(adapter_indices, labels.shape[1])
        flat = states.reshape(-1, states.shape[-1])
        states, head = _with_adapters(head, layer, flat, mine)
        labels = labels.reshape(-1)
    logps, _, _ = scores(states, head, labels, call.options, entropy=False)
    return logps.reshape(target_ids.shape)


_METHOD = "utils.logits_processor:LogitsProcessorMixin._compute_chunked_logprobs"
_SKYRL = Integration(
    "skyrl",
    {
        distribution: {"": (replacing(f"{package}.{_METHOD}")(_chunked_logprobs),)}
        for distribution, package in (("skyrl", "skyrl.tx"), ("skyrl-tx", "tx"))
    },
)
apply, undo, applied = _SKYRL.apply, _SKYRL.undo, _SKYRL.applied
status = _SKYRL.status
