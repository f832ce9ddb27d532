"""Keys and names of latent attention."""

import math
from typing import Any

from jaxmem.base.ranges import reals
from jaxmem.checkpoints.families import standard
from jaxmem.checkpoints.families.family import Key
from jaxmem.checkpoints.families.ropes import Rope
from jaxmem.checkpoints.reader import Reader
from jaxmem.models.config import RANGES, ModelConfig


class HeadDim:
    """A head's numbers: those that are rotated, and the others."""

    def read(self, reader: Reader) -> dict[str, Any]:
        """`rotated_width` and `head_dim`."""
        within = RANGES["head_dim"]
        rest = reader.take("qk_nope_head_dim", int, 128, within=within)
        rotated = reader.take("qk_rope_head_dim", int, 64, within=within)
        return {"rotated_width": rotated, "head_dim": rest + rotated}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Both."""
        rotated = model.rotated_width or 0
        return {
            "qk_nope_head_dim": model.head_dim - rotated,
            "qk_rope_head_dim": rotated,
        }


class ScaledRope:
    """Rotary parameters, which say what scores are scaled by.

    m² / sqrt(head_dim),   m = 0.1 mscale_all_dim ln(factor) + 1,   1 unscaled
    """

    def read(self, reader: Reader) -> dict[str, Any]:
        """As `Rope.read`, and `attention_scale`."""
        fields = Rope().read(reader)
        key = "rope_parameters" if reader.raw.get("rope_parameters") else "rope_scaling"
        given = Reader(reader.path, reader.raw.get(key) or {})
        optional = float, type(None)
        weight = given.take("mscale_all_dim", optional, None, within=reals(0))
        if fields["rope_scaling"] is None or not weight:
            return fields
        # `HeadDim` has checked them.
        widths = (("qk_nope_head_dim", 128), ("qk_rope_head_dim", 64))
        head_dim = sum(reader.raw.get(*width) for width in widths)
        growth = 0.1 * weight * math.log(max(fields["rope_factor"], 1)) + 1
        return fields | {"attention_scale": growth**2 * head_dim**-0.5}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """As `Rope.write`, with the weight of the scale."""
        raw = Rope().write(model)
        growth = math.sqrt(model.score_scale * model.head_dim**0.5)
        if raw["rope_scaling"] is not None and model.rope_factor > 1:
            weight = (growth - 1) / (0.1 * math.log(model.rope_factor))
            raw["rope_scaling"]["mscale_all_dim"] = max(weight, 0.0)
        return raw


KEYS = (
    HeadDim(),
    Key("kv_lora_rank", "latent", default=512),
    Key("q_lora_rank", "query_latent", int | None, 1536),
    Key("v_head_dim", "value_dim", default=128),
    ScaledRope(),
)
_ATTENTION = "model.layers.{}.self_attn."
NAMES = standard.NAMES | {
    "blocks/attention/query": _ATTENTION + "q_proj",
    "blocks/attention/query_up": _ATTENTION + "q_b_proj",
    "blocks/attention/query_down": _ATTENTION + "q_a_proj",
    "blocks/attention/query_norm": _ATTENTION + "q_a_layernorm",
    "blocks/attention/latent": _ATTENTION + "kv_a_proj_with_mqa",
    "blocks/attention/rotated": _ATTENTION + "kv_a_proj_with_mqa",
    "blocks/attention/latent_norm": _ATTENTION + "kv_a_layernorm",
    "blocks/attention/key": _ATTENTION + "kv_b_proj",
    "blocks/attention/value": _ATTENTION + "kv_b_proj",
}
del NAMES["blocks/attention/key_norm"]
