"""Names and layouts of the decoder's weights in a checkpoint.

The decoder stacks the weights of all layers and has kernels [in, out]; a checkpoint has
one tensor per layer, and matrices [out, in]. A family has the names; a multimodal model
adds prefixes to them, and has tensors that text does not need.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.checkpoints.families.family import WithImages
from jaxmem.checkpoints.reader import CheckpointError
from jaxmem.checkpoints.tensors import Tensors, whole
from jaxmem.core import messages
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


def refuse_others(
    tensors: Tensors,
    wanted: Mapping[str, Any],
    model: ModelConfig,
    images: tuple[str, ...],
    naming: Callable[[str], Stored],
) -> None:
    """Raise for a tensor that is neither of the model nor of its part for images."""
    known = {name for path in wanted for name in naming(path).names}
    if model.tied:  # the head may be stored too, as a copy of the embedding
        known.update(naming("head/kernel").names)
    for name in tensors:
        derived = name.endswith("rotary_emb.inv_freq")  # computed from config.json
        if name in known or derived or name.startswith(images):
            continue
        raise CheckpointError(
            f"{tensors.file_of(name)}: tensor {messages.name(name)} is none of the "
            "model that config.json describes"
        )


def say_what_is_left_out(tensors: Tensors, images: tuple[str, ...]) -> None:
    """Warn that tensors of images are not read; Python shows such a warning once."""
    left = sum(name.startswith(images) for name in tensors)
    warnings.warn(
        f"{tensors.directory}: only the text part of a model that reads images is "
        f"read; its {left} tensors of images are left out",
        stacklevel=1,
    )


def reader(
    tensors: Tensors, stored: Stored, like: jax.ShapeDtypeStruct
) -> Callable[[Any], np.ndarray]:
    """A function that reads the part of a weight at an index, from its tensors."""
    shape = like.shape[1:] if stored.stacked else like.shape

    def one(name: str, index: tuple[slice, ...]) -> np.ndarray:
        if not stored.transposed:
            return tensors.read(name, shape, index).astype(like.dtype)
        return tensors.read(name, shape[::-1], index[::-1]).T.astype(like.dtype)

    def read(index: Any) -> np.ndarray:
        if not stored.stacked:
            return one(stored.names[0], index)
        return np.stack([one(name, index[1:]) for name in stored.names[index[0]]])

    return read


def stored_tensors(
    weights: Mapping[str, jax.Array], naming: Callable[[str], Stored], dtype: str
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield names and arrays in the checkpoint's layout, one at a time."""
    for path, weight in weights.items():
        stored = naming(path)
        for layer, name in enumerate(stored.names):
            array = whole(weight, layer if stored.stacked else None)
            array = array.T if stored.transposed else array
            yield name, array.astype(jnp.dtype(dtype))
