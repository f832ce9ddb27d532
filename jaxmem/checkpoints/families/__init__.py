"""Families of models as data, in files of kin; `family.Family` says of what."""

from jaxmem.checkpoints.families import (
    cohere,
    deepseek,
    dense,
    gemma,
    gemma4,
    glm,
    gpt,
    llama4,
    minimax_m2,
    mistral,
    olmo,
    phi,
    qwen,
    qwen_delta,
)

# In the order in which a decoder without a checkpoint is tried to be described.
FAMILIES = (
    dense.LLAMA, qwen.QWEN3, qwen.QWEN2, mistral.MISTRAL, gemma.GEMMA2, gemma.GEMMA3,
    gemma.GEMMA, gemma.VAULTGEMMA, mistral.MINISTRAL, mistral.MINISTRAL3, olmo.OLMO2,
    olmo.OLMO3, dense.SMOLLM3, phi.PHI3, glm.GLM4, glm.GLM, dense.GRANITE,
    cohere.COHERE, cohere.COHERE2, dense.NEMOTRON, dense.STABLELM, dense.STARCODER2,
    gpt.GPT2, gpt.GPT_NEOX, olmo.EXAONE4, dense.SEED_OSS, dense.ARCEE, dense.APERTUS,
    dense.ERNIE4_5, dense.HUNYUAN, dense.HELIUM, dense.NANOCHAT, phi.PHI,
    qwen.QWEN3_MOE, mistral.MIXTRAL, olmo.OLMOE, qwen.QWEN2_MOE, glm.GLM4_MOE,
    gpt.GPT_OSS, deepseek.DEEPSEEK_V2, deepseek.DEEPSEEK_V3, qwen_delta.QWEN3_NEXT,
    qwen_delta.QWEN3_5, qwen_delta.QWEN3_5_MOE, phi.PHIMOE, minimax_m2.MINIMAX_M2,
    gemma4.GEMMA4, llama4.LLAMA4,
)  # fmt: skip
WITH_IMAGES = (
    gemma.GEMMA3_WITH_IMAGES,
    gemma4.GEMMA4_WITH_IMAGES,
    llama4.LLAMA4_WITH_IMAGES,
    mistral.MISTRAL3_WITH_IMAGES,
    qwen_delta.QWEN3_5_WITH_IMAGES,
    qwen_delta.QWEN3_5_MOE_WITH_IMAGES,
)
