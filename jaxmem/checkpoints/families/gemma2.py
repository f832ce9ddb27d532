"""Gemma 2."""

from jaxmem.checkpoints.families import standard
from jaxmem.checkpoints.families.family import Family, Key
from jaxmem.checkpoints.families.ropes import Rope
from jaxmem.checkpoints.families.windows import Windows, alternating

SHARED = (
    *standard.SIZES,
    standard.head_dim(256),
    Key(
        "hidden_activation", "activation", str, "gelu_pytorch_tanh",
        standard.ACTIVATIONS, null_is_default=True, older="hidden_act",
    ),
    standard.TIED,
    Key(
        "query_pre_attn_scalar", "attention_scale", float, 256.0,
        read_value=lambda scalar: scalar**-0.5,
        write_value=lambda scale: round(scale**-2),  # must be an integer
    ),
)  # fmt: skip
SWITCHES = {"embed_scale": True, "post_norms": True, "norm_offset": True}


def caps(attention: float | None, final: float | None) -> tuple[Key, Key]:
    """Bounds of scores and of logits."""
    kind = float | None
    return (
        Key("attn_logit_softcapping", "attention_softcap", kind, attention),
        Key("final_logit_softcapping", "softcap", kind, final),
    )


FAMILY = Family(
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    parts=(*SHARED, *caps(50.0, 30.0), Rope(), Windows(alternating, 4096)),
    names=standard.NAMES | standard.POST_NORMS,
    switches=SWITCHES,
)
