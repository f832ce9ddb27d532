"""Folders of data: files by split, and data sets that `save_to_disk` has written.

DIR/train-0.jsonl, DIR/validation.jsonl, DIR/README.md
    -> files to train on, files that are held out, and names that are not used
"""

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from jaxmem.base import json_files, messages
from jaxmem.data.records import SUFFIXES, DataError, kind_of

# Names of splits. Of the held-out ones, the first that a folder has is held out.
_TRAIN = "train", "training"
_HELD_OUT = "validation", "valid", "val", "dev", "test"
# A name that begins with the word; `testimonials` begins with another one.
_SPLIT = re.compile(rf"({'|'.join((*_TRAIN, *_HELD_OUT))})(?![a-z])", re.IGNORECASE)


class FolderFiles(NamedTuple):
    """The files of a folder, by their use."""

    train: list[Path]
    held_out: list[Path]
    unused: list[str]  # names of files and splits

    def line(self, folder: str, fraction: str) -> str:
        """A sentence about the use of the files.

        Args:
            folder: its name.
            fraction: the setting that the held-out files replace; empty without one.
        """
        said = [f"{_names(self.train)} to train on"]
        if self.held_out:
            instead = f" instead of {fraction}" if fraction else ""
            said.append(f"{_names(self.held_out)} held out{instead}")
        if self.unused:
            said.append(f"not used: {messages.listing(self.unused)}")
        return f"{messages.name(folder)}: {'; '.join(said)}"


def files_of(folder: Path, argument: str) -> FolderFiles:
    """The files of a folder, in the same order on every run.

    A data set of `Dataset.save_to_disk` is trained on whole, and of a `DatasetDict` the
    split train. In other folders, files or subfolders (also of a subfolder data) whose
    names begin with train are trained on, or all that name no split if none does. What
    is named validation, valid, val or dev is held out, or else test.

    Raises:
        DataError: the folder cannot be read, or has nothing to train on.
    """
    try:
        if (folder / "dataset_dict.json").is_file():
            return _saved_dict(folder, argument)
        if (folder / "state.json").is_file():
            return FolderFiles(_saved_files(folder, argument), [], [])
        paths = sorted(_visible_files(folder))
    except OSError as error:
        reason = messages.reason(error)
        shown = messages.name(str(folder))
        raise DataError(f"{argument}: cannot read {shown}: {reason}") from error
    by_split: dict[str, list[Path]] = {}
    others = []
    for path in paths:
        if kind_of(path) in SUFFIXES:
            by_split.setdefault(_split_of(path.relative_to(folder)), []).append(path)
        else:
            others.append(path)
    train = [path for name in _TRAIN for path in by_split.pop(name, [])]
    train = sorted(train) or by_split.pop("", [])
    held_out = next((by_split.pop(s) for s in _HELD_OUT if s in by_split), [])
    if not train:
        raise DataError(_nothing(folder, argument, paths))
    unused = sorted([*others, *(path for rest in by_split.values() for path in rest)])
    return FolderFiles(train, held_out, [str(p.relative_to(folder)) for p in unused])


def _visible_files(folder: Path) -> Iterator[Path]:
    """Files of a folder and its subfolders, without hidden ones."""
    for where, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(where) / name for name in names if not name.startswith("."))


def _split_of(path: Path) -> str:
    """The split that the first part of a path names; empty without one."""
    parts = path.parts[1:] if path.parts[0] == "data" and path.parts[1:] else path.parts
    match = _SPLIT.match(parts[0])
    return match[1].lower() if match else ""


def _nothing(folder: Path, argument: str, paths: list[Path]) -> str:
    shown = messages.name(str(folder))
    names = [str(path.relative_to(folder)) for path in paths]
    has = f"it has {messages.listing(names)}" if names else "it is empty"
    return (
        f"{argument}: the folder {shown} has no file to train on: {has}; training "
        'files have "train" or no split in their names, and end in '
        f"{', '.join(SUFFIXES)}"
    )


def _saved_dict(folder: Path, argument: str) -> FolderFiles:
    splits = list(map(str, _read(folder / "dataset_dict.json").get("splits", [])))
    train = next((name for name in _TRAIN if name in splits), None)
    if train is None:
        shown = messages.name(str(folder))
        raise DataError(
            f"{argument}: the data set {shown} has the splits "
            f"{messages.listing(splits) or '(none)'} but no split train; name the "
            "folder of a split"
        )
    held_out = next((name for name in _HELD_OUT if name in splits), None)
    train_files, held_out_files = (
        [] if name is None else _saved_files(folder / name, argument)
        for name in (train, held_out)
    )
    unused = [name for name in splits if name not in (train, held_out)]
    return FolderFiles(train_files, held_out_files, unused)


def _saved_files(folder: Path, argument: str) -> list[Path]:
    """The files of a data set in their order, which state.json has."""
    path = folder / "state.json"
    state = _read(path)
    named = state.get("_data_files")
    if state.get("_indices_data_files") or not isinstance(named, list):
        raise DataError(
            f"{argument}: {messages.name(str(path))} was saved by an old version of "
            "datasets; load the data set, and save it again"
        )
    files = [folder / str(entry["filename"]) for entry in named]
    if not files:
        raise DataError(
            f"{argument}: the data set {messages.name(str(folder))} is empty"
        )
    return files


def _read(path: Path) -> dict:
    try:
        return json_files.read_object(path)
    except json_files.JsonError as error:
        raise DataError(str(error)) from error


def _names(paths: Iterable[Path]) -> str:
    """Names of files, the first and the last of several."""
    names = [
        f"{path.parent.name}/{path.name}" if path.suffix == ".arrow" else path.name
        for path in paths
    ]
    if len(names) == 1:
        return names[0]
    return f"{len(names):,} files, {names[0]} to {names[-1]}"
