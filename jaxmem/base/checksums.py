"""SHA-256 checksums of a checkpoint's files, in the format of `sha256sum`.

OCDBT, which orbax writes, has CRC32C checksums for its B-tree nodes only, and orbax has
no option for the `crc32c` codec of the arrays: it restores an array with a flipped byte
without an error. So every file is hashed after it is written and before it is read.
"""

import concurrent.futures
import hashlib
import stat
from pathlib import Path

import jax

from jaxmem.base import files, processes

NAME = "SHA256SUMS"
_ITEMS = ("config", "data", "state")  # of every checkpoint


def write(directory: Path) -> None:
    """Write the checksums of all files of a directory to its file SHA256SUMS."""
    sums = _hash_files(directory)
    for name, digest in sums.items():
        if digest.startswith(_UNREADABLE):
            raise OSError(f"{directory / name}: {digest}")
    text = "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items()))
    processes.by_first(lambda: files.write_whole(directory / NAME, text))


def exist(directory: Path) -> bool:
    """True if a checkpoint has checksums; one of an older version has none."""
    return processes.by_first(lambda: (directory / NAME).exists())


def find_fault(directory: Path) -> str | None:
    """Return what is damaged in a checkpoint, None if nothing is.

    Without checksums only missing items are found.
    """
    saved = processes.by_first(lambda: _read_sums(directory))
    if not isinstance(saved, dict):
        return saved
    sums = _hash_files(directory)
    faults = [f"{name} is missing" for name in saved.keys() - sums.keys()]
    for name, digest in sums.items():
        if name not in saved:
            faults.append(f"{name} has no checksum")
        elif digest != saved[name]:
            differs = not digest.startswith(_UNREADABLE)
            faults.append(
                f"{name} {'differs from its checksum' if differs else digest}"
            )
    return first(sorted(faults)) if faults else None


def _read_sums(directory: Path) -> str | dict[str, str] | None:
    """Return missing items, else the saved checksums, None without any."""
    missing = [name for name in _ITEMS if not (directory / name).is_dir()]
    if missing:
        return f"{' and '.join(missing)} missing"
    if not (directory / NAME).exists():
        return None
    try:
        return _parse_sums((directory / NAME).read_text("utf-8"))
    except (OSError, ValueError):
        return f"{NAME} cannot be read"


def first(names: list[str]) -> str:
    """The first of at least one, and the number of the others."""
    more = f", and {len(names) - 1:,} more" if len(names) > 1 else ""
    return f"{names[0]}{more}"


_UNREADABLE = "cannot be read"


def _parse_sums(text: str) -> dict[str, str]:
    sums = {}
    if not text.endswith("\n"):
        raise ValueError("cut short")
    for line in text.splitlines():
        digest, separator, name = line.partition("  ")
        if len(digest) != 64 or not separator:
            raise ValueError(line)
        sums[name] = digest
    return sums


def _hash_files(directory: Path) -> dict[str, str]:
    """Map each file's name to its digest; each process reads a share of the files."""
    names = processes.by_first(lambda: _list_files(directory))
    own = names[jax.process_index() :: jax.process_count()]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        digests = pool.map(lambda name: _hash_file(directory / name), own)
        return processes.share(dict(zip(own, digests, strict=True)))


def _list_files(directory: Path) -> list[str]:
    paths = (path for path in directory.rglob("*") if not path.is_dir())
    names = (path.relative_to(directory).as_posix() for path in paths)
    return sorted(name for name in names if not name.startswith(NAME))


def _hash_file(path: Path) -> str:
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # reading a FIFO would never end
            return f"{_UNREADABLE} (it is not a file)"
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return f"{_UNREADABLE} ({error.strerror})"
