"""Granite 3: four multipliers."""

from jaxmem.checkpoints.families import standard
from jaxmem.checkpoints.families.family import Family, Key
from jaxmem.checkpoints.families.ropes import Rope

FAMILY = Family(
    architecture="GraniteForCausalLM",
    model_type="granite",
    parts=(
        *standard.SIZES,
        standard.SHARED_WIDTH,
        standard.ACTIVATION,
        standard.UNTIED,
        standard.ATTENTION_BIAS,
        standard.FF_BIAS,
        Key("embedding_multiplier", "embed_multiplier", float, 1.0),
        Key("residual_multiplier", "residual_multiplier", float, 1.0),
        Key("attention_multiplier", "attention_scale", float, 1.0),
        Key(
            "logits_scaling", "logit_multiplier", float, 1.0,
            read_value=lambda divisor: 1 / divisor,
            write_value=lambda multiplier: 1 / multiplier,
        ),
        Rope(),
    ),
    names=standard.NAMES,
)  # fmt: skip
