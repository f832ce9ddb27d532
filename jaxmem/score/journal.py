"""Crash-safe results on disk: whole groups only, whenever the process is killed.

Records are appended to a journal, one line per result, group by group. At the end, the
output file is created from the journal in one atomic step. `ResumableOutput` is what a
command does with a journal: it locks the output, continues the journal, and stops at
signals between two groups.
"""

import contextlib
import filecmp
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from rich.console import Console

from jaxmem.base import files, locks
from jaxmem.base.stopping import Stop
from jaxmem.score.fingerprint import Fingerprint
from jaxmem.train.output.progress import Progress

_HEAD = b'{"fingerprint"'  # of a journal
Write = Callable[[BinaryIO, Iterator[dict[str, Any]]], object]


class ScoreResult(Protocol):
    """Results for one document or prompt."""

    def record(self) -> dict[str, Any]:
        """The result as JSON-able values."""
        ...


class Journal:
    """The journal of one output file.

    Args:
        out: path of the future output file.
        fingerprint: of everything that the results depend on.
        source: name of the documents' file; a journal that is continued keeps its first
            name.
        boundaries: numbers of documents after which a group ends, from 0 to the number
            of all documents; a journal is continued after one of them. None: after each
            one, their number is unknown, and an output that exists may be replaced.

    Attributes:
        done: number of documents whose results are recorded.
        total: number of all documents; None if it is unknown.
        source: the name under which documents are recorded.

    Raises:
        ValueError: the output file exists, or the journal belongs to other inputs.
    """

    def __init__(
        self,
        out: Path,
        fingerprint: Fingerprint,
        source: str = "",
        boundaries: Iterable[int] | None = None,
    ):
        self.out, self.path = out, out.with_name(out.name + ".unfinished")
        self._partial = out.with_name(out.name + ".made")  # renamed to `out` when whole
        self.done, self.source = 0, source
        ends = None if boundaries is None else set(boundaries)
        self.total = None if ends is None else max(ends)
        head = json.dumps(
            {
                "fingerprint": fingerprint.digest,
                "source": source,
                "flags": fingerprint.flags,
            }
        )
        if self.path.exists():
            self._continue(fingerprint, head, ends)
        elif os.path.lexists(self._partial):  # ours exists beside a journal only
            raise ValueError(
                f"{self._partial} exists already; move it, or name another --out"
            )
        is_whole = self.path.exists() and self.done == self.total
        if out.exists() and self.total is not None and not is_whole:
            raise ValueError(f"{out} exists already; delete it, or name another --out")
        if not self.path.exists():
            files.write_whole(self.path, head + "\n")
        self._file = files.Appender(self.path)

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _continue(
        self, fingerprint: Fingerprint, head: str, boundaries: set[int] | None
    ) -> None:
        """Truncate the journal after the last complete group."""
        end, count = 0, -1  # the first line is not a document
        with open(self.path, "rb") as file:
            first, second = file.readline(), file.readline()
            # A run that was killed before its first document loses nothing if a run of
            # other inputs takes its journal.
            if not second.endswith(b"\n") and _is_head(first):
                files.write_whole(self.path, head + "\n")
                return
            self.source = self._saved_source(first, fingerprint)
            file.seek(0)
            for line in file:
                if not line.endswith(b"}\n") or b"\0" in line:  # incomplete line
                    break
                count += 1
                if boundaries is None or count in boundaries:
                    end, self.done = file.tell(), count
        files.truncate(self.path, end)

    def _saved_source(self, head: bytes, fingerprint: Fingerprint) -> str:
        """Return the data's name from a journal's first line; raise on a mismatch."""
        differing: list[str] = []
        try:
            saved = json.loads(head)
            if saved["fingerprint"] == fingerprint.digest:
                return saved["source"]
            differing = [*fingerprint.differing_flags(saved.get("flags", {}))]
        except (ValueError, LookupError, TypeError, AttributeError):
            pass
        if differing:
            raise ValueError(
                f"{self.path} contains unfinished results of other options: "
                f"{', '.join(differing)}; give the options as they were to continue "
                "it, delete the file, or name another --out"
            )
        raise ValueError(
            f"{self.path} contains unfinished results of other inputs, another "
            "checkpoint or other options; delete it, or name another --out"
        )

    def append(self, results: Iterable[ScoreResult]) -> None:
        """Add a group of documents durably: a later kill cannot lose them.

        Raises:
            WriteError: the disk is full; earlier groups are unchanged.
        """
        lines = [json.dumps(result.record()) + "\n" for result in results]
        with files.write_errors(self.path):
            self._file.add("".join(lines).encode())
            self._file.flush()
            self._file.sync()
        self.done += len(lines)

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield the records of all documents so far, in order."""
        with open(self.path, encoding="utf-8") as file:
            next(file)
            for line in file:
                yield json.loads(line)

    def finish(self, write: Write | None = None) -> None:
        """Write the output file, then remove the journal.

        `write` writes the output file from all records; None: the lines of the journal.

        If the process is killed between the two steps, the file already exists when the
        command is run again, with the same content.

        Raises:
            ValueError: a file with another content exists.
            WriteError: the file cannot be written; the journal is unchanged.
        """
        with files.write_errors(self.out):
            try:
                self._write_out(write)
                is_new = self.total is None or not self.out.exists()
                if not is_new and not filecmp.cmp(self._partial, self.out, False):
                    raise ValueError(
                        f"{self.out} exists, and differs from the results in "
                        f"{self.path}; delete one of them"
                    )
                os.replace(self._partial, self.out)
                files.sync_directory(self.out.parent)
            finally:
                self._partial.unlink(missing_ok=True)
        self.path.unlink()

    def _write_out(self, write: Write | None) -> None:
        flags = os.O_WRONLY | os.O_TRUNC
        with (
            open(self.path, "rb") as journal,
            open(files.open_own(self._partial, flags), "wb") as file,
        ):
            if write is None:
                next(journal)
                file.writelines(journal)
            else:
                write(file, self.records())
        with open(self._partial, "rb+") as file:
            files.sync(file.fileno())


def _is_head(line: bytes) -> bool:
    """True if a line is the beginning, perhaps cut off, of a journal's first line."""
    line = line.rstrip(b"\0\n")
    length = min(len(line), len(_HEAD))
    return line[:length] == _HEAD[:length]


def write_lines(file: BinaryIO, records: Iterable[Mapping[str, Any]]) -> None:
    """Write each record as a line of JSON."""
    file.writelines(f"{json.dumps(record)}\n".encode() for record in records)


class ResumableOutput:
    """The output file of a command that the same command continues after a kill.

    Args:
        path: of the output file.
        noun: one result in messages, such as "document".
        console: receives messages and progress; by default a new one of stderr.
    """

    def __init__(self, path: Path, noun: str, console: Console | None = None):
        self.path, self._noun = path, noun
        self._console = console or Console(
            stderr=True, force_terminal=sys.stderr.isatty()
        )
        self._stop = Stop()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the output, and handle signals.

        Raises:
            Busy: another process writes to the output.
            KeyboardInterrupt, SystemExit: after a signal; in `record`, once the current
                group is recorded.
        """
        lock = self.path.with_name(self.path.name + ".lock")
        with self._stop, locks.exclusive(lock, f"--out {self.path}", self.log):
            yield

    @contextlib.contextmanager
    def journal(
        self,
        fingerprint: Fingerprint,
        source: str = "",
        boundaries: Iterable[int] | None = None,
    ) -> Iterator[Journal]:
        """Begin or continue the journal, as `Journal` says, inside of `locked`."""
        with Journal(self.path, fingerprint, source, boundaries) as journal:
            if journal.done:
                self.log(f"resuming after {self._noun} {journal.done:,}")
            try:
                yield journal
            finally:
                if self._stop.signal:
                    last = f"{self._noun} {journal.done:,}"
                    if journal.total is not None:
                        last += f" of {journal.total:,}"
                    self.log(
                        f"stopped by {self._stop.name} after {last}, all recorded in "
                        f"{journal.path}; run the same command again to continue"
                    )

    def record(
        self,
        journal: Journal,
        groups: Iterable[tuple[int, int]],
        results_of: Callable[[int, int], tuple[Iterable[ScoreResult], int]],
    ) -> int:
        """Append the results of all groups that the journal lacks, or until a signal.

        Args:
            journal: from `journal`.
            groups: (start, stop) of the results in each group.
            results_of: computes those of a group, and the number of tokens read.

        Returns:
            The number of tokens that this process has read.
        """
        noun, total = f"{self._noun}s", journal.total
        assert total is not None
        with (
            self._stop.deferred(),
            Progress(self._console, noun, total, journal.done) as progress,
        ):
            for start, stop in groups:
                if start < journal.done:
                    continue
                if self._stop.signal:
                    break
                results, tokens = results_of(start, stop)
                journal.append(results)
                progress.update(stop, tokens)
        self._stop.raise_if_requested()
        return progress.read

    def log(self, line: str) -> None:
        """Print a line as it is."""
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)
