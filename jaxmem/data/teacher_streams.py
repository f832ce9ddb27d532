"""A teacher's columns, of files in memory or read by row groups.

    row groups -> pieces with their columns -> shuffled in a window, packed rows

Where `data.streaming`, a row group, a window of pieces and the rows that are being
packed are held, whatever the size of the files.
"""

from collections.abc import Iterator
from typing import Literal

import numpy as np

from jaxmem.base import messages
from jaxmem.data import block_files
from jaxmem.data.block_files import FileBlocks
from jaxmem.data.config import DataConfig
from jaxmem.data.documents import NO_LABEL, BatchIterator, streamed_fingerprint
from jaxmem.data.packed import to_batch
from jaxmem.data.records import DataError
from jaxmem.data.source_files import held_out_files
from jaxmem.data.teacher_files import (
    Examples,
    TeacherBatch,
    TeacherFile,
    check_alike,
    read,
    read_part,
)

_COLUMNS = ("ids", "logprobs")


def opened(config: DataConfig) -> TeacherFile:
    """The content of `data.source`, or of its first row group if it is streamed.

    Raises:
        DataError: a file is not of `jaxmem score`, or holds no document.
    """
    if held_out := held_out_files(config.source, "data.source"):
        raise DataError(
            f"data.source: {messages.name(str(held_out[0][1]))} would be held out, "
            "but all files of a teacher are trained on; name the others by a glob, "
            "such as DIR/train*.parquet"
        )
    if not config.streaming:
        return read(config.source)
    blocks = FileBlocks(config.source, "data.source")
    for block in blocks:
        if (file := read_part(*block)) is not None:
            return file
    raise DataError(f"data.source: {config.source!r} contains no document")


def examples(
    file: TeacherFile,
    config: DataConfig,
    part: Literal["train", "evaluation"] = "train",
    epochs: int | None = None,
) -> "Examples | StreamedExamples":
    """Packed micro-batches with a teacher's columns, endless if `epochs` is None."""
    kind = StreamedExamples if config.streaming else Examples
    return kind(file, config, part, epochs)


class StreamedExamples(Iterator[TeacherBatch]):
    """Packed micro-batches of row groups that are read one at a time; resumable.

    Whole row groups are held out. All must have the teacher and options of the first.

    **Memory**: 8·K bytes (of drawn ids 4·K) per token of two row groups, of
    `data.shuffle_window` pieces of documents, and of 512 rows: those that are being
    packed, and those that have been.
    """

    def __init__(
        self,
        file: TeacherFile,
        config: DataConfig,
        part: Literal["train", "evaluation"] = "train",
        epochs: int | None = None,
    ):
        blocks = FileBlocks(config.source, "data.source")
        numbers = block_files.blocks_of_split(blocks, config, part)
        names = _COLUMNS[: 1 if file.logprobs is None else 2]
        # Later row groups are compared with its options alone: drop its documents.
        first = file._replace(documents=[], ids=file.ids[:0].copy())

        def read(number: int) -> Iterator[dict[str, np.ndarray]]:
            with blocks.unchanged(number):
                part = read_part(*blocks[number])
            if part is not None:
                check_alike(first, part)
                yield from _pieces(part, config.sequence_length)

        options = numbers, blocks, read, config, epochs, names
        files = blocks.fingerprints()
        self._rows = BatchIterator(
            block_files.packed_rows(*options),
            config.batch_size,
            streamed_fingerprint(files, config, [part, "teacher"]),
            _to_example,
            files,
        )
        self.rows_of_epochs = self._rows.rows_of_epochs
        self.sizes = self._rows.rows.sizes
        self.get_state, self.set_state = self._rows.get_state, self._rows.set_state

    def __next__(self) -> TeacherBatch:
        return next(self._rows)


def _to_example(packed: dict[str, np.ndarray]) -> TeacherBatch:
    batch, logprobs = to_batch(packed), packed.get("logprobs")
    ids = np.where(batch.labels[..., None] >= 0, packed["ids"], np.int32(NO_LABEL))
    return TeacherBatch(batch, ids, logprobs)


def _pieces(file: TeacherFile, length: int) -> Iterator[dict[str, np.ndarray]]:
    row = 0
    for ids, prompt in file.documents:
        scored = len(ids) - prompt
        values = {
            "tokens": ids[:-1],
            "labels": _align_to_response(ids[prompt:], prompt, NO_LABEL),
        }
        for name in _COLUMNS:
            if (columns := getattr(file, name)) is not None:
                values[name] = _align_to_response(
                    columns[row : row + scored], prompt, 0
                )
        row += scored
        for cut in range(0, len(ids) - 1 if scored else 0, length):
            yield {name: x[cut : cut + length] for name, x in values.items()}


def _align_to_response(values: np.ndarray, prompt: int, fill: int) -> np.ndarray:
    """Values of a response, each at the position that predicts its token; a copy."""
    before = np.full((prompt - 1, *values.shape[1:]), fill, values.dtype)
    return np.concatenate([before, values])
