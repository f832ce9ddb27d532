"""EasyDeL: log-probabilities and entropies of PPO and GRPO from hidden states.

The replaced function is

    easydel.trainers._logprob_utils
        .compute_per_token_logps_and_entropies_from_hidden_states

Tied and untied heads are supported, with or without a bias. EasyDeL's own function is
used, and a message printed once, for a head that EasyDeL clips (`logit_cap`, which has
no gradient beyond it, unlike a softcap) or scales, for one with LoRA or quantised
weights, and for one that a model computes with its own method. A negative id counts
from the end of the vocabulary, as in EasyDeL.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from jaxmem.head.maths.head import Head
from jaxmem.integrations._head import (
    ModelHead,
    NotServed,
    as_index,
    check_parameters,
    plain_array,
    scores,
)
from jaxmem.integrations._replace import Integration, ReplacedCall, replacing

_TIED = ("tie_word_embeddings", "use_lm_head", "share_input_output_layers")
_GENERIC = ("easydel.infra.base_module", "easydel.modules._base.")


def head_of(module: Any) -> ModelHead:
    """The head of the module that computes logits; raises `NotServed` for others."""
    name = type(module).__name__
    if not hasattr(module, "compute_lm_logits"):
        raise NotServed(f"{name} has no compute_lm_logits")
    for method in ("make_lm_head_fn", "apply_lm_head"):
        function = getattr(type(module), method, None)
        if function is not None and not function.__module__.startswith(_GENERIC):
            raise NotServed(f"{name} defines its own {method}")
    if getattr(module, "_logit_cap_feature", None) is not None:
        raise NotServed(f"{name} clips its logits")
    layer = module.get_lm_head()
    if layer._scale_operator(1.0) != 1.0:
        raise NotServed(f"the head of {name} scales its logits")
    check_parameters(f"the head of {name}", layer)
    # EasyDeL reads the first of these keys that its config has.
    flags = [key for key in _TIED if hasattr(module.config, key)]
    bias = None if layer.bias is None else layer.bias[...]
    if flags and getattr(module.config, flags[0]):
        weights, layout = module.get_embedding().embedding, "vd"
    else:
        weights, layout = layer.kernel, "dv"
    W = plain_array(f"the head of {name}", weights)
    return ModelHead(Head(W, bias, layout=layout), layer.dtype or W.dtype)


@replacing(
    "easydel.trainers._logprob_utils:"
    "compute_per_token_logps_and_entropies_from_hidden_states"
)
def _LOGPS(
    call: ReplacedCall, model, hidden_states, targets, *, token_chunk_size,
    vocab_chunk_size, return_entropy,
):  # fmt: skip
    # The model, or its inner model, computes logits.
    inner = getattr(model, "model", None)
    is_outer = hasattr(model, "compute_lm_logits")
    is_inner = not is_outer and hasattr(inner, "compute_lm_logits")
    module: Any = inner if is_inner else model
    head = head_of(module)
    if hasattr(module, "prepare_lm_head_inputs"):
        hidden_states = module.prepare_lm_head_inputs(hidden_states)
    if head.dtype != hidden_states.dtype:  # without its own dtype: promote
        wide = jnp.promote_types(head.dtype, hidden_states.dtype)
        own = module.get_lm_head().dtype
        head = dataclasses.replace(head, dtype=own or wide)
    labels = as_index(targets, head)
    return scores(hidden_states, head, labels, call.options, entropy=return_entropy)[:2]


_EASYDEL = Integration("easydel", {"easydel": {"0.3.0": (_LOGPS,)}})
apply, undo, applied = _EASYDEL.apply, _EASYDEL.undo, _EASYDEL.applied
status = _EASYDEL.status
