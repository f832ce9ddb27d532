"""Seed-OSS."""

from jaxmem.checkpoints.families import standard
from jaxmem.checkpoints.families.family import Family, Key
from jaxmem.checkpoints.families.ropes import Rope

FAMILY = Family(
    architecture="SeedOssForCausalLM",
    model_type="seed_oss",
    parts=(
        *standard.SIZES,
        standard.head_dim(128),
        standard.ACTIVATION,
        standard.UNTIED,
        standard.QKV_BIAS,
        Key("attention_out_bias", "output_bias", bool, False),
        standard.FF_BIAS,
        Rope(),
    ),
    names=standard.NAMES,
    ignored=("residual_dropout",),
)
