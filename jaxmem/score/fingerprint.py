"""A cheap hash of a command's inputs, which identifies its unfinished results."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxmem.train.saved import Saved

_SAMPLE = 2**16  # bytes that are read at each end of a file


def fingerprint_of(options: str, paths: Iterable[Path], inputs: Iterable[bytes]) -> str:
    """Hash everything that results depend on.

    Args:
        options: the options of the command that change results, as text.
        paths: the files of the model, of which name, size, time and both ends count.
        inputs: the data, in order.
    """
    digest = hashlib.sha256(options.encode())
    _update_with_files(digest, paths)
    for each in inputs:
        digest.update(each)
    return digest.hexdigest()[:24]


def files_of(source: Saved) -> tuple[Path, ...]:
    """The files that the results of a saved model depend on."""
    directories = [source.directory] + ([source.adapter] if source.adapter else [])
    return source.files or tuple(
        path
        for directory in map(os.path.expanduser, directories)
        for kind in ("*.safetensors", "*config.json")
        for path in sorted(Path(directory).glob(kind))
    )


def _update_with_files(digest: Any, paths: Iterable[Path]) -> None:
    """Add files to a hash: name, size, time, and the bytes at both ends."""
    for path in paths:
        # Include the time, because weights may differ in the middle of a file only.
        size, written = path.stat().st_size, path.stat().st_mtime_ns
        digest.update(f"{path.name} {size} {written}".encode())
        with open(path, "rb") as file:
            digest.update(file.read(_SAMPLE))
            file.seek(max(size - _SAMPLE, 0))
            digest.update(file.read(_SAMPLE))
