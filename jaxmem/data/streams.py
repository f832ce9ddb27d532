"""Batches from several streams of documents; each process reads only its own.

A stream is every n-th document, packed and shuffled separately. It gives the same rows
of each batch in any process, so the batches equal those of a single process. All
streams begin an epoch together: one that has fewer rows has padding until all have
ended, so that no document comes twice before another has come once.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tokenizers

from jaxmem.base import processes
from jaxmem.data import documents
from jaxmem.data.config import DataConfig
from jaxmem.data.encoding import NO_LABEL
from jaxmem.data.packed import Batch, BatchIterator
from jaxmem.data.record_reader import RecordReader
from jaxmem.data.records import DataError

# Micro-batches that are read at a time, after which processes tell each other which
# streams have ended their epochs. Sources by weights end theirs at any batch.
_ROUND = 16


class StreamIterator(Iterator[Batch]):
    """Batches [B, T] in which only the rows of this process's streams are filled."""

    def __init__(self, streams: dict[int, BatchIterator], config: DataConfig):
        self._streams, self._config = streams, config
        self._round = _ROUND if config.weights is None else 1
        self._start = self._positions()  # before the round
        self._batches: list[Batch] = []  # of the round
        self._taken = 0  # batches of the round

    def _positions(self) -> dict[str, Any]:
        return {str(i): stream.get_state() for i, stream in self._streams.items()}

    def __next__(self) -> Batch:
        while self._taken == len(self._batches):
            self._read()
        self._taken += 1
        return self._batches[self._taken - 1]

    def _read(self) -> None:
        """Read a round of this epoch: no batch, if it has ended in all streams."""
        self._start, self._taken = self._positions(), 0
        parts = {
            i: list(itertools.islice(iter(stream.of_epoch, None), self._round))
            for i, stream in self._streams.items()
        }
        own = {
            str(i): (len(parts[i]), stream.rows.ended())
            for i, stream in self._streams.items()
        }
        counts, ended = zip(*processes.share(own).values(), strict=True)
        for source, ends in enumerate(zip(*ended, strict=True)):
            if all(ends):
                for stream in self._streams.values():
                    stream.rows.advance(source)
        self._batches = [self._batch(parts, number) for number in range(max(counts))]

    def _batch(self, parts: Mapping[int, list[Batch]], number: int) -> Batch:
        shape = self._config.batch_size, self._config.sequence_length
        each = self._config.batch_size // self._config.streams
        batch = Batch(*(np.zeros(shape, np.int32) for _ in Batch._fields))
        for i, part in parts.items():
            rows = slice(i * each, (i + 1) * each)
            if number >= len(part):  # padding: the others have not ended the epoch
                batch.labels[rows] = NO_LABEL
                continue
            for whole, own in zip(batch, part[number], strict=True):
                whole[rows] = own
        return batch

    def get_state(self) -> dict[str, Any]:
        """Return the positions of all streams, including those of other processes."""
        return {"taken": self._taken, **processes.share(self._start)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of `get_state`, with any number of processes.

        Raises:
            DataError: the state belongs to other data or to other settings.
        """
        for i, stream in self._streams.items():
            if str(i) not in state:
                raise DataError(
                    f"the saved position has no stream {i}: data.streams has changed; "
                    "restore it, or start a new run"
                )
            stream.set_state(state[str(i)])
        self._start, self._batches, self._taken = self._positions(), [], 0
        if state["taken"]:
            self._read()
            self._taken = state["taken"]


def batches(
    config: DataConfig,
    tokenizer: tokenizers.Tokenizer,
    rows: Sequence[int],
    reader: RecordReader | None = None,
) -> BatchIterator | StreamIterator:
    """Training batches as of `documents.batches`, in which this process fills `rows`.

    Raises:
        DataError: as `documents.batches`; or a stream has rows for this process and
            rows for other processes only.
    """
    if config.streams == 1 and len(rows) == config.batch_size:
        return documents.batches(config, tokenizer, reader=reader)
    numbers = _streams_of_rows(config.batch_size, config.streams, rows)
    if numbers is None:
        size = config.batch_size
        enough = next(
            n
            for n in range(1, size + 1)
            if not size % n and _streams_of_rows(size, n, rows)
        )
        raise DataError(
            f"data.streams={config.streams} must be {enough} or a multiple of it that "
            f"divides data.batch_size={size}: each process reads its own rows of a "
            f"batch ({len(rows)} here), and a stream cannot be split between processes"
        )
    iterators = {
        i: documents.batches(config, tokenizer, stream=i, reader=reader)
        for i in numbers
    }
    return StreamIterator(iterators, config)


def _streams_of_rows(size: int, streams: int, rows: Sequence[int]) -> list[int] | None:
    """The streams of `rows` of a batch; None if a stream has other rows, too."""
    each = size // streams
    numbers = sorted({row // each for row in rows})
    return numbers if len(numbers) * each == len(rows) else None


def lengths(
    config: DataConfig,
    tokenizer: tokenizers.Tokenizer,
    reader: RecordReader | None,
    epochs: int,
) -> list[float]:
    """The number of micro-batches of each epoch; this reads all epochs.

    It is no integer if a batch may hold rows of two epochs. `data.weights` have no
    effect.
    """
    if config.streams == 1:
        batches = documents.batches(config, tokenizer, epochs=epochs, reader=reader)
        return [rows / config.batch_size for rows in batches.rows_of_epochs()]
    each = config.batch_size // config.streams
    rows = [
        documents.batches(
            config, tokenizer, epochs=epochs, stream=i, reader=reader
        ).rows_of_epochs()
        for i in range(config.streams)
    ]
    return [math.ceil(max(of_epoch) / each) for of_epoch in zip(*rows, strict=True)]


def stacked(batches: Iterator[Batch], count: int) -> Batch:
    """The next micro-batches of a step, `[count, B, T]` each array."""
    taken = [next(batches) for _ in range(count)]
    return Batch(*(np.stack(arrays) for arrays in zip(*taken, strict=True)))
