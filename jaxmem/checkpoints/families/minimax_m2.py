"""MiniMax-M2: norms of queries and keys as a whole, and sigmoid routing."""

from jaxmem.checkpoints.families import mixtures, standard
from jaxmem.checkpoints.families.family import NAMES, Family
from jaxmem.checkpoints.families.ropes import RopePart

MINIMAX_M2 = Family(
    architecture="MiniMaxM2ForCausalLM",
    model_type="minimax_m2",
    parts=standard.parts(
        *mixtures.EVERYWHERE,
        head=standard.head_dim(128),
        rope=RopePart(theta=5_000_000.0, fraction=1.0),
    ),
    names=NAMES
    | mixtures.BLOCK_SPARSE
    | {
        "blocks/feed_forward/correction": (
            "model.layers.{}.block_sparse_moe.e_score_correction_bias"
        )
    },
    switches={
        "feed_forwards": ("experts",),
        "qk_norm.enabled": True,
        "qk_norm.axis": "width",
        "router.scores": "sigmoid",
        "router.correction": True,
        "router.renormalised": True,
    },
    only={
        "router_jitter_noise": (0.0, 0, None),
        "scoring_func": ("sigmoid",),
        "use_routing_bias": (True,),
    },
)
