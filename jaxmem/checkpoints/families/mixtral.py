"""Mixtral: Mistral with experts."""

from jaxmem.checkpoints.families import mixtures, standard
from jaxmem.checkpoints.families.family import Family
from jaxmem.checkpoints.families.ropes import Rope
from jaxmem.checkpoints.families.windows import Windows, every_layer

FAMILY = Family(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    parts=(
        *standard.without(standard.sizes(eps=1e-5), "ff"),
        standard.head_dim(),
        standard.ACTIVATION,
        standard.UNTIED,
        *mixtures.sizes("num_local_experts", None, older="num_experts"),
        mixtures.Balance(),
        Rope(theta=1_000_000.0),
        Windows(every_layer, listed=False),
    ),
    names=standard.NAMES
    | mixtures.names("block_sparse_moe.", "gate", ("w1", "w3", "w2")),
    switches={"feed_forwards": ("experts",), "router_renormalised": True},
    only={"router_jitter_noise": (0.0, 0, None)},
)
