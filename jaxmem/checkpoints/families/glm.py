"""GLM-4-9B and its like, before the norms of what sublayers add."""

from jaxmem.checkpoints.families import glm4
from jaxmem.checkpoints.families.family import Family

FAMILY = Family(
    architecture="GlmForCausalLM",
    model_type="glm",
    parts=glm4.PARTS,
    names=glm4.NAMES,
    pairs="neighbours",
)
