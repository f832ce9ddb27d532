"""Llama 2 and 3."""

from jaxmem.checkpoints.families import standard
from jaxmem.checkpoints.families.family import Family
from jaxmem.checkpoints.families.ropes import Rope

FAMILY = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    parts=(
        *standard.SIZES,
        standard.head_dim(),
        standard.ACTIVATION,
        standard.UNTIED,
        standard.ATTENTION_BIAS,
        standard.FF_BIAS,
        Rope(),
    ),
    names=standard.NAMES,
)
