"""EXAONE 4: norms of what sublayers add; layers without windows are not rotated."""

from jaxmem.checkpoints.families import olmo2, standard
from jaxmem.checkpoints.families.family import Family
from jaxmem.checkpoints.families.ropes import Rope
from jaxmem.checkpoints.families.windows import Windows, by_period

FAMILY = Family(
    architecture="Exaone4ForCausalLM",
    model_type="exaone4",
    parts=(
        *standard.sizes(eps=1e-5),
        standard.head_dim(),
        standard.ACTIVATION,
        standard.UNTIED,
        Rope(),
        Windows(by_period(4), 4096, full="unrotated"),
    ),
    names=olmo2.NAMES,
    switches={"pre_norms": False, "post_norms": True, "qk_norm": True},
    ignored=("sliding_window_pattern",),
)
