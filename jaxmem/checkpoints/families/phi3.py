"""Phi-3, Phi-3.5 and Phi-4, whose projections are stored joined."""

from jaxmem.checkpoints.families import standard
from jaxmem.checkpoints.families.family import Family
from jaxmem.checkpoints.families.ropes import Rope
from jaxmem.checkpoints.families.windows import Windows, every_layer

FAMILY = Family(
    architecture="Phi3ForCausalLM",
    model_type="phi3",
    parts=(
        *standard.sizes(eps=1e-5),
        standard.SHARED_WIDTH,
        standard.ACTIVATION,
        standard.UNTIED,
        Rope(fraction=1.0),
        Windows(every_layer, listed=False),
    ),
    names=standard.NAMES | standard.JOINED_QKV | standard.JOINED_GATE,
    ignored=("embd_pdrop", "original_max_position_embeddings", "resid_pdrop"),
)
