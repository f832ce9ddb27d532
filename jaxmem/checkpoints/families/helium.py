"""Helium: heads are rotated in neighbouring pairs."""

from jaxmem.checkpoints.families import standard
from jaxmem.checkpoints.families.family import Family
from jaxmem.checkpoints.families.ropes import Rope

FAMILY = Family(
    architecture="HeliumForCausalLM",
    model_type="helium",
    parts=(
        *standard.sizes(eps=1e-8),
        standard.head_dim(128),
        standard.ACTIVATION,
        standard.UNTIED,
        standard.qkv_bias(False),
        standard.FF_BIAS,
        Rope(100_000.0),
    ),
    names=standard.NAMES,
    pairs="neighbours",
)
