"""Phi-1, Phi-1.5 and Phi-2: both sublayers read one norm; every matrix has a bias."""

from jaxmem.checkpoints.families import standard
from jaxmem.checkpoints.families.family import Family
from jaxmem.checkpoints.families.ropes import Rope

_LAYER = "model.layers.{}."
_BIASES = ("qkv_bias", "output_bias", "ff_bias", "norm_bias", "head_bias")

FAMILY = Family(
    architecture="PhiForCausalLM",
    model_type="phi",
    parts=(
        *standard.sizes(eps=1e-5, key="layer_norm_eps"),
        standard.SHARED_WIDTH,
        standard.activation("gelu_new"),
        standard.UNTIED,
        Rope(fraction=0.5),
    ),
    names=standard.NAMES
    | {
        "blocks/attention/output": _LAYER + "self_attn.dense",
        "blocks/feed_forward/up": _LAYER + "mlp.fc1",
        "blocks/feed_forward/down": _LAYER + "mlp.fc2",
        "norm": "model.final_layernorm",
    },
    switches={"norm": "layer", "parallel": "shared", "gated": False}
    | dict.fromkeys(_BIASES, True),
    only={"qk_layernorm": (False, None)},
    ignored=("embd_pdrop", "resid_pdrop"),
)
