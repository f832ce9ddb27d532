"""Results on the disk: whole documents only, whatever kills the process when.

Records are appended to a journal, a line a document, group by group; the file that was
asked for is made of it at the end, in one step.
"""

import filecmp
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxmem.train import files

_DOCUMENTS_AT_ONCE = 1000  # in a row group of a Parquet file


class Scores(NamedTuple):
    """A document's scores; numbers of its scored tokens, in order."""

    document: str
    token_ids: np.ndarray  # int32
    logprobs: np.ndarray  # float32, nats
    entropies: np.ndarray  # float32, nats; of the distribution before the token

    @property
    def perplexity(self) -> float | None:
        """e^(mean of -logprobs); None where no token is scored."""
        if not len(self.logprobs):
            return None
        return float(np.exp(-np.mean(self.logprobs, dtype=np.float64)))

    def record(self) -> dict[str, Any]:
        """The same as JSON-able values."""
        return {
            "document": self.document,
            "tokens": len(self.token_ids),
            "perplexity": self.perplexity,
            "token_ids": self.token_ids.tolist(),
            "logprobs": _digits(self.logprobs),
            "entropies": _digits(self.entropies),
        }


def _digits(numbers: np.ndarray) -> list[float]:
    """As few digits as tell float32 numbers apart."""
    return [float(f"{number:.9g}") for number in numbers.tolist()]


class Journal:
    """The journal of one output file.

    Args:
      out: the file that is to be, `.jsonl` or `.parquet`.
      fingerprint: of all that the scores depend on.
      source: the documents' file as it was named; a journal that is continued keeps
        its first name.
      boundaries: numbers of documents after which a group ends, from 0 to all of them;
        a journal is continued after one of them.

    Attributes:
      done: documents that need not be scored again.
      source: the name under which documents are recorded.

    Raises:
      ValueError: the file exists, or the journal is of other work.
    """

    def __init__(
        self, out: Path, fingerprint: str, source: str, boundaries: Iterable[int]
    ):
        check_suffix(out)
        self.out, self.path = out, out.with_name(out.name + ".unfinished")
        self._made = out.with_name(out.name + ".made")
        self.done, self.source = 0, source
        ends = set(boundaries)
        head = json.dumps({"fingerprint": fingerprint, "source": source})
        if self.path.exists():
            self._continue(fingerprint, head, ends)
        if out.exists() and (not self.path.exists() or self.done < max(ends)):
            raise ValueError(f"{out}: exists; delete it or name another --out")
        if not self.path.exists():
            files.write_whole(self.path, head + "\n")
        self._file = files.Appender(self.path)

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _continue(self, fingerprint: str, head: str, boundaries: set[int]) -> None:
        """Cut off what is after the last whole group."""
        end, count = 0, -1  # the head is no document
        with open(self.path, "rb") as file:
            first = file.readline()
            if not file.readline().endswith(b"\n"):  # ended before the first document
                files.write_whole(self.path, head + "\n")
                return
            self.source = self._source_of(first, fingerprint)
            file.seek(0)
            for line in file:
                if not line.endswith(b"}\n") or b"\0" in line:  # truncated, or NULs
                    break
                count += 1
                if count in boundaries:
                    end, self.done = file.tell(), count
        os.truncate(self.path, end)

    def _source_of(self, head: bytes, fingerprint: str) -> str:
        """Return the data's name from a journal's first line, if its work is ours."""
        try:
            saved = json.loads(head)
            if saved["fingerprint"] == fingerprint:
                return saved["source"]
        except (ValueError, LookupError, TypeError):
            pass
        raise ValueError(
            f"{self.path}: unfinished scores of other documents, another "
            "checkpoint or other options; delete it or name another --out"
        )

    def append(self, scores: Iterable[Scores]) -> None:
        """Add a group of documents; when it returns, a kill cannot lose them.

        Raises:
            WriteError: the disk is full; earlier groups are unchanged.
        """
        lines = [json.dumps(made.record()) + "\n" for made in scores]
        with files.write_errors(self.path):
            self._file.add("".join(lines).encode())
            self._file.flush()
            self._file.sync()
        self.done += len(lines)

    def records(self) -> Iterator[dict[str, Any]]:
        """All documents so far, in order."""
        with open(self.path, encoding="utf-8") as file:
            next(file)
            for line in file:
                yield json.loads(line)

    def finish(self) -> None:
        """Write the output file, then remove the journal.

        After a kill between the two, the file exists already, with the same content.

        Raises:
            ValueError: a file with another content exists.
            WriteError: the file cannot be written; the journal is unchanged.
        """
        with files.write_errors(self.out):
            try:
                self._write_out()
                if self.out.exists() and not filecmp.cmp(self._made, self.out, False):
                    raise ValueError(
                        f"{self.out}: exists, and differs from the scores in "
                        f"{self.path}; delete one of them"
                    )
                os.replace(self._made, self.out)
                files.sync_directory(self.out.parent)
            finally:
                self._made.unlink(missing_ok=True)
        self.path.unlink()

    def _write_out(self) -> None:
        if self.out.suffix == ".parquet":
            _write_parquet(self._made, self.records())
        else:
            with open(self.path, "rb") as journal, open(self._made, "wb") as file:
                next(journal)
                file.writelines(journal)
        with open(self._made, "rb+") as file:
            files.sync(file.fileno())


def check_suffix(out: Path) -> None:
    """Check the file name of the output.

    Raises:
        ValueError: it does not end in .jsonl or .parquet.
    """
    if out.suffix not in (".jsonl", ".parquet"):
        raise ValueError(f"--out must be a .jsonl or .parquet file, got {out}")


def check_parquet() -> None:
    """Import what writes Parquet: now, rather than after an hour's work."""
    import pyarrow.parquet  # noqa: F401


def _write_parquet(path: Path, records: Iterator[dict[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema(
        [
            ("document", pa.string()),
            ("tokens", pa.int32()),
            ("perplexity", pa.float64()),
            ("token_ids", pa.list_(pa.int32())),
            ("logprobs", pa.list_(pa.float32())),
            ("entropies", pa.list_(pa.float32())),
        ]
    )
    with pq.ParquetWriter(path, schema) as writer:
        held: list[dict[str, Any]] = []
        for record in records:
            held.append(record)
            if len(held) == _DOCUMENTS_AT_ONCE:
                writer.write_table(pa.Table.from_pylist(held, schema))
                held = []
        writer.write_table(pa.Table.from_pylist(held, schema))
