"""Qwen3 with experts, such as Qwen3-30B-A3B."""

from jaxmem.checkpoints.families import mixtures, standard
from jaxmem.checkpoints.families.family import Family
from jaxmem.checkpoints.families.ropes import Rope
from jaxmem.checkpoints.families.windows import Windows, switched

FAMILY = Family(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    parts=(
        *standard.SIZES,
        standard.head_dim(),
        standard.ACTIVATION,
        standard.UNTIED,
        standard.ATTENTION_BIAS,
        *mixtures.sizes("num_experts", older="num_local_experts"),
        mixtures.Balance(),
        mixtures.RENORMALISED,
        mixtures.EveryFew(),
        Rope(),
        Windows(switched, 4096, listed=False, switch=True),
    ),
    names=standard.NAMES | mixtures.NAMES,
    switches={"qk_norm": True},
)
