"""OLMo 2: norms of what sublayers add, and of queries and keys as a whole."""

from jaxmem.checkpoints.families import standard
from jaxmem.checkpoints.families.family import Family
from jaxmem.checkpoints.families.ropes import Rope

NAMES = {
    module: name
    for module, name in standard.NAMES.items()
    if module not in ("blocks/attention_norm", "blocks/feed_forward_norm")
} | {
    "blocks/post_attention_norm": "model.layers.{}.post_attention_layernorm",
    "blocks/post_feed_forward_norm": "model.layers.{}.post_feedforward_layernorm",
}
SWITCHES = {
    "pre_norms": False,
    "post_norms": True,
    "qk_norm": True,
    "qk_norm_axis": "width",
}
PARTS = (
    *standard.sizes(eps=1e-5),
    standard.SHARED_WIDTH,
    standard.ACTIVATION,
    standard.UNTIED,
    standard.ATTENTION_BIAS,
)

FAMILY = Family(
    architecture="Olmo2ForCausalLM",
    model_type="olmo2",
    parts=(*PARTS, Rope()),
    names=NAMES,
    switches=SWITCHES,
)
