"""Matrices that are coded in a checkpoint's files, as a decoder with a base holds them.

A decoder holds them as they are stored, but for two cases: outputs that a tensor has
beside others or in another order have scales in float32, because 256 of them no longer
share a scale; and 8 bits have a scale for 128 inputs, of which all of a row are equal.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from jaxmem.checkpoints import names
from jaxmem.checkpoints.adapter_tensors import target_of
from jaxmem.checkpoints.bitsandbytes import CodedTensors, is_nested
from jaxmem.checkpoints.config_reader import CheckpointError
from jaxmem.models import coded_weights
from jaxmem.models.config import BASE_TARGETS

_EVERY = slice(None)


def base_fields(tensors: CodedTensors, naming: names.Naming) -> dict[str, Any]:
    """The fields of `ModelConfig` that say which matrices are coded, and how.

    A layer's matrices of one name stay coded only if the files code all of them.

    Raises:
        CheckpointError: no matrix is coded.
    """
    plain: dict[str, set[str]] = {}  # layers by target
    coded: dict[str, set[str]] = {}
    double = tensors.kind == "nf4"
    for module, layer, name in _matrices(tensors, naming):
        target, is_coded = target_of(module), name in tensors.coded
        (coded if is_coded else plain).setdefault(target, set()).add(layer)
        if is_coded and double:
            stored = naming(f"{module}/kernel")
            double = not (stored.joined or stored.order) and is_nested(tensors, name)
    targets = tuple(
        x for x in BASE_TARGETS if coded.get(x, set()) - plain.get(x, set())
    )
    if not targets:
        raise CheckpointError(
            f"{tensors.directory / 'config.json'}: has a quantization_config, but no "
            "matrix of a block is coded; remove the key"
        )
    return {
        "base": tensors.kind,
        "base_targets": targets,
        "base_plain": tuple(
            f"{layer}.{target}"
            for target in targets
            for layer in sorted(plain.get(target, ()), key=int)
        ),
        "base_double": double or tensors.kind != "nf4",
    }


def _matrices(
    tensors: CodedTensors, naming: names.Naming
) -> Iterator[tuple[str, str, str]]:
    """The path, the layer and the tensor's name of each matrix that may be coded."""
    patterns = {}
    for path, name in naming.names.items():
        module, is_kernel = path.removesuffix("/kernel"), path.endswith("/kernel")
        if target_of(module) in BASE_TARGETS:
            full = re.escape(naming.full(name) + ("" if is_kernel else ".weight"))
            patterns[module] = re.compile(full.replace(r"\{\}", r"(\d+)"))
    for name in tensors:
        for module, pattern in patterns.items():
            if match := pattern.fullmatch(name):
                yield module, match[1] if match.lastindex else "", name


class StoredCodes:
    """The arrays of coded matrices, as files have them.

    Args:
        tensors: of the checkpoint.
        naming: of the decoder's weights in it.
        shapes: shapes of all weights of the decoder by path.
    """

    def __init__(
        self, tensors: CodedTensors, naming: names.Naming, shapes: Mapping[str, Any]
    ):
        self._tensors, self._naming, self._shapes = tensors, naming, shapes

    def reader(self, path: str) -> Callable[[Any], np.ndarray]:
        """A function that returns the part of an array at an index."""
        kernel, name = coded_weights.split_path(path)
        stored, like = self._naming(kernel), self._shapes[path]
        codes = coded_weights.matrix_shape(self._shapes[f"{kernel}_codes"])
        axes = len(stored.leading)
        numbers = np.arange(len(stored.names)).reshape(stored.leading)
        outputs, inputs = codes[axes:]
        total = sum(stored.rows) if stored.joined else outputs
        own_rows = names.own_outputs(stored, kernel, outputs)

        def read_matrix(tensor: str, index: tuple) -> np.ndarray:
            matrix = self._tensors.matrix(tensor, (total, inputs))
            if name not in ("codes", "scales"):
                return matrix.nested_array(name)[index]
            rows, columns = index
            part = _EVERY if own_rows is not None else rows
            if name == "codes":
                array = matrix.codes(part)
            else:
                array = matrix.block_scales(part, like.shape[-1], like.dtype)
            if own_rows is not None:
                array = array[own_rows][rows]
            return array[:, columns]

        def read(index: Any) -> np.ndarray:
            chosen = numbers[index[:axes]]
            tensors = [stored.names[i] for i in chosen.reshape(-1)]
            parts = [read_matrix(tensor, tuple(index[axes:])) for tensor in tensors]
            return np.stack(parts).reshape(*chosen.shape, *np.shape(parts[0]))

        return read
