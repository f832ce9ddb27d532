"""gpt-oss: attention sinks, alternating windows, biased experts of a clamped gate."""

from jaxmem.checkpoints.families import mixtures, standard
from jaxmem.checkpoints.families.family import Family, Key
from jaxmem.checkpoints.families.ropes import Rope
from jaxmem.checkpoints.families.windows import Windows, alternating

_ROUTED = "model.layers.{}.mlp."
_EXPERTS = "blocks/feed_forward/experts/"

FAMILY = Family(
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    parts=(
        *standard.without(standard.sizes(eps=1e-5), "ff"),
        standard.head_dim(64),
        standard.UNTIED,
        Key("attention_bias", "qkv_bias", bool, True, also=("output_bias",)),
        *mixtures.sizes("num_local_experts", None, older="num_experts"),
        mixtures.Balance(),
        Key("swiglu_limit", "gate_limit", float, 7.0),
        Rope(theta=150_000.0),
        Windows(alternating, 128),
    ),
    names=standard.NAMES
    | {
        "blocks/attention/sinks": "model.layers.{}.self_attn.sinks",
        "blocks/feed_forward/router": _ROUTED + "router",
        _EXPERTS + "gate/kernel": _ROUTED + "experts.gate_up_proj",
        _EXPERTS + "up/kernel": _ROUTED + "experts.gate_up_proj",
        _EXPERTS + "down/kernel": _ROUTED + "experts.down_proj",
        _EXPERTS + "gate/bias": _ROUTED + "experts.gate_up_proj_bias",
        _EXPERTS + "up/bias": _ROUTED + "experts.gate_up_proj_bias",
        _EXPERTS + "down/bias": _ROUTED + "experts.down_proj_bias",
    },
    switches={
        "feed_forwards": ("experts",),
        "activation": "quick_gelu",
        "up_plus_one": True,
        "expert_bias": True,
        "router_scores": "chosen",
        "router_bias": True,
        "sinks": True,
    },
    # The activation is not what hidden_act says.
    only={"hidden_act": ("silu",), "swiglu_alpha": (1.702,)},
    ignored=("experts_per_token", "initial_context_length"),
    joined_by=dict.fromkeys(
        (_EXPERTS + "gate/kernel", _EXPERTS + "gate/bias"), "number"
    ),
    stored_as_in_out=(_EXPERTS,),
)
