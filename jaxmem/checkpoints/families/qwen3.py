"""Qwen3, dense."""

from jaxmem.checkpoints.families import standard
from jaxmem.checkpoints.families.family import Family
from jaxmem.checkpoints.families.ropes import Rope
from jaxmem.checkpoints.families.windows import Windows, after_the_first

FAMILY = Family(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    parts=(
        *standard.SIZES,
        standard.head_dim(128),
        standard.ACTIVATION,
        standard.UNTIED,
        Rope(),
        Windows(after_the_first, switch=True),
    ),
    names=standard.NAMES,
    switches={"qk_norm": True},
)
