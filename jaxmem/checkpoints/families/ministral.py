"""Ministral 8B: a window in the layers that are listed."""

from jaxmem.checkpoints.families import standard
from jaxmem.checkpoints.families.family import Family
from jaxmem.checkpoints.families.ropes import Rope
from jaxmem.checkpoints.families.windows import Windows, every_layer

FAMILY = Family(
    architecture="MinistralForCausalLM",
    model_type="ministral",
    parts=(
        *standard.SIZES,
        standard.head_dim(),
        standard.ACTIVATION,
        standard.UNTIED,
        Rope(),
        Windows(every_layer, 4096),
    ),
    names=standard.NAMES,
)
