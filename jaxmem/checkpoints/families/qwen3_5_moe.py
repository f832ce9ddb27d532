"""Qwen3.5 with experts."""

from jaxmem.checkpoints.families import deltas, mixtures, qwen3_5, standard
from jaxmem.checkpoints.families.family import Family, Key, WithImages

FAMILY = Family(
    architecture="Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    parts=(
        *standard.without(deltas.PARTS, "ff"),
        *mixtures.sizes("num_experts", older="num_local_experts"),
        mixtures.Balance(),
        Key("shared_expert_intermediate_size", "shared_ff"),
    ),
    names=qwen3_5.NAMES | mixtures.NAMES | mixtures.SHARED_WITH_GATE,
    fused=mixtures.FUSED,
    switches=deltas.SWITCHES
    | {
        "feed_forwards": ("experts",),
        "router_renormalised": True,
        "shared_gate": True,
    },
    only=deltas.ONLY | {"mlp_only_layers": ([], None), "norm_topk_prob": (True,)},
    ignored=("intermediate_size", *deltas.IGNORED),
    joined_by={"blocks/attention/query": "head"},
    further=("mtp.",),
)

WITH_IMAGES = WithImages(
    architecture="Qwen3_5MoeForConditionalGeneration",
    model_type="qwen3_5_moe",
    text=("qwen3_5_moe_text",),
    defaults={},
    ignored=qwen3_5.IMAGE_KEYS,
    images=("model.visual.",),
)
