"""StarCoder 2."""

from jaxmem.checkpoints.families import standard
from jaxmem.checkpoints.families.family import Family, Key
from jaxmem.checkpoints.families.ropes import Rope
from jaxmem.checkpoints.families.windows import Windows, every_layer

FAMILY = Family(
    architecture="Starcoder2ForCausalLM",
    model_type="starcoder2",
    parts=(
        *standard.sizes(eps=1e-5, key="norm_epsilon"),
        standard.SHARED_WIDTH,
        standard.activation("gelu_pytorch_tanh"),
        standard.TIED,
        Key("use_bias", "qkv_bias", bool, True, also=("output_bias", "ff_bias")),
        Rope(),
        Windows(every_layer, listed=False),
    ),
    names=standard.NAMES
    | {
        "blocks/feed_forward/up": "model.layers.{}.mlp.c_fc",
        "blocks/feed_forward/down": "model.layers.{}.mlp.c_proj",
    },
    switches={"norm": "layer", "norm_bias": True, "gated": False},
    ignored=("embedding_dropout", "residual_dropout"),
)
