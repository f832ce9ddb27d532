"""Gemma 4: models of text, and text parts."""

from typing import Any

from jaxmem.checkpoints.families import mixtures, standard
from jaxmem.checkpoints.families.family import Family, Key, WithImages
from jaxmem.checkpoints.families.global_layers import GlobalLayers, Reused
from jaxmem.checkpoints.families.windows import Windows, up_to_every_sixth

_LAYER = "model.layers.{}."
_LAYER_INPUT = Key(
    "hidden_size_per_layer_input", "layer_input", int | None, 256,
    read_value=lambda value: value or None, write_value=lambda value: value or 0,
    may_be_zero=True,
)  # fmt: skip

PARTS: tuple[Any, ...] = (
    *standard.sizes(eps=1e-6),
    standard.head_dim(256),
    standard.activation("gelu_pytorch_tanh", "hidden_activation"),
    standard.TIED,
    standard.ATTENTION_BIAS,
    Key("final_logit_softcapping", "softcap", float | None, None),
    _LAYER_INPUT,
    Key("vocab_size_per_layer_input", "layer_input_vocab", int | None, 262_144),
    mixtures.Beside(),
    GlobalLayers(),
    Windows(up_to_every_sixth, 512),
    Reused(),
)

FAMILY = Family(
    architecture="Gemma4ForCausalLM",
    model_type="gemma4_text",
    parts=PARTS,
    names=standard.NAMES
    | standard.POST_NORMS
    | {
        "blocks/layer_scale": _LAYER + "layer_scalar",
        "blocks/injection/inject_gate": _LAYER + "per_layer_input_gate",
        "blocks/injection/inject": _LAYER + "per_layer_projection",
        "blocks/injection/norm": _LAYER + "post_per_layer_input_norm",
        **mixtures.BESIDE,
        "layer_inputs/table": "model.embed_tokens_per_layer",
        "layer_inputs/project": "model.per_layer_model_projection",
        "layer_inputs/norm": "model.per_layer_projection_norm",
    },
    switches={
        "post_norms": True,
        "qk_norm": True,
        "value_norm": True,
        "embed_scale": True,
        "layer_scale": True,
        "attention_scale": 1.0,
        "router_renormalised": True,
    },
    only={
        "use_bidirectional_attention": (None, "vision"),  # which text alone has not
    },
)

WITH_IMAGES = WithImages(
    architecture="Gemma4ForConditionalGeneration",
    model_type="gemma4",
    text=("gemma4_text",),
    defaults={},
    ignored=frozenset(
        "audio_config audio_token_id boa_token_id boi_token_id eoa_token_id "
        "eoa_token_index eoi_token_id image_token_id video_token_id vision_config "
        "vision_soft_tokens_per_image".split()
    ),
    images=(
        "model.vision_tower.", "model.embed_vision.", "model.audio_tower.",
        "model.embed_audio.",
    ),
)  # fmt: skip
