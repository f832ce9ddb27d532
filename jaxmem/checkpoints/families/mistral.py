"""Mistral and Mixtral, and Ministral, whose queries may grow with their position."""

from jaxmem.checkpoints.families import mixtures, standard
from jaxmem.checkpoints.families.attention_windows import EVERY_LAYER, Windows
from jaxmem.checkpoints.families.family import NAMES, Family, WithImages
from jaxmem.checkpoints.families.ropes import RopePart

MISTRAL = Family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    parts=standard.parts(Windows(EVERY_LAYER, listed=False)),
)

# A window in the layers that are listed.
MINISTRAL = Family(
    architecture="MinistralForCausalLM",
    model_type="ministral",
    parts=standard.parts(Windows(EVERY_LAYER, 4096)),
)

MINISTRAL3 = Family(
    architecture="Ministral3ForCausalLM",
    model_type="ministral3",
    parts=standard.parts(
        Windows(EVERY_LAYER, listed=False),
        eps=1e-5,
        head=standard.head_dim(128),
        rope=RopePart(1_000_000.0, growth="llama_4_scaling_beta"),
    ),
)

MIXTRAL = Family(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    parts=standard.parts(
        *mixtures.EVERYWHERE,
        Windows(EVERY_LAYER, listed=False),
        eps=1e-5,
        rope=RopePart(theta=1_000_000.0),
    ),
    names=NAMES | mixtures.BLOCK_SPARSE,
    switches={"feed_forwards": ("experts",), "router.renormalised": True},
    only={"router_jitter_noise": (0.0, 0, None)},
)

MISTRAL3_WITH_IMAGES = WithImages(
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
