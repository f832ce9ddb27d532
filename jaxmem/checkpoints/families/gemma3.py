"""Gemma 3: models of text, and the text part of those that read images."""

from jaxmem.checkpoints.families import gemma2, standard
from jaxmem.checkpoints.families.family import Family, WithImages
from jaxmem.checkpoints.families.ropes import TwoRopes
from jaxmem.checkpoints.families.windows import Windows, up_to_every_sixth

FAMILY = Family(
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    parts=(
        *gemma2.SHARED,
        *gemma2.caps(None, None),
        TwoRopes(),
        Windows(
            up_to_every_sixth,
            4096,
            ignored=("sliding_window_pattern", "_sliding_window_pattern"),
        ),
    ),
    names=standard.NAMES | standard.POST_NORMS,
    switches=gemma2.SWITCHES | {"qk_norm": True},
)

WITH_IMAGES = WithImages(
    architecture="Gemma3ForConditionalGeneration",
    model_type="gemma3",
    text=("gemma3_text",),
    defaults={
        "max_position_embeddings": 131_072,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 262_208,
    },
    ignored=frozenset(
        "boi_token_index eoi_token_index image_token_index mm_tokens_per_image "
        "vision_config".split()
    ),
)
