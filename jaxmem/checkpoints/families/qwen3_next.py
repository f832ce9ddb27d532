"""Qwen3-Next: the gated delta rule beside gated attention, and experts."""

from jaxmem.checkpoints.families import deltas, mixtures
from jaxmem.checkpoints.families.family import Family, Key

FAMILY = Family(
    architecture="Qwen3NextForCausalLM",
    model_type="qwen3_next",
    parts=(
        *deltas.PARTS,
        *mixtures.sizes("num_experts", older="num_local_experts"),
        mixtures.Balance(),
        Key("shared_expert_intermediate_size", "shared_ff"),
        Key("norm_topk_prob", "router_renormalised", bool, True),
        mixtures.EveryFew(),
    ),
    names=deltas.names(
        query="in_proj_qkvz", key="in_proj_qkvz", value="in_proj_qkvz",
        gate="in_proj_qkvz", rate="in_proj_ba", decay="in_proj_ba",
    )
    | mixtures.NAMES
    | mixtures.SHARED_WITH_GATE,
    switches=deltas.SWITCHES | {"shared_gate": True},
    joined_by={
        "blocks/attention/query": "head",
        "blocks/attention/delta_query": "key_head",
        "blocks/attention/delta_rate": "key_head",
    },
    further=("mtp.",),
)  # fmt: skip
