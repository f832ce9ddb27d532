"""Gemma 1."""

from jaxmem.checkpoints.families import standard
from jaxmem.checkpoints.families.family import Family, Key
from jaxmem.checkpoints.families.ropes import Rope

# Its first files say "gelu" and mean the approximation that it was trained with.
_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu", "gelu": "gelu"}

FAMILY = Family(
    architecture="GemmaForCausalLM",
    model_type="gemma",
    parts=(
        *standard.SIZES,
        standard.head_dim(256),
        Key("hidden_act", "activation", str, "gelu_pytorch_tanh", _ACTIVATIONS),
        standard.TIED,
        Rope(),
    ),
    names=standard.NAMES,
    switches={"embed_scale": True, "norm_offset": True},
    only={"hidden_activation": (None, "gelu_pytorch_tanh")},
)
