"""Families of models, each in one file as data; `family.Family` says of what."""

from jaxmem.checkpoints.families import (
    gemma2,
    gemma3,
    llama,
    mistral,
    qwen2,
    qwen3,
)

# In the order in which a decoder without a checkpoint is tried to be described.
FAMILIES = tuple(
    module.FAMILY for module in (llama, qwen3, qwen2, mistral, gemma2, gemma3)
)
WITH_IMAGES = (gemma3.WITH_IMAGES,)
