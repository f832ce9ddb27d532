"""HunYuan V1, dense: queries and keys are normalised after the rotation."""

from jaxmem.checkpoints.families import standard
from jaxmem.checkpoints.families.family import Family
from jaxmem.checkpoints.families.ropes import Rope

FAMILY = Family(
    architecture="HunYuanDenseV1ForCausalLM",
    model_type="hunyuan_v1_dense",
    parts=(
        *standard.sizes(eps=1e-5),
        standard.head_dim(),
        standard.ACTIVATION,
        standard.UNTIED,
        standard.ATTENTION_BIAS,
        Rope(stretch="alpha"),
    ),
    names=standard.NAMES
    | {
        "blocks/attention/query_norm": "model.layers.{}.self_attn.query_layernorm",
        "blocks/attention/key_norm": "model.layers.{}.self_attn.key_layernorm",
    },
    switches={"qk_norm": True, "qk_norm_last": True},
    only={"use_qk_norm": (True,), "use_cla": (False,)},
    ignored=(
        "attention_head_dim", "cla_share_factor", "eod_token_id", "im_end_id",
        "im_newline_id", "im_start_id", "mask_init_id", "norm_type", "num_media_embeds",
        "org_vocab_size", "pad_id", "sep_token_id", "text_end_id", "text_start_id",
    ),
)  # fmt: skip
