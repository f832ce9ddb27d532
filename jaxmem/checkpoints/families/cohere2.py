"""Command R7B and A: windows in three of four layers; the fourth is not rotated."""

from jaxmem.checkpoints.families import cohere
from jaxmem.checkpoints.families.family import Family
from jaxmem.checkpoints.families.windows import Windows, by_period

FAMILY = Family(
    architecture="Cohere2ForCausalLM",
    model_type="cohere2",
    parts=(*cohere.PARTS, Windows(by_period(4), 4096, full="unrotated")),
    names=cohere.NAMES,
    switches=cohere.SWITCHES,
    ignored=("head_dim", "sliding_window_pattern"),
    pairs="neighbours",
)
