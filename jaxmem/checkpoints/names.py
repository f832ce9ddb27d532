"""What the decoder's weights are called in a checkpoint, and how they lie there.

The decoder stacks the layers' weights and multiplies by kernels [in, out]; a checkpoint
has a tensor a layer, and matrices [out, in]. One table serves every architecture: they
differ in which of its names there are, and Gemma in what two norms are called. A model
that reads images has prefixes before them, and tensors that no text needs.
"""

from collections.abc import Iterable
from typing import NamedTuple

from jaxmem.models.config import ModelConfig

_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention/query": "self_attn.q_proj",
    "attention/key": "self_attn.k_proj",
    "attention/value": "self_attn.v_proj",
    "attention/output": "self_attn.o_proj",
    "attention/query_norm": "self_attn.q_norm",
    "attention/key_norm": "self_attn.k_norm",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward/gate": "mlp.gate_proj",
    "feed_forward/up": "mlp.up_proj",
    "feed_forward/down": "mlp.down_proj",
}
_POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "feed_forward_norm": "pre_feedforward_layernorm",
    "post_feed_forward_norm": "post_feedforward_layernorm",
}
_WHOLE = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}


# What stands in place of "model." and before "lm_head".
ALONE = ("model.", "")
# The same of a text part: as it is published, and as the modules are called.
_TEXT_PARTS = (
    ("language_model.model.", "language_model."),
    ("model.language_model.", ""),
)
OF_IMAGES = (
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
)


class Stored(NamedTuple):
    """How a weight of the decoder is stored."""

    names: tuple[str, ...]  # of its tensors, one a layer, or just one
    stacked: bool  # whether the weight has an axis of layers, before the others
    transposed: bool  # whether its last two axes are the other way round there


def module_name(module: str, config: ModelConfig) -> str:
    """The checkpoint's name of a module of a block; "{}" stands for its layer.

    Args:
      module: like "blocks/attention/query", or "head".
      config: of the decoder.
    """
    if not module.startswith("blocks/"):
        return _WHOLE[module]
    names = _BLOCK | (_POST_NORMS if config.post_norms else {})
    return "model.layers.{}." + names[module.removeprefix("blocks/")]


def stored(path: str, config: ModelConfig, prefixes: tuple[str, str] = ALONE) -> Stored:
    """Find a weight.

    Args:
      path: of the weight in the decoder, like "blocks/attention/query/kernel".
      config: of the decoder.
      prefixes: `ALONE`, or `text_prefixes`.
    """
    module, _, kind = path.rpartition("/")
    name = module_name(module, config) + (".bias" if kind == "bias" else ".weight")
    inside = name.startswith(ALONE[0])
    name = prefixes[0] + name.removeprefix(ALONE[0]) if inside else prefixes[1] + name
    stacked = "{}" in name
    layers = range(config.layers) if stacked else range(1)
    return Stored(tuple(name.format(i) for i in layers), stacked, kind == "kernel")


def text_prefixes(tensors: Iterable[str]) -> tuple[str, str]:
    """Find what a model that reads images has in place of `ALONE`.

    Args:
      tensors: the model's names.
    """
    present = list(tensors)
    for prefixes in _TEXT_PARTS:
        if any(name.startswith(prefixes[0]) for name in present):
            return prefixes
    return _TEXT_PARTS[0]
