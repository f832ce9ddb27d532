"""Apertus: an activation with weights of its own."""

from jaxmem.checkpoints.families import standard
from jaxmem.checkpoints.families.family import Family
from jaxmem.checkpoints.families.ropes import Rope

_LAYER = "model.layers.{}."

FAMILY = Family(
    architecture="ApertusForCausalLM",
    model_type="apertus",
    parts=(
        *standard.sizes(eps=1e-5),
        standard.head_dim(),
        standard.activation("xielu"),
        standard.UNTIED,
        standard.ATTENTION_BIAS,
        Rope(12_000_000.0),
    ),
    names=standard.NAMES
    | {
        "blocks/attention_norm": _LAYER + "attention_layernorm",
        "blocks/feed_forward_norm": _LAYER + "feedforward_layernorm",
        "blocks/feed_forward/positive": _LAYER + "mlp.act_fn.alpha_p",
        "blocks/feed_forward/negative": _LAYER + "mlp.act_fn.alpha_n",
    },
    switches={"gated": False, "qk_norm": True},
    only={"mlp_bias": (False, None), "post_norm": (False, None), "qk_norm": (True,)},
    ignored=("hidden_dropout",),
    constants={
        _LAYER + "mlp.act_fn.beta": 0.5,
        _LAYER + "mlp.act_fn.eps": -1e-6,
    },
)
