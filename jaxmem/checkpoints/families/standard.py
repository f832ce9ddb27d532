"""What most families share: keys and names as Llama has them."""

from typing import Any

from jaxmem.checkpoints.families.family import Key

ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu"}

SIZES = (
    Key("num_hidden_layers", "layers"),
    Key("hidden_size", "hidden"),
    Key("intermediate_size", "ff"),
    Key("num_attention_heads", "heads"),
    Key("num_key_value_heads", "kv_heads", default=lambda raw: _heads(raw)),
    Key("vocab_size", "vocab_size"),
    Key("rms_norm_eps", "norm_eps", float, 1e-6),
)
ACTIVATION = Key("hidden_act", "activation", str, "silu", ACTIVATIONS)
TIED = Key("tie_word_embeddings", "tied", bool, True)
UNTIED = Key("tie_word_embeddings", "tied", bool, False)


def head_dim(default: int | None = None) -> Key:
    """The width of a head; None: heads share the width of the residual stream."""

    def of(raw: Any) -> int:
        return raw["hidden_size"] // _heads(raw) if default is None else default

    return Key("head_dim", "head_dim", default=of, null_is_default=True)


def _heads(raw: Any) -> int:
    return raw["num_attention_heads"]


_LAYER = "model.layers.{}."
NAMES = {
    "embed": "model.embed_tokens",
    "blocks/attention_norm": _LAYER + "input_layernorm",
    "blocks/attention/query": _LAYER + "self_attn.q_proj",
    "blocks/attention/key": _LAYER + "self_attn.k_proj",
    "blocks/attention/value": _LAYER + "self_attn.v_proj",
    "blocks/attention/output": _LAYER + "self_attn.o_proj",
    "blocks/attention/query_norm": _LAYER + "self_attn.q_norm",
    "blocks/attention/key_norm": _LAYER + "self_attn.k_norm",
    "blocks/feed_forward_norm": _LAYER + "post_attention_layernorm",
    "blocks/feed_forward/gate": _LAYER + "mlp.gate_proj",
    "blocks/feed_forward/up": _LAYER + "mlp.up_proj",
    "blocks/feed_forward/down": _LAYER + "mlp.down_proj",
    "norm": "model.norm",
    "head": "lm_head",
}
# Of families that also normalise what a sublayer adds.
POST_NORMS = {
    "blocks/post_attention_norm": _LAYER + "post_attention_layernorm",
    "blocks/feed_forward_norm": _LAYER + "pre_feedforward_layernorm",
    "blocks/post_feed_forward_norm": _LAYER + "post_feedforward_layernorm",
}
