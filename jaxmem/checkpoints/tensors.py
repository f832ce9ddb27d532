"""Reads parts of tensors from a directory of safetensors files, and writes them.

Only the safetensors format is read, which cannot execute code. An error about a
truncated or damaged file names the file and the first tensor that is lost.

An index may only name files inside its own directory: no absolute path, no "..". The
names in the index are checked. Symbolic links in the directory are followed, because
whoever made the directory made them (the Hub's cache is links to its blobs).
"""

import functools
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxmem.base import json_files, messages
from jaxmem.checkpoints.config_reader import CheckpointError, Reader, read_object

_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_FLOATS = ("F64", "F32", "BF16", "F16")
_MAX_HEADER = 100 * 10**6  # bytes; the format's own limit


class Tensors:
    """The tensors of one directory, in one file or in the shards of an index.

    Args:
        directory: with the file or its index, `model.safetensors.index.json`. Where it
            has both, and the index does not name the file, only the file is read.
        single: name of the file.

    Raises:
        CheckpointError: a file is missing or damaged.
    """

    def __init__(self, directory: Path, single: str = _ONE):
        self.directory = directory
        self._open: dict[Path, Any] = {}
        whole_file, index = directory / single, directory / f"{single}.index.json"
        if index.exists() and not _is_stale(index, whole_file):
            self._files = _read_index(index)
        elif whole_file.exists():
            self._files = dict.fromkeys(self._open_file(whole_file).keys(), whole_file)
        else:
            message = f"{whole_file} and {index.name} are both missing"
            if pickled := sorted(path.name for path in directory.glob("*.bin")):
                message += (
                    f"; jaxmem does not read {pickled[0]}, because unpickling runs "
                    "code; load it with the library that wrote it, and save it again "
                    "by save_pretrained"
                )
            raise CheckpointError(message)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._files)

    def has(self, name: str) -> bool:
        """True if a file has a tensor of this name."""
        return name in self._files

    def file_of(self, name: str) -> Path:
        """The file that has a tensor, or the last file if none has it."""
        last = next(reversed(self._files.values()), self.directory / _ONE)
        return self._files.get(name, last)

    def rows(self, name: str) -> int | None:
        """The first axis of a tensor; None where there is none."""
        if name not in self._files:
            return None
        shape = self._open_file(self._files[name]).get_slice(name).get_shape()
        return shape[0] if shape else None

    def dtype(self, name: str) -> str:
        """The type of a tensor, as safetensors names it, such as "BF16".

        Raises:
            CheckpointError: there is no such tensor.
        """
        return self._slice(name).get_dtype()

    def read(
        self, name: str, shape: tuple[int, ...], index: tuple[slice, ...]
    ) -> np.ndarray:
        """Read part of a tensor, without the rest of it, which must have a shape.

        Raises:
            CheckpointError: there is no such tensor, or it has another shape or dtype.
        """
        return self.read_stored(name, shape, index, _FLOATS)

    def read_stored(
        self,
        name: str,
        shape: tuple[int, ...],
        index: tuple[slice, ...],
        dtypes: Sequence[str],
    ) -> np.ndarray:
        """Read part of a tensor as it is in its file, with one of the dtypes."""
        tensor, path = self._slice(name), self.file_of(name)
        if tensor.get_dtype() not in dtypes:
            raise CheckpointError(
                f"{path}: tensor {name} is of type {tensor.get_dtype()}; only "
                f"{', '.join(dtypes)} are read"
            )
        if tuple(tensor.get_shape()) != shape:
            raise CheckpointError(
                f"{path}: tensor {name} must have shape {shape}, by the config, got "
                f"{messages.short(tuple(tensor.get_shape()))}"
            )
        return tensor[index]

    def _slice(self, name: str) -> Any:
        """A tensor in its file, of which nothing is read yet."""
        if name not in self._files:
            raise CheckpointError(
                f"{self.file_of(name)}: tensor {name} is missing from this file "
                f"({len(self._files)} tensors are there) and from all other files of "
                f"{self.directory}"
            )
        path = self._files[name]
        try:
            return self._open_file(path).get_slice(name)
        except SafetensorError as error:
            reason = messages.cut(str(error))
            raise CheckpointError(f"{path}: tensor {name}: {reason}") from error

    def _open_file(self, path: Path) -> Any:
        if path not in self._open:
            try:
                self._open[path] = safe_open(path, framework="np")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"{path}: {_describe_damage(path, error)}"
                ) from error
        return self._open[path]


def _is_stale(index: Path, whole_file: Path) -> bool:
    """True if a file that is not in an index has all tensors; a warning says so."""
    if not whole_file.exists():
        return False
    weight_map = read_object(index).get("weight_map")
    if isinstance(weight_map, dict) and whole_file.name in weight_map.values():
        return False
    warnings.warn(
        f"{whole_file}: jaxmem reads this file only, as transformers does; "
        f"{index.name} beside it names other files; remove the files that are out of "
        "date",
        stacklevel=2,
    )
    return True


def _read_index(path: Path) -> dict[str, Path]:
    """The file of each tensor, checked to exist inside the index's directory."""
    reader = Reader(path, read_object(path))
    weight_map = reader.raw.get("weight_map")
    if not (isinstance(weight_map, dict) and weight_map):
        raise reader.error(
            "not an index of safetensors: weight_map must name each tensor's file, got "
            f"{messages.short(weight_map)}"
        )
    files: dict[Any, Path] = {}
    for tensor, file in weight_map.items():
        if not isinstance(file, str):
            raise reader.error(
                f"weight_map: tensor {messages.name(tensor)} must have the name of a "
                f"file, got {messages.short(file)}"
            )
        if file not in files:
            files[file] = _shard_path(path, tensor, file)
    return {tensor: files[file] for tensor, file in weight_map.items()}


def _shard_path(index: Path, tensor: str, file: str) -> Path:
    """The path of a file that an index names, in the index's directory."""
    named = Path(file)
    if named.is_absolute() or named.drive or ".." in named.parts:
        raise CheckpointError(
            f"{index}: weight_map: tensor {messages.name(tensor)} is in "
            f"{messages.short(file)}, which is outside {index.parent}; an index may "
            "name only files of its own directory"
        )
    path = index.parent / named
    if not os.path.isfile(path):  # this is also false for an impossible file name
        raise CheckpointError(
            f"{index.parent / messages.name(file)} is missing; {index.name} names it "
            f"as the file of {messages.name(tensor)}"
        )
    return path


def _describe_damage(path: Path, error: Exception) -> str:
    """The fault of a file that does not open: the first tensor that it lacks."""
    reason = messages.cut(str(error))
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                return f"damaged: its header is cut short ({reason})"
            header = file.read(min(length, _MAX_HEADER))
    except OSError as unreadable:
        return f"cannot be read: {unreadable.strerror}"
    ends = _end_offsets(header)
    if ends is None:
        return f"damaged: its header cannot be read ({reason})"
    lost = [name for name in sorted(ends, key=ends.__getitem__)
            if 8 + length + ends[name] > size]  # fmt: skip
    if lost:
        return (
            f"cut short at {size:,} bytes: tensor {messages.name(lost[0])} and "
            f"{len(lost) - 1} more are not complete"
        )
    return f"damaged: {reason}"


def _end_offsets(header: bytes) -> dict[str, int] | None:
    """The end offset of each tensor; None for an invalid header."""
    try:
        entries = json_files.parse(header.decode("utf-8"))
        entries.pop("__metadata__", None)
        ends = {name: entry["data_offsets"][1] for name, entry in entries.items()}
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return None
    return ends if all(type(end) is int for end in ends.values()) else None


def whole(weight: jax.Array, layer: int | None) -> np.ndarray:
    """A weight, or one layer of it, on this host; the shards of others are gathered.

    Every process of a run must call this for the same weights in the same order.
    """
    if isinstance(weight, jax.Array) and not (
        weight.is_fully_addressable or weight.is_fully_replicated
    ):
        mesh = weight.sharding.mesh  # pyright: ignore[reportAttributeAccessIssue]
        weight = _gather_program(NamedSharding(mesh, PartitionSpec()))(weight, layer)
        return np.asarray(weight)
    if layer is None:
        return np.asarray(weight)
    if jax.default_backend() == "cpu":  # without a program that slices
        return np.asarray(weight)[layer]
    return np.asarray(weight[layer])


@functools.cache
def _gather_program(sharding: NamedSharding) -> Callable[..., jax.Array]:
    def gather(weight: jax.Array, layer: int | None) -> jax.Array:
        return weight if layer is None else weight[layer]

    return jax.jit(gather, static_argnums=1, out_shardings=sharding)


def write_tensors(
    directory: Path | None,
    tensors: Iterable[tuple[str, np.ndarray]],
    *,
    max_shard_bytes: int = 5 * 10**9,
    single: str = _ONE,
) -> None:
    """Write tensors to one file, or to shards and their index.

    At most one shard of them is in memory at a time; a tensor above `max_shard_bytes`
    has its own file. Without a directory nothing is written, in a process that only
    takes part in gathering the tensors.
    """
    if directory is None:
        for _ in tensors:
            pass
        return
    shards, held, size = [], {}, 0
    for name, array in tensors:
        if held and size + array.nbytes > max_shard_bytes:
            shards.append(_write_shard(directory, len(shards), held))
            held, size = {}, 0
        held[name] = np.asarray(array, order="C")  # a scalar stays one
        size += array.nbytes
    shards.append(_write_shard(directory, len(shards), held))
    if len(shards) == 1:
        os.replace(shards[0][0], directory / single)
        return
    weight_map, total = {}, 0
    for number, (path, names, nbytes) in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        os.replace(path, directory / file)
        weight_map |= dict.fromkeys(names, file)
        total += nbytes
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / _INDEX).write_text(json.dumps(index, indent=2), "utf-8")


def _write_shard(
    directory: Path, number: int, held: Mapping[str, np.ndarray]
) -> tuple[Path, list[str], int]:
    path = directory / f"shard-{number}.unfinished"
    save_file(dict(held), path, metadata={"format": "pt"})  # layout of torch's matrices
    return path, list(held), sum(array.nbytes for array in held.values())
