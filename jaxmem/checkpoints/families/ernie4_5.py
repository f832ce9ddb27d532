"""ERNIE 4.5, dense."""

from jaxmem.checkpoints.families import standard
from jaxmem.checkpoints.families.family import Family, Key
from jaxmem.checkpoints.families.ropes import Rope

FAMILY = Family(
    architecture="Ernie4_5ForCausalLM",
    model_type="ernie4_5",
    parts=(
        *standard.sizes(eps=1e-5),
        standard.head_dim(128),
        standard.ACTIVATION,
        standard.TIED,
        Key(
            "use_bias", "qkv_bias", bool, False, null_is_default=True,
            also=("output_bias", "ff_bias"),
        ),
        Rope(500_000.0),
    ),
    names=standard.NAMES,
    pairs="neighbours",
)  # fmt: skip
