"""Gemma 4: models of text, and text parts. Global layers have sizes of their own."""

from typing import Any

from jaxmem.base import messages
from jaxmem.base.ranges import integers
from jaxmem.checkpoints.config_reader import Reader
from jaxmem.checkpoints.families import mixtures, standard
from jaxmem.checkpoints.families.attention_windows import Windows, up_to_every_sixth
from jaxmem.checkpoints.families.family import (
    NAMES,
    ConfigPart,
    Family,
    Key,
    WithImages,
    read,
)
from jaxmem.models.config import ModelConfig

_GLOBAL, _LOCAL = "full_attention", "sliding_attention"
_ROPES = {
    _GLOBAL: {"rope_type": "proportional", "rope_theta": 1e6},
    _LOCAL: {"rope_type": "default", "rope_theta": 1e4},
}


class GlobalLayers(ConfigPart):
    """Sizes of global layers, which have two forms, and rotary parameters.

    Either `global_head_dim` and `num_global_key_value_heads`, or `per_layer_config`,
    which has both for each global layer.
    """

    def read(self, reader: Reader) -> dict[str, Any]:
        shares = reader.take("attention_k_eq_v", bool, False)
        by_layer = reader.take("per_layer_config", (dict, type(None)), None)
        sizes = (
            Key("global_head_dim", "self_attn.global_head_dim", int | None, 512),
            Key(
                "num_global_key_value_heads",
                "self_attn.global_kv_heads",
                int | None,
                None,
            ),
        )
        fields = read(sizes, reader)
        if not shares:
            fields["self_attn.global_kv_heads"] = None
        if by_layer is not None:
            fields = self._read_layers(reader, by_layer)
        fields["self_attn.keys_are_values"] = shares
        return fields | self._read_ropes(reader)

    def _read_layers(self, reader: Reader, by_layer: dict[str, Any]) -> dict[str, Any]:
        """The sizes that all global layers have, and no others."""
        kinds = reader.take("layer_types", list)
        global_layers = {str(i) for i, kind in enumerate(kinds) if kind == _GLOBAL}
        texts = [repr(sorted(by_layer[i].items())) for i in by_layer]
        if by_layer and set(by_layer) != global_layers or len(set(texts)) > 1:
            raise reader.error(
                "per_layer_config must have equal entries for all full_attention "
                f"layers, and none for others, got {messages.short(by_layer)}"
            )
        inner = Reader(reader.path, dict(next(iter(by_layer.values()), {})))
        sizes = (
            Key(
                "head_dim", "self_attn.global_head_dim", default=reader.raw["head_dim"]
            ),
            Key("num_key_value_heads", "self_attn.global_kv_heads", int | None, None),
        )
        fields = read(sizes, inner)
        inner.finish({})
        return fields

    def _read_ropes(self, reader: Reader) -> dict[str, Any]:
        ropes = reader.take("rope_parameters", (dict, type(None)), None) or _ROPES
        if set(ropes) != set(_ROPES):
            raise reader.error(
                f"rope_parameters must be for {_GLOBAL} and {_LOCAL}, got "
                f"{', '.join(map(messages.name, ropes))}"
            )
        fields = {"rope.proportion": 1.0}
        for kind, field in ((_GLOBAL, "rope.theta"), (_LOCAL, "rope.local_theta")):
            inner = Reader(reader.path, dict(ropes[kind]))
            known = {"default": False, "proportional": True}
            known = known if kind == _GLOBAL else {"default": False}
            named = inner.take("rope_type", str, "default")
            is_part = reader.choose(f"rope type of {kind}", named, known)
            theta = _ROPES[kind]["rope_theta"]
            fields |= Key("rope_theta", field, float, theta).read(inner)
            if is_part:
                part = Key("partial_rotary_factor", "rope.proportion", float, 1.0)
                fields |= part.read(inner)
            inner.finish({"factor": (1.0, 1, None)})
        return fields

    def write(self, model: ModelConfig) -> dict[str, Any]:
        part = {"partial_rotary_factor": model.rope.proportion or 1.0}
        own = {"rope_type": "proportional", "rope_theta": model.rope.theta} | part
        theta = model.rope.local_theta or model.rope.theta
        return {
            "attention_k_eq_v": model.self_attn.keys_are_values,
            "global_head_dim": model.self_attn.global_head_dim,
            "num_global_key_value_heads": model.self_attn.global_kv_heads,
            "rope_parameters": {
                _GLOBAL: own, _LOCAL: {"rope_type": "default", "rope_theta": theta}
            },
        }  # fmt: skip


class Reused(ConfigPart):
    """Last layers that attend to keys and values of earlier ones."""

    def read(self, reader: Reader) -> dict[str, Any]:
        layers, key = reader.raw["num_hidden_layers"], "num_kv_shared_layers"
        within = integers(0, limit=layers - 1)
        count = reader.take(key, (int, type(None)), 0, within=within) or 0
        wide = reader.take("use_double_wide_mlp", (bool, type(None)), False)
        if not count:
            return {}
        mixers = ("attention",) * (layers - count) + ("reuse",) * count
        double = 2 * reader.raw["intermediate_size"]
        return {"mixers": mixers, "mlp.reuse_ff": double if wide else None}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {
            "num_kv_shared_layers": model.by_layer("mixers").count("reuse"),
            "use_double_wide_mlp": model.mlp.reuse_ff == 2 * model.ff,
        }


_LAYER = "model.layers.{}."

GEMMA4 = Family(
    architecture="Gemma4ForCausalLM",
    model_type="gemma4_text",
    parts=standard.parts(
        standard.ATTENTION_BIAS,
        Key("final_logit_softcapping", "logits.softcap", float | None, None),
        Key(
            "hidden_size_per_layer_input", "embedding.per_layer_width", int | None, 256,
            read_value=lambda value: value or None,
            write_value=lambda value: value or 0, may_be_zero=True,
        ),
        Key(
            "vocab_size_per_layer_input", "embedding.per_layer_vocab", int | None,
            262_144,
        ),
        mixtures.Beside(),
        Windows(up_to_every_sixth, 512),
        Reused(),
        head=standard.head_dim(256),
        activation=standard.activation("gelu_pytorch_tanh", "hidden_activation"),
        tied=standard.TIED,
        rope=GlobalLayers(),
    ),
    names=NAMES
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
        "norm.post": True,
        "qk_norm.enabled": True,
        "self_attn.value_norm": True,
        "embedding.scaled": True,
        "residual.layer_scale": True,
        "self_attn.scale": 1.0,
        "router.renormalised": True,
    },
    only={
        "use_bidirectional_attention": (None, "vision"),  # which text alone has not
    },
)  # fmt: skip

GEMMA4_WITH_IMAGES = WithImages(
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
