"""GPT-NeoX and Pythia: both sublayers read a layer's input, by a norm each."""

from jaxmem.checkpoints.families import standard
from jaxmem.checkpoints.families.family import Family, Key
from jaxmem.checkpoints.families.ropes import Rope

_LAYER = "gpt_neox.layers.{}."

FAMILY = Family(
    architecture="GPTNeoXForCausalLM",
    model_type="gpt_neox",
    parts=(
        Key("num_hidden_layers", "layers"),
        Key("hidden_size", "hidden"),
        Key("intermediate_size", "ff"),
        Key("num_attention_heads", "heads"),
        Key("vocab_size", "vocab_size"),
        Key("layer_norm_eps", "norm_eps", float, 1e-5),
        standard.activation("gelu"),
        standard.UNTIED,
        Key("attention_bias", "qkv_bias", bool, True, also=("output_bias",)),
        standard.parallel("separate", True),
        standard.Derived(
            kv_heads="num_attention_heads",
            head_dim=("hidden_size", "num_attention_heads"),
        ),
        Rope(fraction=0.25, theta_key="rotary_emb_base", fraction_key="rotary_pct"),
    ),
    names={
        "embed": "gpt_neox.embed_in",
        "blocks/attention_norm": _LAYER + "input_layernorm",
        "blocks/attention/query": _LAYER + "attention.query_key_value",
        "blocks/attention/key": _LAYER + "attention.query_key_value",
        "blocks/attention/value": _LAYER + "attention.query_key_value",
        "blocks/attention/output": _LAYER + "attention.dense",
        "blocks/feed_forward_norm": _LAYER + "post_attention_layernorm",
        "blocks/feed_forward/up": _LAYER + "mlp.dense_h_to_4h",
        "blocks/feed_forward/down": _LAYER + "mlp.dense_4h_to_h",
        "norm": "gpt_neox.final_layer_norm",
        "head": "embed_out",
    },
    switches={"norm": "layer", "norm_bias": True, "ff_bias": True, "gated": False},
    ignored=("classifier_dropout", "hidden_dropout", "is_decoder"),
    prefix="gpt_neox.",
    joined_by={"blocks/attention/query": "head"},
    other_names={"embed_out.weight": "lm_head.weight"},
    derived=(".attention.bias", ".attention.masked_bias"),
)
