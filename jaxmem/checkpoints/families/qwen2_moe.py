"""Qwen1.5 and Qwen2 with experts, one of which every token uses behind a gate."""

from jaxmem.checkpoints.families import mixtures, standard
from jaxmem.checkpoints.families.family import Family, Key
from jaxmem.checkpoints.families.ropes import Rope
from jaxmem.checkpoints.families.windows import Windows, alternating_up_to

FAMILY = Family(
    architecture="Qwen2MoeForCausalLM",
    model_type="qwen2_moe",
    parts=(
        *standard.SIZES,
        standard.head_dim(),
        standard.ACTIVATION,
        standard.UNTIED,
        Key("qkv_bias", "qkv_bias", bool, True),
        *mixtures.sizes("num_experts", older="num_local_experts"),
        mixtures.Balance(),
        Key("shared_expert_intermediate_size", "shared_ff"),
        mixtures.RENORMALISED,
        mixtures.EveryFew(),
        Rope(),
        Windows(alternating_up_to, switch=True, nothing=0),
    ),
    names=standard.NAMES | mixtures.NAMES | mixtures.SHARED_WITH_GATE,
    switches={"shared_gate": True},
)
