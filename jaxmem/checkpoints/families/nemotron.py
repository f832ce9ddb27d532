"""Nemotron and Minitron: squared ReLU without a gate, layer norms."""

from jaxmem.checkpoints.families import standard
from jaxmem.checkpoints.families.family import Family
from jaxmem.checkpoints.families.ropes import Rope

FAMILY = Family(
    architecture="NemotronForCausalLM",
    model_type="nemotron",
    parts=(
        *standard.sizes(eps=1e-5, key="norm_eps"),
        standard.head_dim(),
        standard.activation("relu2"),
        standard.UNTIED,
        standard.ATTENTION_BIAS,
        standard.FF_BIAS,
        Rope(fraction=0.5),
    ),
    names=standard.NAMES,
    switches={
        "norm": "layer",
        "norm_bias": True,
        "norm_offset": True,
        "gated": False,
    },
)
