"""GLM-4.5, 4.6 and 4.7: sigmoid routing in groups, and a shared expert."""

from jaxmem.checkpoints.families import mixtures, standard
from jaxmem.checkpoints.families.family import Family, Key
from jaxmem.checkpoints.families.ropes import Rope

FAMILY = Family(
    architecture="Glm4MoeForCausalLM",
    model_type="glm4_moe",
    parts=(
        *standard.sizes(eps=1e-5),
        standard.head_dim(),
        standard.ACTIVATION,
        standard.UNTIED,
        standard.qkv_bias(False),
        Key("use_qk_norm", "qk_norm", bool, False),
        *mixtures.sizes("n_routed_experts", older="num_local_experts"),
        *mixtures.GROUPS,
        mixtures.Shared("n_shared_experts", 1),
        Key("norm_topk_prob", "router_renormalised", bool, True),
        mixtures.AfterTheFirst(1),
        Rope(fraction=0.5),
    ),
    names=standard.NAMES
    | mixtures.NAMES
    | mixtures.CORRECTION
    | mixtures.shared("shared_experts"),
    switches=mixtures.CORRECTED,
    ignored=mixtures.IGNORED,
    more_layers_key="num_nextn_predict_layers",
)
