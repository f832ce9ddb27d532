"""GPT-2, GPT-NeoX (with Pythia) and gpt-oss."""

from typing import Any

from jaxmem.checkpoints.config_reader import Reader
from jaxmem.checkpoints.families import mixtures, standard
from jaxmem.checkpoints.families.attention_windows import ALTERNATING, Windows
from jaxmem.checkpoints.families.family import NAMES, ConfigPart, Family, Key
from jaxmem.checkpoints.families.ropes import RopePart
from jaxmem.models.config import ModelConfig

_GPT2, _NEOX, _OSS = "transformer.h.{}.", "gpt_neox.layers.{}.", "model.layers.{}.mlp."
_PROJECTIONS = tuple(f"blocks/attention/{x}" for x in ("query", "key", "value"))
_EXPERTS = "blocks/feed_forward/experts/"

# Learnt positions, matrices stored as [in, out].
GPT2 = Family(
    architecture="GPT2LMHeadModel",
    model_type="gpt2",
    freezes_pad_row=False,
    parts=(
        Key("n_layer", "layers"),
        Key("n_embd", "hidden"),
        Key("n_inner", "ff", null_is_default=True, default=lambda r: 4 * r["n_embd"]),
        Key("n_head", "heads"),
        Key("vocab_size", "vocab_size"),
        Key("n_positions", "embedding.positions"),
        Key("layer_norm_epsilon", "norm.eps", float, 1e-5),
        standard.activation("gelu_new", "activation_function"),
        standard.TIED,
        standard.Derived(kv_heads="n_head", head_dim=("n_embd", "n_head")),
    ),
    names={
        "embed": "transformer.wte",
        "positions": "transformer.wpe",
        "blocks/attention_norm": _GPT2 + "ln_1",
        **dict.fromkeys(_PROJECTIONS, _GPT2 + "attn.c_attn"),
        "blocks/attention/output": _GPT2 + "attn.c_proj",
        "blocks/feed_forward_norm": _GPT2 + "ln_2",
        "blocks/feed_forward/up": _GPT2 + "mlp.c_fc",
        "blocks/feed_forward/down": _GPT2 + "mlp.c_proj",
        "norm": "transformer.ln_f",
        "head": "lm_head",
    },
    switches=standard.LAYER_NORM
    | {"mlp.gated": False, "pattern": ("unrotated",)}
    | dict.fromkeys(("self_attn.qkv_bias", "self_attn.output_bias", "mlp.bias"), True),
    only={"scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,)},
    ignored=tuple(
        "attn_pdrop embd_pdrop n_ctx reorder_and_upcast_attn resid_pdrop "
        "summary_activation summary_first_dropout summary_proj_to_labels summary_type "
        "summary_use_proj task_specific_params".split()
    ),
    positions_key="n_positions",
    prefix="transformer.",
    stored_as_in_out=("blocks/",),
    derived=(".attn.bias", ".attn.masked_bias"),
)


class _KeysPerQuery(ConfigPart):
    """A head of keys for each of queries, which a key may repeat."""

    def read(self, reader: Reader) -> dict[str, Any]:
        heads, key = reader.raw["num_attention_heads"], "num_key_value_heads"
        value = reader.take(key, int, heads)
        if value != heads:
            raise reader.error(
                f"{key}={value} is not implemented; it must equal "
                f"num_attention_heads={heads}"
            )
        return {"kv_heads": heads}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        del model
        return {}


# Both sublayers read a layer's input, by a norm each.
GPT_NEOX = Family(
    architecture="GPTNeoXForCausalLM",
    model_type="gpt_neox",
    freezes_pad_row=False,
    parts=(
        *standard.without(standard.sizes(1e-5, "layer_norm_eps"), "kv_heads"),
        standard.activation("gelu"),
        standard.UNTIED,
        standard.all_biases(True),
        standard.parallel("separate", True),
        _KeysPerQuery(),
        standard.SHARED_WIDTH,
        RopePart(fraction=0.25, theta_key="rotary_emb_base", fraction_key="rotary_pct"),
    ),
    names={
        "embed": "gpt_neox.embed_in",
        "blocks/attention_norm": _NEOX + "input_layernorm",
        **dict.fromkeys(_PROJECTIONS, _NEOX + "attention.query_key_value"),
        "blocks/attention/output": _NEOX + "attention.dense",
        "blocks/feed_forward_norm": _NEOX + "post_attention_layernorm",
        "blocks/feed_forward/up": _NEOX + "mlp.dense_h_to_4h",
        "blocks/feed_forward/down": _NEOX + "mlp.dense_4h_to_h",
        "norm": "gpt_neox.final_layer_norm",
        "head": "embed_out",
    },
    switches=standard.LAYER_NORM | {"mlp.bias": True, "mlp.gated": False},
    ignored=("classifier_dropout", "hidden_dropout", "is_decoder"),
    prefix="gpt_neox.",
    joined_by={"blocks/attention/query": "head"},
    other_names={"embed_out.weight": "lm_head.weight"},
    derived=(".attention.bias", ".attention.masked_bias"),
)

# Attention sinks, alternating windows, biased experts of a clamped gate.
GPT_OSS = Family(
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    parts=(
        *standard.sizes(eps=1e-5),
        standard.head_dim(64),
        standard.UNTIED,
        standard.all_biases(True),
        *mixtures.EVERYWHERE,
        Key("swiglu_limit", "experts.gate_limit", float, 7.0),
        RopePart(theta=150_000.0),
        Windows(ALTERNATING, 128),
    ),
    names=NAMES
    | mixtures.joined_experts(_OSS + "experts.")
    | mixtures.joined_experts(_OSS + "experts.", "bias", "_bias")
    | {
        "blocks/attention/sinks": "model.layers.{}.self_attn.sinks",
        "blocks/feed_forward/router": _OSS + "router",
    },
    switches={
        "feed_forwards": ("experts",),
        "mlp.activation": "quick_gelu",
        "experts.up_plus_one": True,
        "experts.bias": True,
        "router.scores": "chosen",
        "router.bias": True,
        "self_attn.sinks": True,
    },
    # The activation is not what hidden_act says.
    only={"hidden_act": ("silu",), "swiglu_alpha": (1.702,)},
    ignored=("experts_per_token", "initial_context_length"),
    joined_by=dict.fromkeys(
        (_EXPERTS + "gate/kernel", _EXPERTS + "gate/bias"), "number"
    ),
    stored_as_in_out=(_EXPERTS,),
)
