"""Scores of documents, as records of .jsonl and as rows of .parquet."""

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

# Documents in a row group of a Parquet file; fewer where a teacher's columns of them
# hold more numbers than this, 32 MiB of ids and log-probabilities.
_DOCUMENTS_AT_ONCE = 1000
_COLUMNS_AT_ONCE = 2**23


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


def write_parquet(file: BinaryIO, records: Iterator[dict[str, Any]]) -> None:
    """Write records as a Parquet file."""
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
