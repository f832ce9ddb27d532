"""Command: attention and feed-forward in parallel, layer norms."""

from jaxmem.checkpoints.families import standard
from jaxmem.checkpoints.families.attention_windows import Windows, by_period
from jaxmem.checkpoints.families.family import NAMES, Family, Key

COHERE = Family(
    architecture="CohereForCausalLM",
    model_type="cohere",
    parts=standard.parts(
        standard.ATTENTION_BIAS,
        Key("logit_scale", "logits.multiplier", float, 0.0625),
        eps=1e-5,
        eps_key="layer_norm_eps",
        head=standard.SHARED_WIDTH,
        tied=standard.TIED,
    ),
    names=standard.but(NAMES, "blocks/feed_forward_norm"),
    switches={"norm.kind": "layer", "residual.parallel": "shared"},
    only={"use_qk_norm": (False, None)},
    pairs="neighbours",
)

# R7B and A: windows in three of four layers; the fourth is not rotated.
COHERE2 = Family(
    architecture="Cohere2ForCausalLM",
    model_type="cohere2",
    parts=(*COHERE.parts, Windows(by_period(4), 4096, full="unrotated")),
    names=COHERE.names,
    switches=COHERE.switches,
    ignored=("head_dim", "sliding_window_pattern"),
    pairs="neighbours",
)
