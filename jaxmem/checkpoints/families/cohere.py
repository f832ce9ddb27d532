"""Command R: attention and feed-forward in parallel, layer norms."""

from jaxmem.checkpoints.families import standard
from jaxmem.checkpoints.families.family import Family, Key
from jaxmem.checkpoints.families.ropes import Rope

PARTS = (
    *standard.sizes(eps=1e-5, key="layer_norm_eps"),
    standard.SHARED_WIDTH,
    standard.ACTIVATION,
    standard.TIED,
    standard.ATTENTION_BIAS,
    Key("logit_scale", "logit_multiplier", float, 0.0625),
    Rope(),
)
NAMES = {
    module: name
    for module, name in standard.NAMES.items()
    if module != "blocks/feed_forward_norm"
}
SWITCHES = {"norm": "layer", "parallel": "shared"}

FAMILY = Family(
    architecture="CohereForCausalLM",
    model_type="cohere",
    parts=PARTS,
    names=NAMES,
    switches=SWITCHES,
    only={"use_qk_norm": (False, None)},
    pairs="neighbours",
)
