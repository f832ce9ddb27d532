"""The decoder of decoded matrices, for many tokens one after the other."""

import dataclasses
from typing import Any

from flax import nnx, traverse_util

from jaxmem.models import coded_weights, structure
from jaxmem.models.config import PLAIN
from jaxmem.models.decoder import Decoder, make_stack
from jaxmem.models.weights import by_path


def with_decoded_blocks(decoder: Decoder) -> Decoder:
    """The decoder whose blocks have matrices in the compute type in place of codes.

    Numbers are those that each layer would be decoded to. Adapters stay apart, and so
    do codes outside of blocks.
    """
    copy: Any = nnx.merge(*nnx.split(decoder))
    for stack in structure.stacks(decoder.config).values():
        plain = stack._replace(config=dataclasses.replace(stack.config, **PLAIN))
        shapes = nnx.eval_shape(lambda plain=plain: make_stack(plain, nnx.Rngs(0)))
        weights = _decoded(by_path(getattr(decoder, stack.name)), decoder.config.dtype)
        setattr(copy, stack.name, nnx.merge(nnx.split(shapes)[0], weights))
    return copy


def _decoded(weights: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Weights nested by name, with kernels in the place of codes."""
    arrays, codes = {}, {}
    for path, array in weights.items():
        if coded_weights.is_coded(path):
            kernel, name = coded_weights.split_path(path)
            codes.setdefault(kernel, {})[name] = array
        else:
            arrays[path] = array
    for kernel, each in codes.items():
        arrays[kernel] = coded_weights.decode(each, dtype).swapaxes(-1, -2)
    return traverse_util.unflatten_dict(arrays, sep="/")
