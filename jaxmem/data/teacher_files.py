"""A teacher's columns, from `jaxmem score --top-k` or `--sample-ids`, as batches.

A label's index is its number among all scored tokens of the files. Rows are packed with
indices in place of labels, which then look up a token's label and columns.
"""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxmem.base import messages
from jaxmem.data.config import DataConfig
from jaxmem.data.documents import NO_LABEL, Batch, BatchIterator, packed_batches
from jaxmem.data.record_reader import decides_loss
from jaxmem.data.records import DataError, opened_parquet
from jaxmem.data.source_files import numbered_files
from jaxmem.data.texts import split

_MAKE = "write it by: jaxmem score TEACHER data.jsonl --eos --top-k 64 --out X.parquet"
_LONGEST = 2**31 - 1  # indices are int32


class TeacherFile(NamedTuple):
    """Documents, and a teacher's columns of their tokens."""

    documents: list[tuple[np.ndarray, int]]  # (ids, number of the prompt's ids)
    ids: np.ndarray  # int32 [N, K], of every scored token
    logprobs: np.ndarray | None  # float32 [N, K]; None for ids that were drawn
    temperature: float
    vocabulary: str  # `checkpoints.vocabulary_digest` of the teacher
    sources: Sequence[int] = ()  # number of each document's entry in `data.source`


class TeacherBatch(NamedTuple):
    """A micro-batch [B, T], and its columns [B, T, K]."""

    batch: Batch
    ids: np.ndarray  # -1 where there is no label
    logprobs: np.ndarray | None


def read(source: str | tuple[str, ...]) -> TeacherFile:
    """The content of the files of `data.source`, in order.

    Raises:
        DataError: a file is not of `jaxmem score`, or two are of different options.
    """
    paths = numbered_files(source, "data.source")
    parts: list[TeacherFile] = []
    for _, path in paths:
        if (part := read_part(path)) is None:
            raise DataError(f"data.source: {path} contains no document")
        parts.append(part)
        check_alike(parts[0], part)
    ids = np.concatenate([part.ids for part in parts])
    if len(ids) > _LONGEST:
        raise DataError(f"data.source: {len(ids):,} scored tokens are too many")
    columns = [part.logprobs for part in parts if part.logprobs is not None]
    logprobs = np.concatenate(columns) if columns else None
    documents = [document for part in parts for document in part.documents]
    sources = [
        number
        for (number, _), part in zip(paths, parts, strict=True)
        for _ in part.documents
    ]
    return parts[0]._replace(
        documents=documents, ids=ids, logprobs=logprobs, sources=sources
    )


def check_alike(first: TeacherFile, part: TeacherFile) -> None:
    """Raise a DataError where two parts are of different teachers or options."""
    if _options_of(part) != _options_of(first):
        raise DataError(
            "data.source: the files were written with different teachers or options: "
            f"{_options_of(first)} and {_options_of(part)}"
        )


def _options_of(part: TeacherFile) -> dict[str, Any]:
    name = "sampled_ids" if part.logprobs is None else "top_ids"
    return {
        name: part.ids.shape[1],
        "temperature": part.temperature,
        "vocabulary": part.vocabulary,
    }


def read_part(path: Path, row_group: int | None = None) -> TeacherFile | None:
    """Read a file, or one row group; return None if it has no document.

    Raises:
        DataError: the file is not of `jaxmem score`.
    """
    if path.suffix != ".parquet":
        raise DataError(f"data.source: {path} must be a .parquet file; {_MAKE}")
    with opened_parquet(path, "data.source") as file:
        names = set(file.schema_arrow.names)
        kind = "top_ids" if "top_ids" in names else "sampled_ids"
        columns = ["prompt_ids", "token_ids", kind, "temperature", "vocabulary"]
        columns += ["top_logprobs"] if kind == "top_ids" else []
        if missing := [name for name in columns if name not in names]:
            raise DataError(
                f"data.source: {path} has no column {missing[0]!r}; {_MAKE}"
            )
        if refused := sorted(filter(decides_loss, names)):
            raise DataError(
                f"data.source: {path}: jaxmem does not use the column "
                f"{messages.short(refused[0])} in files of a teacher; {_MAKE}"
            )
        if row_group is None:
            table, where = file.read(columns=columns), str(path)
        else:
            table = file.read_row_group(row_group, columns=columns)
            where = f"{path}: row group {row_group + 1}"
    return _parse_table(where, kind, table) if table.num_rows else None


def _parse_table(where: str, kind: str, table: Any) -> TeacherFile:
    prompts, texts = (_split_lists(table[name]) for name in ("prompt_ids", "token_ids"))
    tokens = sum(map(len, texts))
    logprobs = None
    if kind == "top_ids":
        logprobs = _read_matrix(where, "top_logprobs", table, tokens, np.float32)
    return TeacherFile(
        [(np.concatenate(x), len(x[0])) for x in zip(prompts, texts, strict=True)],
        _read_matrix(where, kind, table, tokens, np.int32),
        logprobs,
        _read_constant(where, "temperature", table),
        _read_constant(where, "vocabulary", table),
    )


def _split_lists(column: Any) -> list[np.ndarray]:
    """The rows of a column of lists of ids."""
    joined = column.combine_chunks()
    values = np.asarray(joined.flatten(), np.int32)
    lengths = np.asarray(joined.value_lengths().fill_null(0), np.int64)
    return np.split(values, np.cumsum(lengths)[:-1])


def _read_matrix(
    where: str, name: str, table: Any, rows: int, dtype: Any
) -> np.ndarray:
    """A column of lists of equal lists, as [rows, K]."""
    lists = table[name].combine_chunks().flatten()
    values = np.asarray(lists.flatten(), dtype)
    widths = np.unique(np.asarray(lists.value_lengths(), np.int64))
    if len(lists) != rows or len(widths) > 1:
        raise DataError(
            f"data.source: {where}: {name!r} must have as many entries as "
            f"'token_ids', all of the same length; {_MAKE}"
        )
    return values.reshape(rows, -1)


def _read_constant(where: str, name: str, table: Any) -> Any:
    """The value of a column that is the same in every row."""
    values = table[name].unique().to_pylist()
    if len(values) != 1 or values[0] is None:
        column = f"data.source: {where}: {name!r}"
        raise DataError(messages.must_be(column, "one value", values[:2]))
    return values[0]


class _Scored(NamedTuple):
    """A document with scored tokens."""

    source: int  # number of its entry in `data.source`
    tokens: np.ndarray  # inputs
    indices: np.ndarray  # of the labels; -1 in the prompt


class Examples(Iterator[TeacherBatch]):
    """Packed micro-batches with a teacher's columns; resumable."""

    def __init__(
        self,
        file: TeacherFile,
        config: DataConfig,
        part: Literal["train", "evaluation"] = "train",
        epochs: int | None = None,
    ):
        self._file, self._config = file, config
        numbered = list(self._pieces(part == "evaluation"))
        if not numbered:
            raise DataError(
                f"data.held_out={config.held_out} of the {len(file.documents)} "
                f"documents leaves no document for {part}; change it or add documents"
            )
        arrays = file.ids, file.logprobs
        salt = b"".join(_digest(x) for x in arrays if x is not None)
        pieces = [piece for _, piece in numbered]
        sources = [source for source, _ in numbered]
        self._rows: BatchIterator = packed_batches(
            pieces, config, epochs, sources, salt
        )
        self.get_state, self.set_state = self._rows.get_state, self._rows.set_state
        self.rows_of_epochs = self._rows.rows_of_epochs
        self.sizes = self._rows.rows.sizes
        self._labels = np.concatenate([ids[n:] for ids, n in file.documents])

    def _pieces(self, evaluation: bool) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        length = self._config.sequence_length
        for document in self._split_documents()[evaluation]:
            for cut in range(0, len(document.tokens), length):
                span = slice(cut, cut + length)
                piece = {"tokens": document.tokens, "labels": document.indices}
                yield document.source, {name: x[span] for name, x in piece.items()}

    def _split_documents(self) -> Sequence[list[_Scored]]:
        """(training, held-out) documents that have scored tokens."""
        documents: list[_Scored] = []
        first = 0  # index of the document's first label
        entries = zip(self._file.documents, self._file.sources, strict=True)
        for (ids, prompt), source in entries:
            scored = len(ids) - prompt
            indices = np.full(len(ids) - 1, NO_LABEL, np.int32)
            indices[prompt - 1 :] = np.arange(first, first + scored)
            first += scored
            if scored:
                documents.append(_Scored(source, ids[:-1], indices))
        keys = [hashlib.sha256(x.tokens.tobytes()).digest() for x in documents]
        return split(documents, keys, self._config.held_out)

    def __next__(self) -> TeacherBatch:
        batch = next(self._rows)
        indices = batch.labels
        live = indices >= 0
        labels = np.where(live, self._labels[indices], np.int32(NO_LABEL))
        ids = np.where(live[..., None], self._file.ids[indices], np.int32(NO_LABEL))
        logprobs = self._file.logprobs
        if logprobs is not None:
            logprobs = np.where(live[..., None], logprobs[indices], np.float32(0))
        return TeacherBatch(batch._replace(labels=labels), ids, logprobs)


def _digest(array: np.ndarray) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(array)).digest()


def check(
    file: TeacherFile, temperature: float, divergence: str, vocabulary: str
) -> None:
    """Raise a DataError unless a student with these options can learn from a file."""
    if file.vocabulary != vocabulary:
        raise DataError(
            "data.source: the tokenizer of the file's teacher differs from the "
            "student's; score the data with a teacher that has the student's tokenizer"
        )
    if file.temperature != temperature:
        raise DataError(
            f"distill.temperature={temperature:g} differs from the temperature with "
            "which data.source was written, jaxmem score --temperature "
            f"{file.temperature:g}"
        )
    if file.logprobs is None and divergence != "forward_kl":
        raise DataError(
            f"distill.divergence={divergence!r} needs log-probabilities, which jaxmem "
            "score --top-k writes; drawn ids (--sample-ids) are for 'forward_kl' only"
        )


def check_ids(file: TeacherFile, rows: int, source: object) -> None:
    """Raise a DataError if a teacher's ids exceed the student's `rows` of its head.

    Models of one family may pad one vocabulary to different sizes.
    """
    beyond = np.unique(file.ids[file.ids >= rows])
    if len(beyond):
        raise DataError(
            f"data.source={messages.short(source)}: {len(beyond):,} of the teacher's "
            f"ids are beyond the student's {rows:,} entries, such as {beyond[0]}: the "
            "teacher's vocabulary has more padding; take a student with as many "
            "entries, or fewer columns (--top-k)"
        )
