"""Crash-safe results on disk: whole documents only, whenever the process is killed.

Records are appended to a journal, one line per document, group by group. At the end,
the output file is created from the journal in one atomic step.
"""

import filecmp
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import numpy as np

from jaxmem.base import files

# Documents in a row group of a Parquet file; fewer where a teacher's columns of them
# hold more numbers than this, 32 MiB of ids and log-probabilities.
_DOCUMENTS_AT_ONCE = 1000
_COLUMNS_AT_ONCE = 2**23
_HEAD = b'{"fingerprint"'  # of a journal


class ScoreResult(Protocol):
    """Results for one document or prompt."""

    def record(self) -> dict[str, Any]:
        """The result as JSON-able values."""
        ...


class Scores(NamedTuple):
    """The scores of a document; arrays over its scored tokens, in order."""

    document: str
    token_ids: np.ndarray  # int32
    logprobs: np.ndarray  # float32, nats
    entropies: np.ndarray  # float32, nats; of the distribution that predicts the token
    teacher: Mapping[str, Any] | None = None  # of a student; see `teacher_record`

    @property
    def perplexity(self) -> float | None:
        """e^(mean of -logprobs); None if no token is scored."""
        if not len(self.logprobs):
            return None
        return float(np.exp(-np.mean(self.logprobs, dtype=np.float64)))

    def record(self) -> dict[str, Any]:
        """The scores as JSON-able values."""
        return {
            "document": self.document,
            "tokens": len(self.token_ids),
            "perplexity": self.perplexity,
            "token_ids": self.token_ids.tolist(),
            "logprobs": _digits(self.logprobs),
            "entropies": _digits(self.entropies),
            **({} if self.teacher is None else teacher_record(self.teacher)),
        }


def teacher_record(teacher: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that a student learns from, as JSON-able values; arrays as lists."""
    record = {}
    for name, value in teacher.items():
        if isinstance(value, np.ndarray):
            floats = np.issubdtype(value.dtype, np.floating)
            many = floats and value.ndim == 2
            value = [_digits(row) for row in value] if many else value.tolist()
        record[name] = value
    return record


def _digits(numbers: np.ndarray) -> list[float]:
    """The numbers with nine significant digits, which identify any float32."""
    return [float(f"{number:.9g}") for number in numbers.tolist()]


Keep = Callable[[Iterator[dict[str, Any]]], Iterable[Mapping[str, Any]]]


class Journal:
    """The journal of one output file.

    Args:
        out: path of the future output file, `.jsonl` or `.parquet`.
        fingerprint: hash of everything that the results depend on.
        source: name of the documents' file; a journal that is continued keeps its first
            name.
        boundaries: numbers of documents after which a group ends, from 0 to the number
            of all documents; a journal is continued after one of them.

    Attributes:
        done: number of documents whose results are recorded.
        source: the name under which documents are recorded.

    Raises:
        ValueError: the output file exists, or the journal belongs to other inputs.
    """

    def __init__(
        self, out: Path, fingerprint: str, source: str, boundaries: Iterable[int]
    ):
        check_suffix(out)
        self.out, self.path = out, out.with_name(out.name + ".unfinished")
        self._partial = out.with_name(out.name + ".made")  # renamed to `out` when whole
        self.done, self.source = 0, source
        ends = set(boundaries)
        head = json.dumps({"fingerprint": fingerprint, "source": source})
        if self.path.exists():
            self._continue(fingerprint, head, ends)
        elif os.path.lexists(self._partial):  # ours exists beside a journal only
            raise ValueError(
                f"{self._partial} exists already; move it, or name another --out"
            )
        if out.exists() and (not self.path.exists() or self.done < max(ends)):
            raise ValueError(f"{out} exists already; delete it, or name another --out")
        if not self.path.exists():
            files.write_whole(self.path, head + "\n")
        self._file = files.Appender(self.path)

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _continue(self, fingerprint: str, head: str, boundaries: set[int]) -> None:
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
                if count in boundaries:
                    end, self.done = file.tell(), count
        files.truncate(self.path, end)

    def _saved_source(self, head: bytes, fingerprint: str) -> str:
        """Return the data's name from a journal's first line; raise on a mismatch."""
        try:
            saved = json.loads(head)
            if saved["fingerprint"] == fingerprint:
                return saved["source"]
        except (ValueError, LookupError, TypeError):
            pass
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

    def finish(self, keep: Keep | None = None) -> None:
        """Write the output file, then remove the journal.

        `keep` returns the records of the output, of all records; None: all of them.

        If the process is killed between the two steps, the file already exists when the
        command is run again, with the same content.

        Raises:
            ValueError: a file with another content exists.
            WriteError: the file cannot be written; the journal is unchanged.
        """
        with files.write_errors(self.out):
            try:
                self._write_out(keep)
                same = not self.out.exists() or filecmp.cmp(
                    self._partial, self.out, False
                )
                if not same:
                    raise ValueError(
                        f"{self.out} exists, and differs from the results in "
                        f"{self.path}; delete one of them"
                    )
                os.replace(self._partial, self.out)
                files.sync_directory(self.out.parent)
            finally:
                self._partial.unlink(missing_ok=True)
        self.path.unlink()

    def _write_out(self, keep: Keep | None) -> None:
        if keep is not None:
            with self._new_file() as file:
                lines = (json.dumps(record) + "\n" for record in keep(self.records()))
                file.writelines(map(str.encode, lines))
        elif self.out.suffix == ".parquet":
            with self._new_file() as file:
                _write_parquet(file, self.records())
        else:
            with open(self.path, "rb") as journal, self._new_file() as file:
                next(journal)
                file.writelines(journal)
        with open(self._partial, "rb+") as file:
            files.sync(file.fileno())

    def _new_file(self) -> BinaryIO:
        flags = os.O_WRONLY | os.O_TRUNC
        return open(files.open_own(self._partial, flags), "wb")


def _is_head(line: bytes) -> bool:
    """True if a line is the beginning, perhaps cut off, of a journal's first line."""
    line = line.rstrip(b"\0\n")
    length = min(len(line), len(_HEAD))
    return line[:length] == _HEAD[:length]


def check_suffix(out: Path) -> None:
    """Check the file name of the output.

    Raises:
        ValueError: it does not end in .jsonl or .parquet.
    """
    if out.suffix not in (".jsonl", ".parquet"):
        raise ValueError(f"--out must be a .jsonl or .parquet file, got {out}")


def check_parquet() -> None:
    """Import pyarrow early, so that it cannot be found missing after an hour's work."""
    import pyarrow.parquet  # noqa: F401


def _write_parquet(file: BinaryIO, records: Iterator[dict[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    ids, numbers = pa.list_(pa.int32()), pa.list_(pa.float32())
    types = {
        "document": pa.string(),
        "tokens": pa.int32(),
        "perplexity": pa.float64(),
        "token_ids": ids,
        "logprobs": numbers,
        "entropies": numbers,
        "prompt_ids": ids,
        "top_ids": pa.list_(ids),
        "top_logprobs": pa.list_(numbers),
        "sampled_ids": pa.list_(ids),
        "temperature": pa.float64(),
        "vocabulary": pa.string(),
    }
    first = next(records, None)
    names = list(types)[:6] if first is None else [k for k in types if k in first]
    schema = pa.schema([(name, types[name]) for name in names])
    with pq.ParquetWriter(file, schema) as writer:
        held: list[dict[str, Any]] = []
        columns = 0
        for record in itertools.chain([] if first is None else [first], records):
            held.append(record)
            for name in ("top_ids", "top_logprobs", "sampled_ids"):
                columns += sum(map(len, record.get(name) or ()))
            if len(held) == _DOCUMENTS_AT_ONCE or columns >= _COLUMNS_AT_ONCE:
                writer.write_table(pa.Table.from_pylist(held, schema))
                held, columns = [], 0
        writer.write_table(pa.Table.from_pylist(held, schema))
