"""Phi 1 to 4: parallel sublayers, then joined projections, then experts."""

from jaxmem.checkpoints.families import mixtures, standard
from jaxmem.checkpoints.families.attention_windows import EVERY_LAYER, Windows
from jaxmem.checkpoints.families.family import NAMES, Family, Key
from jaxmem.checkpoints.families.ropes import RopePart

_LAYER = "model.layers.{}."

# Both sublayers read one norm; every matrix has a bias.
PHI = Family(
    architecture="PhiForCausalLM",
    model_type="phi",
    parts=standard.parts(
        eps=1e-5,
        eps_key="layer_norm_eps",
        head=standard.SHARED_WIDTH,
        activation=standard.activation("gelu_new"),
        rope=RopePart(fraction=0.5),
    ),
    names=NAMES
    | {
        "blocks/attention/output": _LAYER + "self_attn.dense",
        "blocks/feed_forward/up": _LAYER + "mlp.fc1",
        "blocks/feed_forward/down": _LAYER + "mlp.fc2",
        "norm": "model.final_layernorm",
    },
    switches=standard.LAYER_NORM
    | {"residual.parallel": "shared", "mlp.gated": False}
    | dict.fromkeys(
        ("self_attn.qkv_bias", "self_attn.output_bias", "mlp.bias", "logits.bias"), True
    ),
    only={"qk_layernorm": (False, None)},
    ignored=("embd_pdrop", "resid_pdrop"),
)

PHI3 = Family(
    architecture="Phi3ForCausalLM",
    model_type="phi3",
    parts=standard.parts(
        Windows(EVERY_LAYER, listed=False),
        eps=1e-5,
        head=standard.SHARED_WIDTH,
        rope=RopePart(fraction=1.0),
    ),
    names=NAMES | standard.JOINED_QKV | standard.JOINED_GATE,
    ignored=("embd_pdrop", "original_max_position_embeddings", "resid_pdrop"),
)

# Two experts are chosen one by one.
PHIMOE = Family(
    architecture="PhimoeForCausalLM",
    model_type="phimoe",
    parts=standard.parts(
        standard.ATTENTION_BIAS,
        Key("lm_head_bias", "logits.bias", bool, False),
        *mixtures.EVERYWHERE,
        Key("router_jitter_noise", "router.nearness", float, 0.01),
        Windows(EVERY_LAYER, listed=False),
        eps=1e-5,
        rope=RopePart(theta=1_000_000.0),
    ),
    names=NAMES | mixtures.BLOCK_SPARSE,
    switches=standard.LAYER_NORM
    | {"feed_forwards": ("experts",), "router.scores": "near"},
    only={"input_jitter_noise": (0.0, 0, None)},
    ignored=("hidden_dropout",),
)
