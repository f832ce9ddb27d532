"""OLMoE: norms of queries and keys as a whole, and experts."""

from jaxmem.checkpoints.families import mixtures, standard
from jaxmem.checkpoints.families.family import Family
from jaxmem.checkpoints.families.ropes import Rope

FAMILY = Family(
    architecture="OlmoeForCausalLM",
    model_type="olmoe",
    parts=(
        *standard.without(standard.sizes(eps=1e-5), "ff"),
        standard.SHARED_WIDTH,
        standard.ACTIVATION,
        standard.UNTIED,
        standard.ATTENTION_BIAS,
        *mixtures.sizes("num_experts", None, older="num_local_experts"),
        mixtures.Balance(0.01),
        mixtures.RENORMALISED,
        Rope(),
    ),
    names=standard.NAMES | mixtures.NAMES,
    switches={
        "feed_forwards": ("experts",),
        "qk_norm": True,
        "qk_norm_axis": "width",
    },
)
