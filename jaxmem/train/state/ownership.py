"""Files of a run's directory that the run may replace, and the mark that names them.

A run replaces only files that a run has written. It therefore refuses a directory that
has any of its file names already, unless `jaxmem_run.json` is there and lists the name,
or files as only a run leaves them, which versions without this mark have written.
"""

import contextlib
import dataclasses
import glob
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxmem._version import __version__
from jaxmem.base import files, messages, processes
from jaxmem.base.fields import values_of
from jaxmem.checkpoints.directories import foreign_in
from jaxmem.train.settings import JobConfig, RunConfig
from jaxmem.train.state import checkpoint

MARK = "jaxmem_run.json"
SAVED = "model", "adapter", "start"  # directories that are replaced as a whole
# Directories in which a run writes entries.
_FOLDERS = "checkpoints", "best", "rollouts"
_FILES = (
    "operative.gin", "settings.gin", "about.json", "tokenizer.json", "started.txt",
    "end_of_turn.txt", "metrics.jsonl", "samples.jsonl", "reference.npz",
    "summary.json", "report.html", "report.png", "eval.json", "wandb_id",
)  # fmt: skip
# A line of metrics.jsonl has these in every version.
_OF_A_STEP = {"step", "loss", "grad_norm", "learning_rate", "seconds"}
_WRITTEN = "run.out_dir", "data.cache_dir"  # keys of paths that are not read
_SHOWN = 200  # characters of a directory's name
_LONGEST_LINE = 2**20  # bytes of a step in metrics.jsonl


class OwnershipError(ValueError):
    """A run would replace a file that is not its own; the message names the file."""


def result_of(config: JobConfig) -> str:
    """The name, in the run's directory, of the directory that holds a run's result."""
    if config.model.lora_rank:
        return "adapter"
    return "model" if config.model.factory is None else "text"


def is_run(directory: Path) -> bool:
    """True if a run has written to a directory."""
    return _names_in_mark(directory) is not None or _has_traces(directory)


@dataclasses.dataclass(frozen=True)
class RunDirectory:
    """The directory of a run, and the names in it that the run may replace."""

    path: Path
    key: str  # of the configuration, for messages
    result: str = "model"  # see `result_of`

    @classmethod
    def of(cls, config: RunConfig, result: str = "model") -> "RunDirectory":
        """The directory that a configuration names."""
        shown = messages.cut(config.out_dir, _SHOWN)
        path = Path(config.out_dir).expanduser().absolute()
        return cls(path, f"run.out_dir={shown!r}", result)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of files and directories that a run writes."""
        return (*_FILES, *_FOLDERS, "start", self.result)

    def check(self) -> None:
        """Raise unless every file that the run would replace is of a run.

        Raises:
            OwnershipError: the message names the path.
        """
        try:
            faults = [*self._find_faults()]
        except OSError as error:
            reason = messages.reason(error)
            raise OwnershipError(f"{self.key}: cannot be used: {reason}") from error
        if faults:
            path, reason = faults[0]
            more = [str(path.relative_to(self.path)) for path, _ in faults[1:]]
            named = f" (the same holds for {', '.join(more)})" if more else ""
            raise OwnershipError(
                f"{self.key}: {files.shown(path)} {reason}{named}; the run would "
                "replace it: move it, or name another run.out_dir"
            )

    def check_inputs(self, config: JobConfig) -> None:
        """Raise if the run would replace a file that it reads.

        Raises:
            OwnershipError: the message names the key of the input.
        """
        home = os.path.realpath(self.path)
        written = [os.path.join(home, name) for name in (*self.names, MARK)]
        for key, value in _paths_in(config):
            for path in _matching_paths(value):
                real = os.path.realpath(path)
                # A run's directory stands for the model that the run has left.
                own = os.path.join(real, self.result)
                inputs = [own] if real == home and os.path.exists(own) else [real]
                for path_read in inputs:
                    if any(Path(path_read).is_relative_to(name) for name in written):
                        raise OwnershipError(
                            f"{key}={messages.short(value)} is among the files that "
                            f"{self.key} replaces; name another run.out_dir"
                        )

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """Within it, the directory has the mark, which a run that left no file removes.

        Raises:
            OwnershipError: as in `check`.
        """
        processes.by_first(self.check)
        processes.by_first(self.mark)
        try:
            yield
        finally:
            if processes.is_first():
                self._remove_unneeded_mark()

    def mark(self) -> None:
        """Write the mark, with the names of marks of earlier runs."""
        names = sorted({*self.names, *(_names_in_mark(self.path) or ())})
        text = json.dumps({"jaxmem": __version__, "replaces": names}, indent=1)
        if _names_in_mark(self.path) != set(names):
            files.write_whole(self.path / MARK, text + "\n")

    def _remove_unneeded_mark(self) -> None:
        if not any(os.path.lexists(self.path / name) for name in self.names):
            with contextlib.suppress(OSError):
                (self.path / MARK).unlink(missing_ok=True)

    def _find_faults(self) -> Iterator[tuple[Path, str]]:
        """Pairs of a path that the run must not replace and the reason."""
        try:
            os.lstat(self.path)
        except FileNotFoundError:
            return
        if not self.path.is_dir():
            yield self.path, "is not a directory"
            return
        owned = _names_in_mark(self.path)
        if owned is None:
            owned = {*self.names} if _has_traces(self.path) else set()
            if os.path.lexists(self.path / MARK):
                yield self.path / MARK, "was not written by a run"
        for name in self.names:
            if os.path.lexists(path := self.path / name):
                yield from _fault_of_path(path, name in owned)
        for name in SAVED:
            if name == self.result and os.path.lexists(self.path / "best" / name):
                yield from _fault_of_path(self.path / "best" / name, "best" in owned)


def _fault_of_path(path: Path, owned: bool) -> Iterator[tuple[Path, str]]:
    if path.is_symlink() and path.name not in _FOLDERS:
        yield path, "is a symbolic link"
    elif path.name in _FILES:
        if not owned or not path.is_file():
            yield path, "was not written by a run"
    elif not path.is_dir():
        yield path, "is not a directory"
    elif path.name in SAVED:
        if (foreign := foreign_in(path)) is not None:
            yield foreign, "was not written by a run"
        elif not owned and any(path.iterdir()):
            yield path, "was not written by a run"
    elif not owned and not all(map(checkpoint.is_unfinished, path.iterdir())):
        yield path, "was not written by a run"


def _names_in_mark(directory: Path) -> set[str] | None:
    """Names that the mark of a directory lists; None without a mark."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        mark = json.loads((directory / MARK).read_text("utf-8"))
        if isinstance(mark["jaxmem"], str):
            return {*map(str, mark["replaces"])}
    return None


def _has_traces(directory: Path) -> bool:
    """True if a version that wrote no mark has left a run in a directory."""
    folder = directory / "checkpoints"
    for step in checkpoint.steps_in(folder):
        parts = "state", "data", "config", "_CHECKPOINT_METADATA"
        if all((folder / str(step) / part).exists() for part in parts):
            return True
    with contextlib.suppress(OSError, ValueError, RecursionError):
        with open(directory / "metrics.jsonl", "rb") as lines:
            first = json.loads(lines.readline(_LONGEST_LINE))
            if isinstance(first, dict) and first.keys() >= _OF_A_STEP:
                return True
    with contextlib.suppress(OSError, ValueError):
        operative = (directory / "operative.gin").read_text("utf-8")
        return "\nrun.out_dir = " in operative and (directory / "settings.gin").exists()
    return False


def _paths_in(config: JobConfig) -> Iterator[tuple[str, str]]:
    """Texts of a configuration that may be paths, by key."""
    for section in config.sections():
        for path, value in values_of(getattr(config, section)).items():
            key = f"{section}.{path}"
            if key not in _WRITTEN:
                yield from ((key, text) for text in _texts_in(value))


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, tuple):
        for entry in value:
            yield from _texts_in(entry)


def _matching_paths(text: str) -> list[str]:
    """Existing paths that a text names as a path, a glob or "path:name" of code."""
    path = os.path.expanduser(text)
    with contextlib.suppress(OSError, ValueError):
        if os.path.lexists(path):
            return [path]
        if glob.has_magic(path):
            return glob.glob(path, recursive=True)
        code = path.rpartition(":")[0]
        return [code] if code and os.path.lexists(code) else []
    return []
