"""Matrices of a checkpoint that are encoded as they are read.

At most one weight (all layers of it) is on the host, as codes, and the matrices of one
layer are on a device.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.checkpoints import names
from jaxmem.checkpoints.tensors import Tensors
from jaxmem.models import coded_weights

_encode = jax.jit(coded_weights.encode, static_argnames=("base", "double", "block"))


class EncodedKernels:
    """The arrays of coded matrices, from a checkpoint whose matrices are plain.

    Args:
        tensors: of the checkpoint.
        naming: of the decoder's weights in it.
        shapes: shapes of all weights of the decoder by path.
        dtype: type that matrices are read in.
    """

    def __init__(
        self, tensors: Tensors, naming: names.Naming, shapes: Mapping[str, Any],
        dtype: str,
    ):  # fmt: skip
        self._tensors, self._naming = tensors, naming
        self._shapes, self._dtype = shapes, dtype
        # The arrays of a kernel are read one after the other.
        self._arrays = functools.lru_cache(maxsize=1)(self._encode_all)

    def reader(self, path: str) -> Callable[[Any], np.ndarray]:
        """A function that returns the part of an array at an index."""
        kernel, name = coded_weights.split_path(path)
        return lambda index: self._arrays(kernel)[name][index]

    def _encode_all(self, path: str) -> dict[str, np.ndarray]:
        """The arrays of all layers of a kernel, or of an embedding table."""
        codes = self._shapes[f"{path}_codes"]
        *leading, outputs, inputs = coded_weights.matrix_shape(codes)
        base = coded_weights.base_of(codes)
        double = base != "nf4" or f"{path}_scale_scales" in self._shapes
        block = inputs // self._shapes[f"{path}_scales"].shape[-1]
        encode = functools.partial(_encode, base=base, double=double, block=block)
        is_table = path.endswith("embedding")
        axes = (outputs, inputs) if is_table else (inputs, outputs)
        like = jax.ShapeDtypeStruct((*leading, *axes), jnp.dtype(self._dtype))
        read = names.reader(self._tensors, self._naming(path), path, like)
        if not leading:
            matrix = read(_whole(2))
            return jax.device_get(encode(matrix if is_table else matrix.swapaxes(0, 1)))
        layers = []
        for layer in range(leading[0]):
            index = slice(layer, layer + 1), *_whole(len(like.shape) - 1)
            matrix = jnp.asarray(read(index)[0].swapaxes(-1, -2))
            layers.append(jax.device_get(encode(matrix)))
        return {name: np.stack([each[name] for each in layers]) for name in layers[0]}


def _whole(axes: int) -> tuple[slice, ...]:
    return (slice(None),) * axes
