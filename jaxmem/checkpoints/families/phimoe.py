"""Phi-3.5-MoE: LayerNorm, biases, and two experts that are chosen one by one."""

from jaxmem.checkpoints.families import mixtures, standard
from jaxmem.checkpoints.families.family import Family, Key
from jaxmem.checkpoints.families.ropes import Rope
from jaxmem.checkpoints.families.windows import Windows, every_layer

FAMILY = Family(
    architecture="PhimoeForCausalLM",
    model_type="phimoe",
    parts=(
        *standard.without(standard.sizes(eps=1e-5), "ff"),
        standard.head_dim(),
        standard.ACTIVATION,
        standard.UNTIED,
        standard.ATTENTION_BIAS,
        Key("lm_head_bias", "head_bias", bool, False),
        *mixtures.sizes("num_local_experts", None, older="num_experts"),
        mixtures.Balance(),
        Key("router_jitter_noise", "router_nearness", float, 0.01),
        Rope(theta=1_000_000.0),
        Windows(every_layer, listed=False),
    ),
    names=standard.NAMES
    | mixtures.names("block_sparse_moe.", "gate", ("w1", "w3", "w2")),
    switches={
        "feed_forwards": ("experts",),
        "norm": "layer",
        "norm_bias": True,
        "router_scores": "near",
    },
    only={"input_jitter_noise": (0.0, 0, None)},
    ignored=("hidden_dropout",),
)
