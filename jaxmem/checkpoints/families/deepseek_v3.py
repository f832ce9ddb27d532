"""DeepSeek V3, V3.1 and R1: latent attention, and sigmoid routing in groups."""

from jaxmem.checkpoints.families import deepseek_v2, mixtures
from jaxmem.checkpoints.families.family import Family, Key

FAMILY = Family(
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    parts=(
        *deepseek_v2.SHARED,
        *mixtures.sizes("n_routed_experts", older="num_local_experts"),
        *mixtures.GROUPS,
        mixtures.Shared("n_shared_experts", 1),
        Key("norm_topk_prob", "router_renormalised", bool, True, null_is_default=True),
        mixtures.AfterTheFirst(3),
    ),
    names=deepseek_v2.NAMES | mixtures.CORRECTION,
    switches={"mixers": ("latent",), **mixtures.CORRECTED},
    only={
        "rope_interleave": (True, None),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "moe_layer_freq": (1,),
    },
    ignored=deepseek_v2.IGNORED,
    more_layers_key="num_nextn_predict_layers",
    pairs="last",
    joined_by={"blocks/attention/key": "head"},
)
