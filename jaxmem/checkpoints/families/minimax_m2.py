"""MiniMax-M2: norms of queries and keys as a whole, and sigmoid routing."""

from jaxmem.checkpoints.families import mixtures, standard
from jaxmem.checkpoints.families.family import Family
from jaxmem.checkpoints.families.ropes import Rope

FAMILY = Family(
    architecture="MiniMaxM2ForCausalLM",
    model_type="minimax_m2",
    parts=(
        *standard.without(standard.SIZES, "ff"),
        standard.head_dim(128),
        standard.ACTIVATION,
        standard.UNTIED,
        *mixtures.sizes("num_local_experts", None, older="num_experts"),
        mixtures.Balance(),
        Rope(theta=5_000_000.0, fraction=1.0),
    ),
    names=standard.NAMES
    | mixtures.names("block_sparse_moe.", "gate", ("w1", "w3", "w2"))
    | {
        "blocks/feed_forward/correction": (
            "model.layers.{}.block_sparse_moe.e_score_correction_bias"
        )
    },
    switches={
        "feed_forwards": ("experts",),
        "qk_norm": True,
        "qk_norm_axis": "width",
        "router_scores": "sigmoid",
        "router_correction": True,
        "router_renormalised": True,
    },
    only={
        "router_jitter_noise": (0.0, 0, None),
        "scoring_func": ("sigmoid",),
        "use_routing_bias": (True,),
    },
)
