"""VaultGemma: Gemma 2 without norms of what sublayers add."""

from jaxmem.checkpoints.families import gemma2, standard
from jaxmem.checkpoints.families.family import Family
from jaxmem.checkpoints.families.ropes import Rope
from jaxmem.checkpoints.families.windows import Windows, alternating

FAMILY = Family(
    architecture="VaultGemmaForCausalLM",
    model_type="vaultgemma",
    parts=(
        *gemma2.SHARED,
        *gemma2.caps(50.0, 30.0),
        Rope(),
        Windows(alternating, 4096),
    ),
    names=standard.NAMES
    | {"blocks/feed_forward_norm": "model.layers.{}.pre_feedforward_layernorm"},
    switches={"embed_scale": True, "norm_offset": True},
)
