"""nanochat: norms without weights, also of embeddings, and the rotation reversed."""

from jaxmem.checkpoints.families import standard
from jaxmem.checkpoints.families.family import Family, Key
from jaxmem.checkpoints.families.ropes import Rope

FAMILY = Family(
    architecture="NanoChatForCausalLM",
    model_type="nanochat",
    parts=(
        *standard.SIZES,
        standard.SHARED_WIDTH,
        standard.activation("relu2"),
        standard.UNTIED,
        standard.ATTENTION_BIAS,
        Key("final_logit_softcapping", "softcap", float | None, 15.0),
        Rope(),
    ),
    names=standard.NAMES
    | {
        "blocks/feed_forward/up": "model.layers.{}.mlp.fc1",
        "blocks/feed_forward/down": "model.layers.{}.mlp.fc2",
    },
    switches={
        "norm_scale": False,
        "embed_norm": True,
        "qk_norm": True,
        "qk_norm_last": True,
        "gated": False,
    },
    pairs="swapped",
)
