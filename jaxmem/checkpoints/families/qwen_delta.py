"""Qwen3-Next and Qwen3.5: the gated delta rule beside gated attention."""

from typing import Any

from jaxmem.checkpoints.config_reader import Reader
from jaxmem.checkpoints.families import mixtures, standard
from jaxmem.checkpoints.families.family import (
    NAMES,
    ConfigPart,
    Family,
    Key,
    WithImages,
    listed_layers,
    read,
    write,
)
from jaxmem.checkpoints.families.ropes import RopePart
from jaxmem.models.config import ModelConfig, range_of

_KINDS = {"linear_attention": "delta", "full_attention": "attention"}


class Mixers(ConfigPart):
    """Mixers of layers: listed, or attention in each last of an interval; and sizes."""

    sizes = (
        Key("linear_num_value_heads", "delta.heads", default=32),
        Key("linear_num_key_heads", "delta.key_heads", default=16),
        Key("linear_key_head_dim", "delta.key_dim", default=128),
        Key("linear_value_head_dim", "delta.value_dim", default=128),
        Key("linear_conv_kernel_dim", "delta.conv_kernel_dim", default=4),
    )

    def read(self, reader: Reader) -> dict[str, Any]:
        within = range_of("layers")
        period = reader.take("full_attention_interval", int, 4, within=within)
        kinds = listed_layers(reader, _KINDS)
        if kinds is None:
            layers = range(1, reader.raw["num_hidden_layers"] + 1)
            kinds = tuple("delta" if i % period else "attention" for i in layers)
        fields = read(self.sizes, reader)
        if "delta" not in kinds:
            raise reader.error("layer_types has no 'linear_attention'")
        return fields | {"mixers": kinds}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        names = {kind: name for name, kind in _KINDS.items()}
        listed = [names.get(kind) for kind in model.by_layer("mixers")]
        return {"layer_types": listed} | write(self.sizes, model)


def _make_parts(*more: ConfigPart) -> tuple[ConfigPart, ...]:
    rope = RopePart(fraction=0.25, ignored=("mrope_interleaved", "mrope_section"))
    return standard.parts(
        standard.ATTENTION_BIAS,
        Mixers(),
        *more,
        head=standard.head_dim(256),
        rope=rope,
    )


_START, _ATTENTION = "blocks/attention/", "model.layers.{}.self_attn."
_LINEAR = "model.layers.{}.linear_attn."


def _make_names(**modules: str) -> dict[str, str]:
    """Names where the delta rule's projections, such as "query", are in `modules`."""
    return {
        **NAMES,
        _START + "gate": _ATTENTION + "q_proj",
        _START + "delta_taps": _LINEAR + "conv1d.weight",
        _START + "delta_shift": _LINEAR + "dt_bias",
        _START + "delta_log_speed": _LINEAR + "A_log",
        _START + "delta_norm": _LINEAR + "norm",
        _START + "delta_output": _LINEAR + "out_proj",
        **{f"{_START}delta_{part}": _LINEAR + name for part, name in modules.items()},
    }


_SWITCHES = {"qk_norm.enabled": True, "norm.offset": True, "self_attn.gate": True}
_EXPERTS = (
    *mixtures.OF_QWEN,
    mixtures.SHARED_WIDTH,
)

QWEN3_NEXT = Family(
    architecture="Qwen3NextForCausalLM",
    model_type="qwen3_next",
    parts=_make_parts(
        *_EXPERTS,
        Key("norm_topk_prob", "router.renormalised", bool, True),
        mixtures.EveryFew(),
    ),
    names=_make_names(
        query="in_proj_qkvz", key="in_proj_qkvz", value="in_proj_qkvz",
        gate="in_proj_qkvz", rate="in_proj_ba", decay="in_proj_ba",
    )
    | mixtures.NAMES
    | mixtures.SHARED_WITH_GATE,
    switches=_SWITCHES | {"experts.shared_gate": True},
    joined_by={
        "blocks/attention/query": "head",
        "blocks/attention/delta_query": "key_head",
        "blocks/attention/delta_rate": "key_head",
    },
    further=("mtp.",),
)  # fmt: skip

_NAMES = _make_names(
    query="in_proj_qkv", key="in_proj_qkv", value="in_proj_qkv",
    gate="in_proj_z", rate="in_proj_b", decay="in_proj_a",
)  # fmt: skip
_ONLY = {
    "attn_output_gate": (True,),
    "mamba_ssm_dtype": ("float32",),
    "mlp_only_layers": ([], None),
}
_IGNORED = ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")

QWEN3_5 = Family(
    architecture="Qwen3_5ForCausalLM",
    model_type="qwen3_5_text",
    parts=_make_parts(),
    names=_NAMES,
    switches=_SWITCHES,
    only=_ONLY,
    ignored=_IGNORED,
    joined_by={"blocks/attention/query": "head"},
    further=("mtp.",),
)

QWEN3_5_MOE = Family(
    architecture="Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    parts=(*standard.without(_make_parts(), "ff"), *_EXPERTS),
    names=_NAMES | mixtures.NAMES | mixtures.SHARED_WITH_GATE,
    fused=mixtures.joined_experts("model.layers.{}.mlp.experts."),
    switches=_SWITCHES
    | {
        "feed_forwards": ("experts",),
        "router.renormalised": True,
        "experts.shared_gate": True,
    },
    only=_ONLY | {"norm_topk_prob": (True,)},
    ignored=("intermediate_size", *_IGNORED),
    joined_by={"blocks/attention/query": "head"},
    further=("mtp.",),
)


def _with_images(architecture: str, model_type: str) -> WithImages:
    return WithImages(
        architecture=architecture,
        model_type=model_type,
        text=(f"{model_type}_text",),
        defaults={},
        ignored=frozenset(
            "image_token_id video_token_id vision_config vision_end_token_id "
            "vision_start_token_id".split()
        ),
        images=("model.visual.",),
    )


QWEN3_5_WITH_IMAGES = _with_images("Qwen3_5ForConditionalGeneration", "qwen3_5")
QWEN3_5_MOE_WITH_IMAGES = _with_images(
    "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe"
)
