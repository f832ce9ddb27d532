"""Gemma 1 to 3 (of models that read images, the text part), and VaultGemma."""

from jaxmem.checkpoints.families import standard
from jaxmem.checkpoints.families.attention_windows import (
    ALTERNATING,
    Windows,
    up_to_every_sixth,
)
from jaxmem.checkpoints.families.family import NAMES, Family, Key, WithImages
from jaxmem.checkpoints.families.ropes import TwoRopes

# Its first files say "gelu" and mean the approximation that it was trained with.
_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu", "gelu": "gelu"}
_SWITCHES = {"embedding.scaled": True, "norm.offset": True}
_BOTH_NORMS = _SWITCHES | {"norm.post": True}
_TANH = "gelu_pytorch_tanh"

GEMMA = Family(
    architecture="GemmaForCausalLM",
    model_type="gemma",
    parts=standard.parts(
        head=standard.head_dim(256),
        activation=Key("hidden_act", "mlp.activation", str, _TANH, _ACTIVATIONS),
        tied=standard.TIED,
    ),
    switches=_SWITCHES,
    only={"hidden_activation": (None, _TANH)},
)


def _make_parts(caps: tuple[float | None, float | None], windows: Windows, **changes):
    """Parts of Gemma 2 and later; `caps` bound attention scores and final logits."""
    attention, final = caps
    return standard.parts(
        Key(
            "query_pre_attn_scalar", "self_attn.scale", float, 256.0,
            read_value=lambda scalar: scalar**-0.5,
            write_value=lambda scale: round(scale**-2),  # must be an integer
        ),
        Key("attn_logit_softcapping", "self_attn.softcap", float | None, attention),
        Key("final_logit_softcapping", "logits.softcap", float | None, final),
        windows,
        head=standard.head_dim(256),
        activation=Key(
            "hidden_activation", "mlp.activation", str, _TANH, standard.ACTIVATIONS,
            null_is_default=True, older="hidden_act",
        ),
        tied=standard.TIED,
        **changes,
    )  # fmt: skip


GEMMA2 = Family(
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    parts=_make_parts((50.0, 30.0), Windows(ALTERNATING, 4096)),
    names=NAMES | standard.POST_NORMS,
    switches=_BOTH_NORMS,
)

VAULTGEMMA = Family(
    architecture="VaultGemmaForCausalLM",
    model_type="vaultgemma",
    parts=GEMMA2.parts,
    names=NAMES
    | {"blocks/feed_forward_norm": "model.layers.{}.pre_feedforward_layernorm"},
    switches=_SWITCHES,
)

_PERIOD_KEYS = "sliding_window_pattern", "_sliding_window_pattern"
GEMMA3 = Family(
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    parts=_make_parts(
        (None, None),
        Windows(up_to_every_sixth, 4096, ignored=_PERIOD_KEYS),
        rope=TwoRopes(),
    ),
    names=NAMES | standard.POST_NORMS,
    switches=_BOTH_NORMS | {"qk_norm.enabled": True},
)

GEMMA3_WITH_IMAGES = WithImages(
    architecture="Gemma3ForConditionalGeneration",
    model_type="gemma3",
    text=("gemma3_text",),
    defaults={
        "max_position_embeddings": 131_072,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 262_208,
    },
    ignored=frozenset(
        "boi_token_index eoi_token_index image_token_index mm_tokens_per_image "
        "vision_config".split()
    ),
)
