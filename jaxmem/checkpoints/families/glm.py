"""GLM-4 and its like: half of each head is rotated, in neighbouring pairs."""

from jaxmem.checkpoints.families import mixtures, standard
from jaxmem.checkpoints.families.family import NAMES, Family, Key
from jaxmem.checkpoints.families.ropes import RopePart

GLM = Family(
    architecture="GlmForCausalLM",
    model_type="glm",
    parts=standard.parts(
        standard.QKV_BIAS,
        eps=1.5625e-7,
        head=standard.head_dim(128),
        rope=RopePart(fraction=0.5),
    ),
    names=NAMES | standard.JOINED_GATE,
    pairs="neighbours",
)

GLM4 = Family(
    architecture="Glm4ForCausalLM",
    model_type="glm4",
    parts=GLM.parts,
    names={
        **GLM.names,
        "blocks/post_attention_norm": "model.layers.{}.post_self_attn_layernorm",
        "blocks/post_feed_forward_norm": "model.layers.{}.post_mlp_layernorm",
    },
    switches={"norm.post": True},
    pairs="neighbours",
)

# GLM-4.5 to 4.7: sigmoid routing in groups, and a shared expert; the pairs are halves.
GLM4_MOE = Family(
    architecture="Glm4MoeForCausalLM",
    model_type="glm4_moe",
    parts=standard.parts(
        standard.qkv_bias(False),
        Key("use_qk_norm", "qk_norm.enabled", bool, False),
        *mixtures.sizes("n_routed_experts", older="num_local_experts"),
        *mixtures.GROUPS,
        mixtures.Shared("n_shared_experts", 1),
        Key("norm_topk_prob", "router.renormalised", bool, True),
        mixtures.AfterTheFirst(1),
        eps=1e-5,
        rope=RopePart(fraction=0.5),
    ),
    names=NAMES
    | mixtures.NAMES
    | mixtures.CORRECTION
    | mixtures.shared("shared_experts"),
    switches=mixtures.CORRECTED,
    ignored=mixtures.IGNORED,
    more_layers_key="num_nextn_predict_layers",
)
