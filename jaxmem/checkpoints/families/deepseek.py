"""DeepSeek V2 to V3.1 and R1: latent attention, and experts, maybe in groups."""

import math
from typing import Any

from jaxmem.base.ranges import reals
from jaxmem.checkpoints.config_reader import Reader
from jaxmem.checkpoints.families import mixtures, standard
from jaxmem.checkpoints.families.family import NAMES, ConfigPart, Family, Key, read
from jaxmem.checkpoints.families.ropes import RopePart
from jaxmem.models.config import ModelConfig


class HeadDim(ConfigPart):
    """A head's numbers: those that are rotated, and the others."""

    keys = (
        Key("qk_nope_head_dim", "head_dim", default=128),
        Key("qk_rope_head_dim", "latent.rope_head_dim", default=64),
    )

    def read(self, reader: Reader) -> dict[str, Any]:
        rest, rotated = read(self.keys, reader).values()
        return {"latent.rope_head_dim": rotated, "head_dim": rest + rotated}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        rotated = model.latent.rope_head_dim or 0
        widths = model.head_dim - rotated, rotated
        return {key.key: n for key, n in zip(self.keys, widths, strict=True)}


class ScaledRope(ConfigPart):
    """Rotary parameters, which also set the scale of scores.

    m² / sqrt(head_dim),   m = 0.1 mscale_all_dim ln(factor) + 1,   1 unscaled
    """

    def read(self, reader: Reader) -> dict[str, Any]:
        fields = RopePart().read(reader)
        key = "rope_parameters" if reader.raw.get("rope_parameters") else "rope_scaling"
        rope_reader = Reader(reader.path, reader.raw.get(key) or {})
        optional = float, type(None)
        weight = rope_reader.take("mscale_all_dim", optional, None, within=reals(0))
        if fields["rope.scaling"] is None or not weight:
            return fields
        head_dim = HeadDim().read(reader)["head_dim"]
        growth = 0.1 * weight * math.log(max(fields["rope.factor"], 1)) + 1
        return fields | {"self_attn.scale": growth**2 * head_dim**-0.5}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        raw = RopePart().write(model)
        growth = math.sqrt(model.score_scale * model.head_dim**0.5)
        if raw["rope_scaling"] is not None and model.rope.factor > 1:
            weight = (growth - 1) / (0.1 * math.log(model.rope.factor))
            raw["rope_scaling"]["mscale_all_dim"] = max(weight, 0.0)
        return raw


def _make_parts(*more: ConfigPart) -> tuple[ConfigPart, ...]:
    return standard.parts(
        Key("kv_lora_rank", "latent.kv_rank", default=512),
        Key("q_lora_rank", "latent.query_rank", int | None, 1536),
        Key("v_head_dim", "latent.value_head_dim", default=128),
        standard.ATTENTION_BIAS,
        *more,
        head=HeadDim(),
        rope=ScaledRope(),
    )


_START, _ATTENTION = "blocks/attention/", "model.layers.{}.self_attn."
_NAMES = (
    standard.but(NAMES, _START + "key_norm")
    | {
        _START + "query_up": _ATTENTION + "q_b_proj",
        _START + "query_down": _ATTENTION + "q_a_proj",
        _START + "query_norm": _ATTENTION + "q_a_layernorm",
        _START + "latent": _ATTENTION + "kv_a_proj_with_mqa",
        _START + "rotated": _ATTENTION + "kv_a_proj_with_mqa",
        _START + "latent_norm": _ATTENTION + "kv_a_layernorm",
        _START + "key": _ATTENTION + "kv_b_proj",
        _START + "value": _ATTENTION + "kv_b_proj",
    }
    | mixtures.NAMES
    | mixtures.shared("shared_experts")
)
_IGNORED = (
    "aux_loss_alpha", "ep_size", "head_dim", "qk_head_dim", "seq_aux",
    *mixtures.IGNORED,
)  # fmt: skip

# And V2 Lite: softmax routing, maybe in groups.
DEEPSEEK_V2 = Family(
    architecture="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    parts=_make_parts(
        *mixtures.sizes("n_routed_experts", older="num_experts"),
        mixtures.LimitedGroups(),
        Key("routed_scaling_factor", "router.scale", float, 1.0),
        mixtures.Shared("n_shared_experts", 2),
        mixtures.AfterTheFirst(0),
    ),
    names=_NAMES,
    switches={"mixers": ("latent",)},
    only={
        "norm_topk_prob": (False, None),
        "scoring_func": ("softmax",),
        "moe_layer_freq": (1,),
    },
    ignored=_IGNORED,
    pairs="last",
    joined_by={"blocks/attention/key": "head"},
)

# Sigmoid routing in groups.
DEEPSEEK_V3 = Family(
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    parts=_make_parts(
        *mixtures.sizes("n_routed_experts", older="num_local_experts"),
        *mixtures.GROUPS,
        mixtures.Shared("n_shared_experts", 1),
        Key("norm_topk_prob", "router.renormalised", bool, True, null_is_default=True),
        mixtures.AfterTheFirst(3),
    ),
    names=_NAMES | mixtures.CORRECTION,
    switches={"mixers": ("latent",), **mixtures.CORRECTED},
    only={
        "rope_interleave": (True, None),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "moe_layer_freq": (1,),
    },
    ignored=_IGNORED,
    more_layers_key="num_nextn_predict_layers",
    pairs="last",
    joined_by={"blocks/attention/key": "head"},
)
