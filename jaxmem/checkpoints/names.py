"""Names and layouts of the decoder's weights in a checkpoint.

The decoder stacks the weights of all layers and has kernels [in, out]; a checkpoint has
one tensor per layer, and matrices [out, in]. One table serves every architecture: they
differ in which of its names exist, and Gemma in the names of two norms. A multimodal
model adds prefixes to them, and has tensors that text does not need.
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


# Prefixes that replace "model." and precede "lm_head", for a model of text only.
ALONE = ("model.", "")
# The same for the text part of a multimodal model, in two published forms.
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
    """How a checkpoint stores a weight of the decoder."""

    names: tuple[str, ...]  # of its tensors: one per layer, or a single one
    stacked: bool  # whether the decoder's weight has a leading axis of layers
    transposed: bool  # whether the tensors have the last two axes swapped


def module_name(module: str, config: ModelConfig) -> str:
    """The checkpoint's name of a module; "{}" stands for the layer's number.

    Args:
        module: like "blocks/attention/query", or "head".
        config: of the decoder.

    Returns:
        The name.
    """
    if not module.startswith("blocks/"):
        return _WHOLE[module]
    names = _BLOCK | (_POST_NORMS if config.post_norms else {})
    return "model.layers.{}." + names[module.removeprefix("blocks/")]


def stored(path: str, config: ModelConfig, prefixes: tuple[str, str] = ALONE) -> Stored:
    """Return how a checkpoint stores a weight.

    Args:
        path: path of the weight in the decoder, like "blocks/attention/query/kernel".
        config: of the decoder.
        prefixes: `ALONE`, or the result of `text_prefixes`.

    Returns:
        Names of tensors and their layout.
    """
    module, _, kind = path.rpartition("/")
    name = module_name(module, config) + (".bias" if kind == "bias" else ".weight")
    inside = name.startswith(ALONE[0])
    name = prefixes[0] + name.removeprefix(ALONE[0]) if inside else prefixes[1] + name
    stacked = "{}" in name
    layers = range(config.layers) if stacked else range(1)
    return Stored(tuple(name.format(i) for i in layers), stacked, kind == "kernel")


def text_prefixes(tensors: Iterable[str]) -> tuple[str, str]:
    """Return the prefixes that a multimodal model has in place of `ALONE`.

    Args:
        tensors: names of the model's tensors.

    Returns:
        The prefixes of the text part, and of its head.
    """
    present = list(tensors)
    for prefixes in _TEXT_PARTS:
        if any(name.startswith(prefixes[0]) for name in present):
            return prefixes
    return _TEXT_PARTS[0]
