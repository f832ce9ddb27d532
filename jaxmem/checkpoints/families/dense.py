"""Llama 2 and 3, and dense families that differ from them by some settings."""

from jaxmem.checkpoints.families import standard
from jaxmem.checkpoints.families.attention_windows import (
    EVERY_LAYER,
    Unrotated,
    Windows,
)
from jaxmem.checkpoints.families.family import NAMES, Family, Key
from jaxmem.checkpoints.families.ropes import RopePart

_LAYER = "model.layers.{}."

LLAMA = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    parts=standard.parts(standard.ATTENTION_BIAS, standard.FF_BIAS),
)

# An activation with weights of its own.
APERTUS = Family(
    architecture="ApertusForCausalLM",
    model_type="apertus",
    parts=standard.parts(
        standard.ATTENTION_BIAS,
        eps=1e-5,
        activation=standard.activation("xielu"),
        rope=RopePart(12_000_000.0),
    ),
    names=NAMES
    | {
        "blocks/attention_norm": _LAYER + "attention_layernorm",
        "blocks/feed_forward_norm": _LAYER + "feedforward_layernorm",
        "blocks/feed_forward/positive": _LAYER + "mlp.act_fn.alpha_p",
        "blocks/feed_forward/negative": _LAYER + "mlp.act_fn.alpha_n",
    },
    switches={"mlp.gated": False, "qk_norm.enabled": True},
    only={"mlp_bias": (False, None), "post_norm": (False, None), "qk_norm": (True,)},
    ignored=("hidden_dropout",),
    constants={
        _LAYER + "mlp.act_fn.beta": 0.5,
        _LAYER + "mlp.act_fn.eps": -1e-6,
    },
)

ARCEE = Family(
    architecture="ArceeForCausalLM",
    model_type="arcee",
    parts=standard.parts(
        standard.ATTENTION_BIAS,
        standard.FF_BIAS,
        eps=1e-5,
        activation=standard.activation("relu2"),
    ),
    switches={"mlp.gated": False},
)

ERNIE4_5 = Family(
    architecture="Ernie4_5ForCausalLM",
    model_type="ernie4_5",
    parts=standard.parts(
        Key(
            "use_bias", "self_attn.qkv_bias", bool, False, null_is_default=True,
            also=("self_attn.output_bias", "mlp.bias"),
        ),
        eps=1e-5,
        head=standard.head_dim(128),
        tied=standard.TIED,
        rope=RopePart(500_000.0),
    ),
    pairs="neighbours",
)  # fmt: skip

# Four multipliers.
GRANITE = Family(
    architecture="GraniteForCausalLM",
    model_type="granite",
    parts=standard.parts(
        standard.ATTENTION_BIAS,
        standard.FF_BIAS,
        Key("embedding_multiplier", "embedding.multiplier", float, 1.0),
        Key("residual_multiplier", "residual.multiplier", float, 1.0),
        Key("attention_multiplier", "self_attn.scale", float, 1.0),
        Key(
            "logits_scaling", "logits.multiplier", float, 1.0,
            read_value=lambda divisor: 1 / divisor,
            write_value=lambda multiplier: 1 / multiplier,
        ),
        head=standard.SHARED_WIDTH,
    ),
)  # fmt: skip

HELIUM = Family(
    architecture="HeliumForCausalLM",
    model_type="helium",
    parts=standard.parts(
        standard.qkv_bias(False),
        standard.FF_BIAS,
        eps=1e-8,
        head=standard.head_dim(128),
        rope=RopePart(100_000.0),
    ),
    pairs="neighbours",
)

# Queries and keys are normalised after the rotation.
HUNYUAN = Family(
    architecture="HunYuanDenseV1ForCausalLM",
    model_type="hunyuan_v1_dense",
    parts=standard.parts(
        standard.ATTENTION_BIAS, eps=1e-5, rope=RopePart(stretch="alpha")
    ),
    names=NAMES
    | {
        "blocks/attention/query_norm": _LAYER + "self_attn.query_layernorm",
        "blocks/attention/key_norm": _LAYER + "self_attn.key_layernorm",
    },
    switches={"qk_norm.enabled": True, "qk_norm.after_rope": True},
    only={"use_qk_norm": (True,), "use_cla": (False,)},
    ignored=(
        "attention_head_dim", "cla_share_factor", "eod_token_id", "im_end_id",
        "im_newline_id", "im_start_id", "mask_init_id", "norm_type", "num_media_embeds",
        "org_vocab_size", "pad_id", "sep_token_id", "text_end_id", "text_start_id",
    ),
)  # fmt: skip

# Norms without weights, also of embeddings, and the rotation reversed.
NANOCHAT = Family(
    architecture="NanoChatForCausalLM",
    model_type="nanochat",
    parts=standard.parts(
        standard.ATTENTION_BIAS,
        Key("final_logit_softcapping", "logits.softcap", float | None, 15.0),
        head=standard.SHARED_WIDTH,
        activation=standard.activation("relu2"),
    ),
    names=NAMES
    | {
        "blocks/feed_forward/up": _LAYER + "mlp.fc1",
        "blocks/feed_forward/down": _LAYER + "mlp.fc2",
    },
    switches={
        "norm.scale": False,
        "embedding.norm": True,
        "qk_norm.enabled": True,
        "qk_norm.after_rope": True,
        "mlp.gated": False,
    },
    pairs="swapped",
)

NEMOTRON = Family(
    architecture="NemotronForCausalLM",
    model_type="nemotron",
    parts=standard.parts(
        standard.ATTENTION_BIAS,
        standard.FF_BIAS,
        eps=1e-5,
        eps_key="norm_eps",
        activation=standard.activation("relu2"),
        rope=RopePart(fraction=0.5),
    ),
    switches=standard.LAYER_NORM | {"norm.offset": True, "mlp.gated": False},
)

SEED_OSS = Family(
    architecture="SeedOssForCausalLM",
    model_type="seed_oss",
    parts=standard.parts(
        standard.QKV_BIAS,
        Key("attention_out_bias", "self_attn.output_bias", bool, False),
        standard.FF_BIAS,
        head=standard.head_dim(128),
    ),
    ignored=("residual_dropout",),
)

# Some layers are not rotated.
SMOLLM3 = Family(
    architecture="SmolLM3ForCausalLM",
    model_type="smollm3",
    parts=standard.parts(
        standard.ATTENTION_BIAS,
        standard.FF_BIAS,
        Unrotated(4),
        tied=standard.TIED,
        rope=RopePart(2_000_000.0),
    ),
    only={"use_sliding_window": (False, None), "sliding_window": (None,)},
    ignored=("layer_types", "max_window_layers"),
)

STABLELM = Family(
    architecture="StableLmForCausalLM",
    model_type="stablelm",
    parts=standard.parts(
        Key("use_qkv_bias", "self_attn.qkv_bias", bool, False),
        standard.parallel("shared", False),
        eps=1e-5,
        eps_key="layer_norm_eps",
        head=standard.SHARED_WIDTH,
        rope=RopePart(fraction=0.25),
    ),
    switches=standard.LAYER_NORM,
    only={"qk_layernorm": (False, None)},
    ignored=("hidden_dropout",),
)

STARCODER2 = Family(
    architecture="Starcoder2ForCausalLM",
    model_type="starcoder2",
    parts=standard.parts(
        Key(
            "use_bias",
            "self_attn.qkv_bias",
            bool,
            True,
            also=("self_attn.output_bias", "mlp.bias"),
        ),
        Windows(EVERY_LAYER, listed=False),
        eps=1e-5,
        eps_key="norm_epsilon",
        head=standard.SHARED_WIDTH,
        activation=standard.activation("gelu_pytorch_tanh"),
        tied=standard.TIED,
    ),
    names=NAMES
    | {
        "blocks/feed_forward/up": _LAYER + "mlp.c_fc",
        "blocks/feed_forward/down": _LAYER + "mlp.c_proj",
    },
    switches=standard.LAYER_NORM | {"mlp.gated": False},
    ignored=("embedding_dropout", "residual_dropout"),
)
