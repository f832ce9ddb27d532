"""A cheap hash of a command's inputs, which identifies its unfinished results."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxmem.base import messages
from jaxmem.train.saved import Saved

_SAMPLE = 2**16  # bytes that are read at each end of a file


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """The identity of results: a hash of all that they depend on.

    Attributes:
        digest: the hash.
        flags: options of the command by their flags, which errors about another
            request compare; JSON-able values.
    """

    digest: str
    flags: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def differing_flags(self, saved: Mapping[str, Any]) -> Iterator[str]:
        """Yield flag, saved and present value of each option of another value."""
        present = json.loads(json.dumps(self.flags))
        for flag, value in saved.items():
            if flag in present and present[flag] != value:
                yield f"{flag} {_shown(value)} (now {_shown(present[flag])})"


def _shown(value: Any) -> str:
    """The value of a flag, as a user gives it."""
    if value is None or value is False or value == []:
        return "left out"
    if value is True:
        return "given"
    if isinstance(value, list):  # of a flag that is repeated
        return " ".join(map(repr, value))
    return messages.short(value) if isinstance(value, dict) else f"{value}"


def fingerprint_of(
    options: str,
    paths: Iterable[Path],
    inputs: Iterable[bytes],
    flags: Mapping[str, Any],
) -> Fingerprint:
    """Hash everything that results depend on.

    Args:
        options: the options of the command that change results, as text.
        paths: the files of the model, of which name, size, time and both ends count.
        inputs: the data, in order.
        flags: as in `Fingerprint`.
    """
    digest = hashlib.sha256(options.encode())
    _update_with_files(digest, paths)
    for each in inputs:
        digest.update(each)
    return Fingerprint(digest.hexdigest()[:24], flags)


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
