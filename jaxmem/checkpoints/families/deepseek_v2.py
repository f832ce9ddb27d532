"""DeepSeek V2 and V2 Lite: latent attention, and softmax routing, maybe in groups."""

from jaxmem.checkpoints.families import latents, mixtures, standard
from jaxmem.checkpoints.families.family import Family, Key

SHARED = (
    *standard.sizes(eps=1e-6),
    *latents.KEYS,
    standard.ACTIVATION,
    standard.UNTIED,
    standard.ATTENTION_BIAS,
)
IGNORED = (
    "aux_loss_alpha", "ep_size", "head_dim", "qk_head_dim", "seq_aux",
    *mixtures.IGNORED,
)  # fmt: skip
NAMES = latents.NAMES | mixtures.NAMES | mixtures.shared("shared_experts")

FAMILY = Family(
    architecture="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    parts=(
        *SHARED,
        *mixtures.sizes("n_routed_experts", older="num_experts"),
        mixtures.LimitedGroups(),
        Key("routed_scaling_factor", "router_scale", float, 1.0),
        mixtures.Shared("n_shared_experts", 2),
        mixtures.AfterTheFirst(0),
    ),
    names=NAMES,
    switches={"mixers": ("latent",)},
    only={
        "norm_topk_prob": (False, None),
        "scoring_func": ("softmax",),
        "moe_layer_freq": (1,),
    },
    ignored=IGNORED,
    pairs="last",
    joined_by={"blocks/attention/key": "head"},
)
