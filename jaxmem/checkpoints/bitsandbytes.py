"""Matrices that bitsandbytes coded, as they are in a checkpoint's files.

nf4 divides the n weights of a matrix X [outputs, inputs], in row-major order, into
blocks of 64, and stores these tensors:

    X                    codes of weights 2i (high four bits) and 2i + 1 in byte i
    X.absmax             float32 [n / 64], or with double quantisation uint8 codes
    X.quant_map          float32 [16], the value of each code
    X.nested_absmax      float32, a scale for 256 codes of scales
    X.nested_quant_map   float32 [256], the value of each code of a scale
    X.quant_state.bitsandbytes__nf4   JSON: the shape, sizes of blocks, and an offset

    scale_b = nested_quant_map[absmax_b] · nested_absmax_{b // 256} + nested_offset
    X_i = quant_map[code_i] · scale_{i // 64}

In 8 bits a module has signed codes `weight`, and `SCB`, the largest magnitude of each
output's weights: X = codes · SCB / 127.

References: `functional.QuantState` of bitsandbytes 0.50; Dettmers et al., "QLoRA",
2023, arXiv:2305.14314.
"""

import functools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxmem.base import json_files, messages
from jaxmem.checkpoints.config_reader import CheckpointError
from jaxmem.checkpoints.tensors import Tensors
from jaxmem.models.coded_weights import BLOCKS, DYNAMIC, NESTED, NF4

_BLOCK = BLOCKS["nf4"]  # weights that share a scale
_STATE = ".quant_state.bitsandbytes__"
# Ends of names of tensors beside a matrix, in the place of the end of its own name.
_ENDS = {
    "nf4": (
        "weight.absmax", "weight.quant_map", "weight.nested_absmax",
        "weight.nested_quant_map", f"weight{_STATE}nf4", f"weight{_STATE}fp4",
    ),
    "int8": ("SCB", "weight_format"),
}  # fmt: skip
# Types that two codes in a byte may be stored in, and the bytes of each.
_STORAGE = {"U8": 1, "I8": 1, "BF16": 2, "F16": 2, "F32": 4, "F64": 8}
_ALL = slice(None)
# Values of the two codes in each byte, the high four bits first.
_PAIRS = NF4[np.stack([np.arange(256) >> 4, np.arange(256) & 15], axis=-1)]


class CodedTensors(Tensors):
    """The tensors of a directory whose matrices bitsandbytes may have coded.

    Each coded matrix is one tensor here, which `read` decodes to float32.

    Args:
        directory: of the checkpoint.
        kind: "nf4" or "int8", the coding of matrices that are coded.
    """

    def __init__(self, directory: Path, kind: str):
        super().__init__(directory)
        self.kind = kind
        self._owners = {}  # matrices by the tensors beside them
        for name in self._files:
            for end in (end for end in _ENDS[kind] if name.endswith(end)):
                matrix = name.removesuffix(end) + "weight"
                if matrix in self._files:
                    self._owners[name] = matrix

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._files if name not in self._owners)

    @functools.cached_property
    def coded(self) -> frozenset[str]:
        """Names of the matrices that are coded; others are plain."""
        return frozenset(self._owners.values())

    def refuse_transposed(self, names: Iterable[str]) -> None:
        """Raise for coded matrices among those that files have as [inputs, outputs].

        transformers transposes them before it codes them.
        """
        for name in filter(self.coded.__contains__, names):
            raise _error(
                self, name,
                "is coded, which is not implemented for families that store matrices "
                "as [inputs, outputs]; name the model in 16 bits",
            )  # fmt: skip

    def matrix(self, name: str, shape: tuple[int, ...]) -> "Nf4Matrix | Int8Matrix":
        """A coded matrix, whose tensors are checked."""
        if len(shape) != 2:
            raise _error(self, name, f"is coded, but has {len(shape)} axes, not 2")
        kind = Int8Matrix if self.kind == "int8" else Nf4Matrix
        return kind(self, name, shape)

    def read(
        self, name: str, shape: tuple[int, ...], index: tuple[slice, ...]
    ) -> np.ndarray:
        """Read part of a tensor, decoded if it is coded; as `Tensors.read`."""
        if name not in self.coded:
            return super().read(name, shape, index)
        matrix = self.matrix(name, shape)
        rows, columns = index
        return matrix.decoded(rows)[:, columns]


def is_nested(tensors: Tensors, name: str) -> bool:
    """True if the scales of a matrix in nf4 are codes: double quantisation."""
    return tensors.dtype(f"{name}.absmax") == "U8"


class NestedScales(NamedTuple):
    """Arrays of double quantisation, named as in `coded_weights`."""

    scale_scales: np.ndarray  # float32, one for 256 codes of scales
    scale_offset: np.ndarray  # float32 []


class Nf4Matrix:
    """A matrix [outputs, inputs] in nf4, which is read by rows, its outputs.

    Raises:
        CheckpointError: its tensors do not fit each other, or the matrix; the message
            names the file and the tensor.
    """

    def __init__(self, tensors: Tensors, name: str, shape: tuple[int, ...]):
        self.tensors, self.name, self.shape = tensors, name, shape
        inputs = shape[1]
        if inputs % _BLOCK:
            raise _error(
                tensors, name,
                f"has {inputs:,} inputs, which is not a multiple of {_BLOCK}; jaxmem "
                "does not read blocks that cross rows",
            )  # fmt: skip
        self.groups = inputs // _BLOCK  # of a row
        self.state = _read_state(tensors, name, shape)
        self.is_nested = is_nested(tensors, name)
        self._check_table(".quant_map", NF4)

    def codes(self, rows: slice = _ALL) -> np.ndarray:
        """Codes uint8 [rows, inputs / 2] of some rows, two in a byte."""
        size = _STORAGE.get(self.tensors.dtype(self.name), 1)
        width = self.shape[1] // 2 // size
        stored = self.tensors.read_stored(
            self.name,
            (self.shape[0] * width, 1),
            (_times(rows, width), _ALL),
            tuple(_STORAGE),
        )
        return np.ascontiguousarray(stored).view(np.uint8).reshape(-1, width * size)

    def scales(self, rows: slice = _ALL) -> np.ndarray:
        """Scales float32 [rows, inputs / 64] of some rows; uint8 codes if nested."""
        name, count = f"{self.name}.absmax", self.shape[0] * self.groups
        part = _times(rows, self.groups)
        if self.is_nested:
            stored = self.tensors.read_stored(name, (count,), (part,), ("U8",))
        else:
            stored = _read_scales(self.tensors, name, count, part)
        return stored.reshape(-1, self.groups)

    @functools.cached_property
    def nested(self) -> NestedScales:
        """Constants that decode nested scales."""
        blocks = self.shape[0] * self.groups
        offset: Any = self.state.get("nested_offset")
        limit = float(np.finfo(np.float32).max)
        if type(offset) not in (int, float) or not -limit <= offset <= limit:
            raise _error(
                self.tensors, f"{self.name}{_STATE}nf4",
                f"nested_offset must be a float32, got {messages.short(offset)}",
            )  # fmt: skip
        self._check_table(".nested_quant_map", DYNAMIC)
        name, count = f"{self.name}.nested_absmax", -(-blocks // NESTED)
        factors = _read_scales(self.tensors, name, count)
        return NestedScales(factors, np.asarray(offset, np.float32))

    def nested_array(self, name: str) -> np.ndarray:
        """An array of double quantisation, by its name in `coded_weights`."""
        return getattr(self.nested, name)

    def plain_scales(self, rows: slice = _ALL) -> np.ndarray:
        """Scales float32 [rows, inputs / 64] of some rows, decoded if nested."""
        scales = self.scales(rows)
        if not self.is_nested:
            return scales
        first = (rows.start or 0) * self.groups
        number = (np.arange(scales.size) + first) // NESTED
        factor = self.nested.scale_scales[number].reshape(scales.shape)
        return DYNAMIC[scales] * factor + self.nested.scale_offset

    def block_scales(self, rows: slice, blocks: int, dtype: Any) -> np.ndarray:
        """Scales [rows, blocks] of some rows in a type: uint8 for nested ones."""
        assert blocks == self.groups
        return self.scales(rows) if dtype == np.uint8 else self.plain_scales(rows)

    def decoded(self, rows: slice = _ALL) -> np.ndarray:
        """Weights float32 [rows, inputs] of some rows."""
        values = _PAIRS[self.codes(rows)].reshape(-1, self.groups, _BLOCK)
        scaled = values * self.plain_scales(rows)[..., None]
        return scaled.reshape(-1, self.shape[1])

    def _check_table(self, end: str, values: np.ndarray) -> None:
        """Raise for another table of the values of codes."""
        stored = self.tensors.read_stored(
            self.name + end, (len(values),), (_ALL,), ("F32",)
        )
        if not np.allclose(stored, values, 0, 1e-6):
            name = "nf4" if values is NF4 else "the dynamic type"
            raise _error(
                self.tensors, self.name + end, f"does not have the values of {name}"
            )


class Int8Matrix:
    """A matrix [outputs, inputs] in 8 bits, which is read by rows, its outputs.

    Raises:
        CheckpointError: its tensors do not fit the matrix; the message names the file
            and the tensor.
    """

    def __init__(self, tensors: Tensors, name: str, shape: tuple[int, ...]):
        self.tensors, self.name, self.shape = tensors, name, shape
        self._module = name.removesuffix("weight")
        layout = f"{self._module}weight_format"
        if tensors.has(layout) and tensors.read_stored(layout, (), (), ("U8",)) != 0:
            raise _error(
                tensors, layout, "is not 0, but jaxmem reads matrices by rows only"
            )

    def codes(self, rows: slice = _ALL) -> np.ndarray:
        """Codes int8 [rows, inputs] of some rows."""
        return self.tensors.read_stored(self.name, self.shape, (rows, _ALL), ("I8",))

    def scales(self, rows: slice = _ALL) -> np.ndarray:
        """Scales float32 [rows] of some rows."""
        name = f"{self._module}SCB"
        return _read_scales(self.tensors, name, self.shape[0], rows) / 127

    def nested_array(self, name: str) -> np.ndarray:
        """Raise a KeyError: 8 bits have no double quantisation."""
        raise KeyError(name)

    def block_scales(self, rows: slice, blocks: int, dtype: Any) -> np.ndarray:
        """Scales [rows, blocks] of some rows in a type; all of a row are equal."""
        return np.repeat(self.scales(rows)[:, None], blocks, axis=1).astype(dtype)

    def decoded(self, rows: slice = _ALL) -> np.ndarray:
        """Weights float32 [rows, inputs] of some rows."""
        return self.codes(rows) * self.scales(rows)[:, None]


def _times(rows: slice, width: int) -> slice:
    """The slice of flat elements of rows of a width."""
    start = None if rows.start is None else rows.start * width
    return slice(start, None if rows.stop is None else rows.stop * width)


def _read_scales(
    tensors: Tensors, name: str, count: int, part: slice = _ALL
) -> np.ndarray:
    """Part of a tensor of `count` scales in float32, each finite and not negative."""
    scales = tensors.read_stored(name, (count,), (part,), ("F32",))
    damaged = np.flatnonzero(~((scales >= 0) & np.isfinite(scales)))
    if damaged.size:
        number, value = (part.start or 0) + damaged[0], scales[damaged[0]]
        raise _error(
            tensors, name,
            f"entry {number:,} is {value}; a scale is finite and at least 0: the file "
            "is damaged, download it again",
        )  # fmt: skip
    return scales


def _read_state(tensors: Tensors, name: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """The sizes and types in JSON beside a matrix in nf4, checked."""
    tensor = f"{name}{_STATE}nf4"
    if tensors.has(f"{name}{_STATE}fp4"):
        raise _error(tensors, name, "is coded in fp4, which is not read")
    length = tensors.rows(tensor) or 0
    content = tensors.read_stored(tensor, (length,), (_ALL,), ("U8",)).tobytes()
    try:
        state = json_files.parse(content.decode("utf-8"))
    except (json_files.JsonError, UnicodeDecodeError) as error:
        raise _error(tensors, tensor, messages.cut(str(error))) from error
    if not isinstance(state, dict):
        raise _error(tensors, tensor, f"is not an object but {messages.short(state)}")
    expected = {"quant_type": "nf4", "blocksize": _BLOCK, "shape": [*shape]}
    if is_nested(tensors, name):
        expected["nested_blocksize"] = NESTED
    for key, value in expected.items():
        if state.get(key) != value:
            got = messages.short(state.get(key))
            raise _error(tensors, tensor, f"{key} must be {value!r}, got {got}")
    return state


def _error(tensors: Tensors, name: str, problem: str) -> CheckpointError:
    return CheckpointError(f"{tensors.file_of(name)}: tensor {name}: {problem}")
