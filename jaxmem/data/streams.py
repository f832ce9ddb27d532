"""Batches from several streams of documents, of which a process reads only its own.

A stream is every n-th document, packed and shuffled separately. It gives the same rows
of each batch in any process, so the batches equal those of a single process.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tokenizers

from jaxmem.base import processes
from jaxmem.data import documents
from jaxmem.data.documents import Batch, BatchIterator, DataConfig
from jaxmem.data.reader import RecordReader


class StreamIterator(Iterator[Batch]):
    """Batches [B, T] in which only the rows of the given streams are filled."""

    def __init__(self, streams: dict[int, BatchIterator], config: DataConfig):
        self._streams, self._config = streams, config

    def __next__(self) -> Batch:
        config = self._config
        shape = config.batch_size, config.sequence_length
        each = config.batch_size // config.streams
        batch = Batch(*(np.zeros(shape, np.int32) for _ in Batch._fields))
        for i, stream in self._streams.items():
            for whole, part in zip(batch, next(stream), strict=True):
                whole[i * each : (i + 1) * each] = part
        return batch

    def get_state(self) -> dict[str, Any]:
        """Return the positions of all streams, including those of other processes."""
        return processes.share(
            {str(i): stream.get_state() for i, stream in self._streams.items()}
        )

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from the result of `get_state`, with any number of processes.

        Raises:
            DataError: the state belongs to other data or to other settings.
        """
        for i, stream in self._streams.items():
            if str(i) not in state:
                raise documents.DataError(
                    f"the saved position has no stream {i}: data.streams is not what "
                    "it was; restore it, or start a new run"
                )
            stream.set_state(state[str(i)])


def batches(
    config: DataConfig,
    tokenizer: tokenizers.Tokenizer,
    rows: Sequence[int],
    reader: RecordReader | None = None,
) -> BatchIterator | StreamIterator:
    """`documents.batches` for training, of which this process reads some rows alone.

    Raises:
        DataError: as `documents.batches`; or a stream has rows for this process and
            rows for other processes only.
    """
    if config.streams == 1 and len(rows) == config.batch_size:
        return documents.batches(config, tokenizer, reader=reader)
    wanted = _wanted(config.batch_size, config.streams, rows)
    if wanted is None:
        size = config.batch_size
        enough = next(
            n for n in range(1, size + 1) if not size % n and _wanted(size, n, rows)
        )
        raise documents.DataError(
            f"data.streams={config.streams} must be {enough} or a multiple of it that "
            f"divides data.batch_size={size}: this process needs {len(rows)} rows of a "
            "batch, and a stream has rows for it alone"
        )
    iterators = {
        i: documents.batches(config, tokenizer, stream=i, reader=reader) for i in wanted
    }
    return StreamIterator(iterators, config)


def _wanted(size: int, streams: int, rows: Sequence[int]) -> list[int] | None:
    """The streams of these rows of a batch; None if they have other rows, too."""
    each = size // streams
    wanted = sorted({row // each for row in rows})
    return wanted if len(wanted) * each == len(rows) else None


def stacked(batches: Iterator[Batch], count: int) -> Batch:
    """The next micro-batches of a step, `[count, B, T]` each array."""
    taken = [next(batches) for _ in range(count)]
    return Batch(*(np.stack(arrays) for arrays in zip(*taken, strict=True)))
