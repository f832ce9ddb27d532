"""Results on the disk: whole documents only, whatever kills the process when.

Records are appended to a journal, a line a document, group by group; the file that was
asked for is made of it at the end, in one step.
"""

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

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
      boundaries: numbers of documents after which a group ends, from 0; a journal is
        continued after one of them.

    Attributes:
      done: documents that need not be scored again.

    Raises:
      ValueError: the file exists, or the journal is of other work.
    """

    def __init__(self, out: Path, fingerprint: str, boundaries: Iterable[int]):
        if out.suffix not in (".jsonl", ".parquet"):
            raise ValueError(f"--out must be a .jsonl or .parquet file, got {out}")
        if out.exists():
            raise ValueError(f"{out}: exists; delete it or name another --out")
        self.out, self.path = out, out.with_name(out.name + ".unfinished")
        self._head = json.dumps({"fingerprint": fingerprint})
        self.done = 0
        out.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            self._continue(set(boundaries))
        else:
            self.path.write_text(self._head + "\n", "utf-8")
        self._file = open(self.path, "ab")

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _continue(self, boundaries: set[int]) -> None:
        """Cut off what is after the last whole group."""
        end, count = 0, -1  # the head is no document
        with open(self.path, "rb") as file:
            head = file.readline()
            if not file.readline().endswith(b"\n"):  # ended before the first document
                self.path.write_text(self._head + "\n", "utf-8")
                return
            if head.decode("utf-8", "replace").strip() != self._head:
                raise ValueError(
                    f"{self.path}: unfinished scores of other documents, another "
                    "checkpoint or other options; delete it or name another --out"
                )
            file.seek(0)
            for line in file:
                count += line.endswith(b"\n")
                if line.endswith(b"\n") and count in boundaries:
                    end, self.done = file.tell(), count
        os.truncate(self.path, end)

    def append(self, scores: Iterable[Scores]) -> None:
        """Add a group of documents; when it returns, a kill cannot lose them."""
        lines = [json.dumps(made.record()) + "\n" for made in scores]
        self._file.write("".join(lines).encode())
        self._file.flush()
        os.fsync(self._file.fileno())

    def records(self) -> Iterator[dict[str, Any]]:
        """All documents so far, in order."""
        with open(self.path, encoding="utf-8") as file:
            next(file)
            for line in file:
                yield json.loads(line)

    def finish(self) -> None:
        """Make the output file, and remove the journal."""
        made = self.out.with_name(self.out.name + ".made")
        if self.out.suffix == ".parquet":
            _write_parquet(made, self.records())
        else:
            with open(self.path, "rb") as journal, open(made, "wb") as file:
                next(journal)
                file.writelines(journal)
        os.replace(made, self.out)
        self.path.unlink()


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
