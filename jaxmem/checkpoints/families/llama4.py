"""Llama 4's text part: chunks, layers without rotation, experts of scaled inputs."""

from jaxmem.checkpoints.families import mixtures, standard
from jaxmem.checkpoints.families.attention_windows import Chunks, Growth, Unrotated
from jaxmem.checkpoints.families.family import NAMES, Family, Key, WithImages
from jaxmem.checkpoints.families.ropes import RopePart

_PART, _DENSE = "model.layers.{}.feed_forward.", ("gate", "up", "down")

LLAMA4 = Family(
    architecture="Llama4ForCausalLM",
    model_type="llama4_text",
    parts=(
        *standard.without(standard.sizes(eps=1e-5), "ff"),
        standard.head_dim(128),
        standard.ACTIVATION,
        standard.UNTIED,
        standard.ATTENTION_BIAS,
        Key("intermediate_size_mlp", "ff", default=16_384),
        Key(
            "intermediate_size", "experts.ff", default=8192, also=("experts.shared_ff",)
        ),
        Key("num_local_experts", "experts.count", default=16),
        Key("num_experts_per_tok", "experts.per_token", default=1),
        Key("use_qk_norm", "qk_norm.enabled", bool, True),
        mixtures.EveryLast(),
        RopePart(theta=500_000.0),
        Chunks(Unrotated(4), 8192),
        Growth(),
    ),
    names=NAMES
    | {f"blocks/feed_forward/{x}": f"{_PART}{x}_proj" for x in _DENSE}
    | mixtures.shared("shared_expert", _PART)
    | {"blocks/feed_forward/router": _PART + "router"}
    | mixtures.joined_experts(_PART + "experts."),
    switches={
        "qk_norm.after_rope": True,
        "qk_norm.scale": False,
        "qk_norm.rotated_only": True,
        "router.scores": "sigmoid",
        "router.scales_inputs": True,
    },
    only={"router_jitter_noise": (0.0, 0, None)},
    ignored=("for_llm_compressor", *mixtures.IGNORED),
    stored_as_in_out=("blocks/feed_forward/experts/",),
    pairs="neighbours",
)

LLAMA4_WITH_IMAGES = WithImages(
    architecture="Llama4ForConditionalGeneration",
    model_type="llama4",
    text=("llama4_text",),
    defaults={},
    ignored=frozenset(
        "boi_token_id boi_token_index eoi_token_id eoi_token_index image_token_id "
        "image_token_index vision_config".split()
    ),
    images=("vision_model.", "multi_modal_projector."),
    tied=False,
)
