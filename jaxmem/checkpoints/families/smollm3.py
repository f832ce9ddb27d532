"""SmolLM3: some layers are not rotated."""

from jaxmem.checkpoints.families import standard
from jaxmem.checkpoints.families.family import Family
from jaxmem.checkpoints.families.ropes import Rope
from jaxmem.checkpoints.families.windows import Unrotated

FAMILY = Family(
    architecture="SmolLM3ForCausalLM",
    model_type="smollm3",
    parts=(
        *standard.SIZES,
        standard.head_dim(),
        standard.ACTIVATION,
        standard.TIED,
        standard.ATTENTION_BIAS,
        standard.FF_BIAS,
        Rope(2_000_000.0),
        Unrotated(4),
    ),
    names=standard.NAMES,
    only={"use_sliding_window": (False, None), "sliding_window": (None,)},
    ignored=("layer_types", "max_window_layers"),
)
