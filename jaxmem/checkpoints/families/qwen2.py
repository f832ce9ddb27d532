"""Qwen2 and Qwen2.5."""

from jaxmem.checkpoints.families import standard
from jaxmem.checkpoints.families.family import Family
from jaxmem.checkpoints.families.ropes import Rope
from jaxmem.checkpoints.families.windows import Windows, after_the_first

FAMILY = Family(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    parts=(
        *standard.SIZES,
        standard.head_dim(),
        standard.ACTIVATION,
        standard.UNTIED,
        Rope(),
        Windows(after_the_first, switch=True),
    ),
    names=standard.NAMES,
    switches={"qkv_bias": True},
)
