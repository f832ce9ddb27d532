"""Names and layouts of the decoder's weights in a checkpoint.

The decoder stacks the weights of all layers and has kernels [in, out]; a checkpoint has
one tensor per layer, and matrices [out, in]. A family has the names; a multimodal model
adds prefixes to them, and has tensors that text does not need.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from jaxmem.checkpoints.families.family import WithImages
from jaxmem.models import structure
from jaxmem.models.config import ModelConfig

# Prefixes that replace "model." and precede "lm_head", for a model of text only.
ALONE = ("model.", "")


class Stored(NamedTuple):
    """How a checkpoint stores a weight of the decoder."""

    names: tuple[str, ...]  # of its tensors: one per layer, or a single one
    stacked: bool  # whether the decoder's weight has a leading axis of layers
    transposed: bool  # whether the tensors have the last two axes swapped


def stored(
    path: str,
    names: Mapping[str, str],
    config: ModelConfig,
    prefixes: tuple[str, str] = ALONE,
) -> Stored:
    """Return how a checkpoint stores a weight.

    Args:
        path: path of the weight in the decoder, like "blocks/attention/query/kernel".
        names: of the family's modules.
        config: of the decoder.
        prefixes: `ALONE`, or the result of `text_prefixes`.

    Returns:
        Names of tensors and their layout.
    """
    module, _, kind = path.rpartition("/")
    stack = structure.stack_of(path, config)
    if stack is not None:
        module = "blocks" + module.removeprefix(stack.name)
    name = names[module] + (".bias" if kind == "bias" else ".weight")
    inside = name.startswith(ALONE[0])
    name = prefixes[0] + name.removeprefix(ALONE[0]) if inside else prefixes[1] + name
    layers = (0,) if stack is None else stack.layers
    tensors = tuple(name.format(i) for i in layers)
    return Stored(tensors, stack is not None, kind == "kernel")


def text_prefixes(tensors: Iterable[str], images: WithImages) -> tuple[str, str]:
    """Return the prefixes that a multimodal model has in place of `ALONE`.

    Args:
        tensors: names of the model's tensors.
        images: the multimodal model.

    Returns:
        The prefixes of the text part, and of its head.
    """
    present = list(tensors)
    for prefixes in images.prefixes:
        if any(name.startswith(prefixes[0]) for name in present):
            return prefixes
    return images.prefixes[0]
