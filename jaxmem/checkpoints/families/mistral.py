"""Mistral 7B and its successors of the same architecture."""

from jaxmem.checkpoints.families import standard
from jaxmem.checkpoints.families.family import Family
from jaxmem.checkpoints.families.ropes import Rope
from jaxmem.checkpoints.families.windows import Windows, every_layer

FAMILY = Family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    parts=(
        *standard.SIZES,
        standard.head_dim(),
        standard.ACTIVATION,
        standard.UNTIED,
        Rope(),
        Windows(every_layer, listed=False),
    ),
    names=standard.NAMES,
)
