"""Checksums of a checkpoint's files, which `sha256sum -c SHA256SUMS` reads too.

OCDBT, the format that orbax writes, has checksums for its own tables only, and orbax
chooses the codecs of the arrays without one: a flipped byte of an array is restored as
it is. So each file is hashed when it has been written, and before it is read.
"""

import concurrent.futures
import hashlib
from pathlib import Path

import jax

from jaxmem.train import files, processes

NAME = "SHA256SUMS"
_ITEMS = ("config", "data", "state")  # of every checkpoint


def write(directory: Path) -> None:
    """Put the checksums of all files of a directory into it.

    Raises:
      OSError: a file cannot be read, or the checksums cannot be written.
    """
    sums = _sums(directory)
    for name, digest in sums.items():
        if digest.startswith(_UNREADABLE):
            raise OSError(f"{directory / name}: {digest}")
    text = "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items()))
    processes.by_first(lambda: files.write_whole(directory / NAME, text))


def are_in(directory: Path) -> bool:
    """Whether `write` was called: not where a kill came first, nor in old versions."""
    return processes.by_first(lambda: (directory / NAME).exists())


def fault(directory: Path) -> str | None:
    """What is wrong with a checkpoint's directory; None if nothing is known to be.

    Without checksums, only that all of its parts are there is known.
    """
    known = processes.by_first(lambda: _fault_or_sums(directory))
    if not isinstance(known, dict):
        return known
    found = _sums(directory)
    faults = [
        *(f"{name} is missing" for name in known.keys() - found.keys()),
        *(f"{name} has no checksum" for name in found.keys() - known.keys()),
        *(
            f"{name} {_difference(found[name])}"
            for name in known.keys() & found.keys()
            if known[name] != found[name]
        ),
    ]
    return _first(sorted(faults))


def _fault_or_sums(directory: Path) -> str | dict[str, str] | None:
    """What is wrong at first sight, or else the checksums, if there are any."""
    missing = [name for name in _ITEMS if not (directory / name).is_dir()]
    if missing:
        return f"{' and '.join(missing)} missing"
    if not (directory / NAME).exists():
        return None
    try:
        return _parse((directory / NAME).read_text("utf-8"))
    except (OSError, ValueError):
        return f"{NAME} cannot be read"


def _first(faults: list[str]) -> str | None:
    if len(faults) < 2:
        return faults[0] if faults else None
    return f"{faults[0]}, and {len(faults) - 1} more"


_UNREADABLE = "cannot be read"


def _difference(digest: str) -> str:
    return digest if digest.startswith(_UNREADABLE) else "differs from its checksum"


def _parse(text: str) -> dict[str, str]:
    sums = {}
    if not text.endswith("\n"):
        raise ValueError("cut short")
    for line in text.splitlines():
        digest, separator, name = line.partition("  ")
        if len(digest) != 64 or not separator:
            raise ValueError(line)
        sums[name] = digest
    return sums


def _sums(directory: Path) -> dict[str, str]:
    """Name to digest, of all files; each of several processes reads its part."""
    names = processes.by_first(lambda: _names(directory))
    own = names[jax.process_index() :: jax.process_count()]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        digests = pool.map(lambda name: _digest(directory / name), own)
        return processes.share(dict(zip(own, digests, strict=True)))


def _names(directory: Path) -> list[str]:
    paths = (path for path in directory.rglob("*") if not path.is_dir())
    names = (path.relative_to(directory).as_posix() for path in paths)
    return sorted(name for name in names if not name.startswith(NAME))


def _digest(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return f"{_UNREADABLE} ({error.strerror})"
