"""GPT-2: learnt positions, matrices stored as [in, out]."""

from jaxmem.checkpoints.families import standard
from jaxmem.checkpoints.families.family import Family, Key

_LAYER = "transformer.h.{}."
_BIASES = ("qkv_bias", "output_bias", "ff_bias", "norm_bias")

FAMILY = Family(
    architecture="GPT2LMHeadModel",
    model_type="gpt2",
    parts=(
        Key("n_layer", "layers"),
        Key("n_embd", "hidden"),
        Key("n_inner", "ff", null_is_default=True, default=lambda r: 4 * r["n_embd"]),
        Key("n_head", "heads"),
        Key("vocab_size", "vocab_size"),
        Key("n_positions", "learned_positions"),
        Key("layer_norm_epsilon", "norm_eps", float, 1e-5),
        standard.activation("gelu_new", "activation_function"),
        standard.TIED,
        standard.Derived(kv_heads="n_head", head_dim=("n_embd", "n_head")),
    ),
    names={
        "embed": "transformer.wte",
        "positions": "transformer.wpe",
        "blocks/attention_norm": _LAYER + "ln_1",
        "blocks/attention/query": _LAYER + "attn.c_attn",
        "blocks/attention/key": _LAYER + "attn.c_attn",
        "blocks/attention/value": _LAYER + "attn.c_attn",
        "blocks/attention/output": _LAYER + "attn.c_proj",
        "blocks/feed_forward_norm": _LAYER + "ln_2",
        "blocks/feed_forward/up": _LAYER + "mlp.c_fc",
        "blocks/feed_forward/down": _LAYER + "mlp.c_proj",
        "norm": "transformer.ln_f",
        "head": "lm_head",
    },
    switches={"norm": "layer", "gated": False, "pattern": ("unrotated",)}
    | dict.fromkeys(_BIASES, True),
    only={"scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,)},
    ignored=tuple(
        "attn_pdrop embd_pdrop n_ctx reorder_and_upcast_attn resid_pdrop "
        "summary_activation summary_first_dropout summary_proj_to_labels summary_type "
        "summary_use_proj task_specific_params".split()
    ),
    positions_key="n_positions",
    prefix="transformer.",
    stored_as_in_out=("blocks/",),
    derived=(".attn.bias", ".attn.masked_bias"),
)
