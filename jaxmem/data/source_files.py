"""Files of a source: of paths, globs, folders and remote data, in one order.

numbered_files("data/*.jsonl", "data.source") -> [(0, data/a.jsonl), ...]
"""

import glob
import os
from pathlib import Path
from typing import Any

from jaxmem.base import hub, messages
from jaxmem.data import remote, source_folders
from jaxmem.data.records import SUFFIXES, DataError, Source, kind_of


def find_files(source: Source, argument: str) -> list[Path]:
    """The files of a source without folders, in the same order on every run."""
    for entry in _entries(source):
        if "://" not in entry and os.path.isdir(os.path.expanduser(entry)):
            raise DataError(
                f"{argument}: {messages.name(entry)} is a folder; name a file, or "
                "files by a glob"
            )
    return [path for _, path in numbered_files(source, argument)]


def numbered_files(
    source: Source, argument: str, held_out: bool = False
) -> list[tuple[int, Path]]:
    """The files of a source, in one order, each with the number of its entry.

    Args:
        source: a path, a glob such as "data/*.jsonl", a folder as in
            `source_folders.files_of`, an address of `remote.copies`, or a tuple of
            these.
        argument: name of the source in errors.
        held_out: True for the files that folders hold out, False for all others.

    Raises:
        DataError: a file has another suffix, a glob matches nothing, or a folder has
            nothing to train on.
    """
    paths = [
        (number, path)
        for number, entry in enumerate(_entries(source))
        for path in _expand(entry, argument, held_out)
    ]
    if not paths and not held_out:
        raise DataError(f"{argument} is empty; name a file")
    return paths


def held_out_files(source: Source, argument: str) -> list[tuple[int, Path]]:
    """The files that folders hold out, in the place of a fraction of the others.

    Remote data have none, and nothing is copied for it.
    """
    if source in ("stdlib", "arithmetic"):
        return []
    return numbered_files(source, argument, held_out=True)


def lines(config: Any, section: str) -> list[str]:
    """A line about the use of each folder that a section's `source` names."""
    return [
        f"{section}.source: "
        + source_folders.files_of(folder, f"{section}.source").line(
            entry, f"{section}.held_out={config.held_out}" if config.held_out else ""
        )
        for entry in _entries(config.source)
        if (folder := _folder(entry)) is not None
    ]


def _entries(source: Source) -> tuple[str, ...]:
    return (source,) if isinstance(source, str) else source


def _folder(entry: str) -> Path | None:
    """The folder that an entry names; None for files and addresses."""
    path = Path(os.path.expanduser(entry))
    return path if "://" not in entry and _is_folder(path) else None


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):  # a name that no file can have
        return False


def _expand(pattern: str, argument: str, held_out: bool) -> list[Path]:
    if (folder := _folder(pattern)) is not None:
        files = source_folders.files_of(folder, argument)
        return files.held_out if held_out else files.train
    if held_out:
        return []
    if "://" in pattern:
        try:
            paths = remote.copies(pattern)
        except remote.RemoteError as error:
            raise DataError(f"{argument}: {error}") from error
        return [f for path in paths for f in _expand(str(path), argument, False)]
    path = Path(os.path.expanduser(pattern))
    if kind_of(path) not in SUFFIXES:
        raise DataError(
            f'{argument} must be "stdlib", a folder, or the path of a '
            f"{', '.join(SUFFIXES)} file, also as .gz or .zst, got "
            f"{messages.short(pattern)}{hub.hint(pattern, 'data set')}"
        )
    # A path that exists is a file, even if its name contains a bracket.
    if not glob.has_magic(pattern) or os.path.exists(path):
        return [path]
    matches = sorted(map(Path, glob.glob(str(path), recursive=True)))
    if not matches:
        raise DataError(f"{argument}: {messages.name(pattern)} matches no file")
    return matches
