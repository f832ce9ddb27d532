"""Ministral 3, whose queries grow with their position, and Mistral 3's text parts."""

from jaxmem.checkpoints.families import standard
from jaxmem.checkpoints.families.family import Family, WithImages
from jaxmem.checkpoints.families.ropes import Rope
from jaxmem.checkpoints.families.windows import Windows, every_layer

FAMILY = Family(
    architecture="Ministral3ForCausalLM",
    model_type="ministral3",
    parts=(
        *standard.sizes(eps=1e-5),
        standard.head_dim(128),
        standard.ACTIVATION,
        standard.UNTIED,
        Rope(1_000_000.0, growth="llama_4_scaling_beta"),
        Windows(every_layer, listed=False),
    ),
    names=standard.NAMES,
)

WITH_IMAGES = WithImages(
    architecture="Mistral3ForConditionalGeneration",
    model_type="mistral3",
    text=("mistral", "ministral3"),
    defaults={
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "vocab_size": 131_072,
    },
    ignored=frozenset(
        "image_token_index multimodal_projector_bias projector_hidden_act "
        "spatial_merge_size vision_config vision_feature_layer".split()
    ),
)
