"""Qwen3.5, dense: the gated delta rule beside gated attention."""

from jaxmem.checkpoints.families import deltas
from jaxmem.checkpoints.families.family import Family, WithImages

NAMES = deltas.names(
    query="in_proj_qkv", key="in_proj_qkv", value="in_proj_qkv",
    gate="in_proj_z", rate="in_proj_b", decay="in_proj_a",
)  # fmt: skip

FAMILY = Family(
    architecture="Qwen3_5ForCausalLM",
    model_type="qwen3_5_text",
    parts=deltas.PARTS,
    names=NAMES,
    switches=deltas.SWITCHES,
    only=deltas.ONLY | {"mlp_only_layers": ([], None)},
    ignored=deltas.IGNORED,
    joined_by={"blocks/attention/query": "head"},
    further=("mtp.",),
)

IMAGE_KEYS = frozenset(
    "image_token_id video_token_id vision_config vision_end_token_id "
    "vision_start_token_id".split()
)
WITH_IMAGES = WithImages(
    architecture="Qwen3_5ForConditionalGeneration",
    model_type="qwen3_5",
    text=("qwen3_5_text",),
    defaults={},
    ignored=IMAGE_KEYS,
    images=("model.visual.",),
)
