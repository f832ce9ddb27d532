"""OLMo 2 and 3, OLMoE, and EXAONE 4, which has their norms of what sublayers add."""

from jaxmem.checkpoints.families import mixtures, standard
from jaxmem.checkpoints.families.attention_windows import Windows, by_period
from jaxmem.checkpoints.families.family import NAMES, Family
from jaxmem.checkpoints.families.ropes import TwoRopes

_WIDE_NORM = {"qk_norm.enabled": True, "qk_norm.axis": "width"}
_AFTER = {"norm.pre": False, "norm.post": True}
_NAMES = standard.but(NAMES, "blocks/attention_norm", "blocks/feed_forward_norm") | {
    "blocks/post_attention_norm": "model.layers.{}.post_attention_layernorm",
    "blocks/post_feed_forward_norm": "model.layers.{}.post_feedforward_layernorm",
}

OLMO2 = Family(
    architecture="Olmo2ForCausalLM",
    model_type="olmo2",
    parts=standard.parts(standard.ATTENTION_BIAS, eps=1e-5, head=standard.SHARED_WIDTH),
    names=_NAMES,
    switches=_AFTER | _WIDE_NORM,
)

# Windows; only the other layers' wavelengths are scaled.
OLMO3 = Family(
    architecture="Olmo3ForCausalLM",
    model_type="olmo3",
    parts=standard.parts(
        standard.ATTENTION_BIAS,
        Windows(("local",) * 3 + ("global",), 4096),
        eps=1e-5,
        head=standard.SHARED_WIDTH,
        rope=TwoRopes(500_000.0, 500_000.0, local_key=None),
    ),
    names=_NAMES,
    switches=_AFTER | _WIDE_NORM,
)

OLMOE = Family(
    architecture="OlmoeForCausalLM",
    model_type="olmoe",
    parts=standard.parts(
        standard.ATTENTION_BIAS,
        *mixtures.sizes("num_experts", None, older="num_local_experts"),
        mixtures.Balance(0.01),
        mixtures.RENORMALISED,
        eps=1e-5,
        head=standard.SHARED_WIDTH,
    ),
    names=NAMES | mixtures.NAMES,
    switches={"feed_forwards": ("experts",)} | _WIDE_NORM,
)

# Layers without windows are not rotated.
EXAONE4 = Family(
    architecture="Exaone4ForCausalLM",
    model_type="exaone4",
    parts=standard.parts(Windows(by_period(4), 4096, full="unrotated"), eps=1e-5),
    names=_NAMES,
    switches=_AFTER | {"qk_norm.enabled": True},
    ignored=("sliding_window_pattern",),
)
