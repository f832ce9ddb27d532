"""StableLM 2: layer norms, a quarter of each head is rotated."""

from jaxmem.checkpoints.families import standard
from jaxmem.checkpoints.families.family import Family, Key
from jaxmem.checkpoints.families.ropes import Rope

FAMILY = Family(
    architecture="StableLmForCausalLM",
    model_type="stablelm",
    parts=(
        *standard.sizes(eps=1e-5, key="layer_norm_eps"),
        standard.SHARED_WIDTH,
        standard.ACTIVATION,
        standard.UNTIED,
        Key("use_qkv_bias", "qkv_bias", bool, False),
        standard.parallel("shared", False),
        Rope(fraction=0.25),
    ),
    names=standard.NAMES,
    switches={"norm": "layer", "norm_bias": True},
    only={"qk_layernorm": (False, None)},
    ignored=("hidden_dropout",),
)
