"""GLM-4-0414: half of each head is rotated, in neighbouring pairs."""

from jaxmem.checkpoints.families import standard
from jaxmem.checkpoints.families.family import Family
from jaxmem.checkpoints.families.ropes import Rope

PARTS = (
    *standard.sizes(eps=1.5625e-7),
    standard.head_dim(128),
    standard.ACTIVATION,
    standard.UNTIED,
    standard.QKV_BIAS,
    Rope(fraction=0.5),
)
NAMES = standard.NAMES | standard.JOINED_GATE

FAMILY = Family(
    architecture="Glm4ForCausalLM",
    model_type="glm4",
    parts=PARTS,
    names=NAMES
    | {
        "blocks/post_attention_norm": "model.layers.{}.post_self_attn_layernorm",
        "blocks/post_feed_forward_norm": "model.layers.{}.post_mlp_layernorm",
    },
    switches={"post_norms": True},
    pairs="neighbours",
)
