"""Qwen 1.5 to 3, dense and with experts."""

from jaxmem.checkpoints.families import mixtures, standard
from jaxmem.checkpoints.families.attention_windows import (
    Windows,
    after_the_first,
    alternating_up_to,
    switched,
)
from jaxmem.checkpoints.families.family import NAMES, Family, Key

QWEN2 = Family(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    parts=standard.parts(Windows(after_the_first, switch=True)),
    switches={"self_attn.qkv_bias": True},
)

QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    parts=standard.parts(
        Windows(after_the_first, switch=True), head=standard.head_dim(128)
    ),
    switches={"qk_norm.enabled": True},
)

# One of the experts is used by every token, behind a gate.
QWEN2_MOE = Family(
    architecture="Qwen2MoeForCausalLM",
    model_type="qwen2_moe",
    parts=standard.parts(
        Key("qkv_bias", "self_attn.qkv_bias", bool, True),
        *mixtures.OF_QWEN,
        mixtures.SHARED_WIDTH,
        mixtures.RENORMALISED,
        mixtures.EveryFew(),
        Windows(alternating_up_to, switch=True, nothing=0),
    ),
    names=NAMES | mixtures.NAMES | mixtures.SHARED_WITH_GATE,
    switches={"experts.shared_gate": True},
)

QWEN3_MOE = Family(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    parts=standard.parts(
        standard.ATTENTION_BIAS,
        *mixtures.OF_QWEN,
        mixtures.RENORMALISED,
        mixtures.EveryFew(),
        Windows(switched, 4096, listed=False, switch=True),
    ),
    names=NAMES | mixtures.NAMES,
    switches={"qk_norm.enabled": True},
)
