"""Arcee's AFM: squared ReLU without a gate."""

from jaxmem.checkpoints.families import standard
from jaxmem.checkpoints.families.family import Family
from jaxmem.checkpoints.families.ropes import Rope

FAMILY = Family(
    architecture="ArceeForCausalLM",
    model_type="arcee",
    parts=(
        *standard.sizes(eps=1e-5),
        standard.head_dim(),
        standard.activation("relu2"),
        standard.UNTIED,
        standard.ATTENTION_BIAS,
        standard.FF_BIAS,
        Rope(),
    ),
    names=standard.NAMES,
    switches={"gated": False},
)
