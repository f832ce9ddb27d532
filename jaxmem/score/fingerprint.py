"""Which weights results were computed with: a cheap hash of large files."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from jaxmem.train.saved import Saved

_SAMPLE = 2**16  # bytes that are read at each end of a file


class _Hash(Protocol):
    def update(self, data: bytes, /) -> None: ...


def checkpoint_files(directory: str | Path) -> list[Path]:
    """The files of a checkpoint or an adapter that results depend on, sorted."""
    path = Path(os.path.expanduser(directory))
    return [
        file
        for kind in ("*.safetensors", "*config.json")
        for file in sorted(path.glob(kind))
    ]


def files_of(place: Saved) -> tuple[Path, ...]:
    """The files that the results of a saved model depend on."""
    directories = [place.directory] + ([place.adapter] if place.adapter else [])
    return place.files or tuple(
        path for each in directories for path in checkpoint_files(each)
    )


def update_with_files(digest: _Hash, paths: Iterable[Path]) -> None:
    """Add files to a hash: name, size, time, and the bytes at both ends."""
    for path in paths:
        # Include the time, because weights may differ in the middle of a file only.
        size, written = path.stat().st_size, path.stat().st_mtime_ns
        digest.update(f"{path.name} {size} {written}".encode())
        with open(path, "rb") as file:
            digest.update(file.read(_SAMPLE))
            file.seek(max(size - _SAMPLE, 0))
            digest.update(file.read(_SAMPLE))
