"""Packed rows: each epoch in rows of its own, sources by weights, resumable batches.

    pieces of an epoch, shuffled -> rows of at most T tokens -> batches [B, T]

A row never holds pieces of two epochs or, with weights, of two sources: an epoch ends
with rows that are not full. A batch may hold rows of two epochs.
"""

import collections
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import grain
import numpy as np

from jaxmem.base import messages
from jaxmem.data import mixing
from jaxmem.data.config import DataConfig
from jaxmem.data.encoding import NO_LABEL
from jaxmem.data.records import DataError

# Rows that first-fit packing fills at a time: more rows waste fewer tokens on padding
# (0.8% of the standard library's text at 512 tokens a row) and delay the first batch.
ROWS_OPEN = 256
# Of saved positions. Those of format 1 have no number: several epochs shared rows.
_FORMAT = 2
_NAMED = 1_000  # most files whose digests a state has

Row = dict[str, np.ndarray]


class Batch(NamedTuple):
    """Packed rows: int32 arrays, all `[B, T]`."""

    tokens: np.ndarray  # input ids
    labels: np.ndarray  # the token that follows; -1 where no loss is wanted
    segment_ids: np.ndarray  # 1, 2, ... per document in the row; 0 is padding
    positions: np.ndarray  # position within the segment, from 0


def to_batch(rows: Row) -> Batch:
    """The batch of rows that are stacked, [B, T] each array."""
    segment_ids = rows["tokens_segment_ids"]
    return Batch(
        tokens=rows["tokens"],  # padded with 0, which is <pad>
        labels=np.where(segment_ids > 0, rows["labels"], np.int32(NO_LABEL)),
        segment_ids=segment_ids,
        positions=rows["tokens_positions"],
    )


class Epochs(Iterator[Row]):
    """Packed rows of one source, each epoch with every piece once.

    Args:
        pieces: returns the pieces of an epoch, by its number from 0, in their order.
        config: the length of a row, and the seed of the rows' order.
        columns: keys of pieces beside `tokens` and `labels`, [N, ...] of N tokens.
        limit: number of epochs; None never ends.
        name: of the pieces, for errors.

    Raises:
        DataError: an epoch has no piece.
    """

    def __init__(
        self,
        pieces: Callable[[int], grain.IterDataset],
        config: DataConfig,
        *,
        columns: Sequence[str] = (),
        limit: int | None = None,
        name: str = "data.source",
    ):
        self._pieces, self._config, self._columns = pieces, config, columns
        self._limit, self._name = limit, name
        self.ended = False
        self._start(0)

    def _start(self, epoch: int) -> None:
        self.epoch, self.ended, self._is_empty = epoch, False, True
        self._rows = iter(self._packed(epoch))

    def _packed(self, epoch: int) -> grain.IterDataset:
        length, columns = self._config.sequence_length, self._columns
        return grain.experimental.FirstFitPackIterDataset(
            self._pieces(epoch),
            length_struct=dict.fromkeys(("tokens", "labels", *columns), length),
            # One open row keeps the order of the pieces.
            num_packing_bins=ROWS_OPEN if self._config.shuffle else 1,
            seed=self._config.seed + epoch,
            shuffle_bins=self._config.shuffle,
            meta_features=("labels", *columns),
        )

    def row(self) -> Row | None:
        """The next row of this epoch; None at its end."""
        if self.ended:
            return None
        row = next(self._rows, None)
        if row is None:
            if self._is_empty:
                raise DataError(f"{self._name}: an epoch contains no record")
            self.ended = True
        self._is_empty = False
        return row

    def advance(self) -> None:
        """Begin the next epoch."""
        self._start(self.epoch + 1)

    def __next__(self) -> Row:
        while (row := self.row()) is None:
            if self.epoch + 1 == self._limit:
                raise StopIteration
            self.advance()
        return row

    def get_state(self) -> dict[str, Any]:
        """Return the position after the last row, as JSON-able values."""
        rows = self._rows.get_state()
        return {"epoch": self.epoch, "ended": self.ended, "rows": rows}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a position that `get_state` returned."""
        self._start(state["epoch"])
        self.ended, self._is_empty = state["ended"], False
        self._rows.set_state(state["rows"])


class Sources(Iterator[Row]):
    """Rows of sources whose numbers of pieces are in proportion to weights."""

    def __init__(self, sources: Sequence[Epochs], weights: Sequence[float] = (1.0,)):
        self._sources = sources
        self._shares = [weight / math.fsum(weights) for weight in weights]
        self._counts = [0] * len(sources)  # pieces taken of each source

    def _sources_by_lag(self) -> list[int]:
        """Numbers of the sources, the one that is furthest behind its share first."""
        total = sum(self._counts) + 1
        behind = [
            share * total - n
            for share, n in zip(self._shares, self._counts, strict=True)
        ]
        return sorted(range(len(behind)), key=lambda i: -behind[i])

    def _count_pieces(self, source: int, row: Row) -> Row:
        self._counts[source] += int(row["tokens_segment_ids"].max())
        return row

    def __next__(self) -> Row:
        source = self._sources_by_lag()[0]
        return self._count_pieces(source, next(self._sources[source]))

    def row(self) -> Row | None:
        """The next row of a source whose epoch has not ended; None without any."""
        for source in self._sources_by_lag():
            if (row := self._sources[source].row()) is not None:
                return self._count_pieces(source, row)
        return None

    def sizes(self) -> list[tuple[int, int]]:
        """(rows, pieces) in the rest of each source's epoch, which is read for it."""
        counts = []
        for source in self._sources:
            pieces = [
                int(row["tokens_segment_ids"].max()) for row in iter(source.row, None)
            ]
            counts.append((len(pieces), sum(pieces)))
        return counts

    def ended(self) -> list[bool]:
        """True for each source whose present epoch has no row left."""
        return [source.ended for source in self._sources]

    def advance(self, source: int) -> None:
        """Begin the next epoch of a source."""
        self._sources[source].advance()

    def epochs(self) -> list[int]:
        """Numbers of the sources' present epochs, from 0."""
        return [source.epoch for source in self._sources]

    def get_state(self) -> dict[str, Any]:
        """Return the position after the last row, as JSON-able values."""
        sources = [source.get_state() for source in self._sources]
        return {"counts": list(self._counts), "sources": sources}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a position that `get_state` returned."""
        self._counts = list(state["counts"])
        for source, own in zip(self._sources, state["sources"], strict=True):
            source.set_state(own)


class BatchIterator(Iterator[Any]):
    """Batches of packed rows; resumable, and its state is plain JSON.

    The state carries a fingerprint of the tokens and of the settings that order them:
    a run never continues in the middle of other data.

    Args:
        rows: the packed rows.
        size: rows of a batch (B); a last batch of fewer is filled up with padding.
        fingerprint: identifies the data and the settings.
        batch_of: converts stacked rows to a batch; a `Batch` by default.
        files: digests of streamed files by name, parts of the fingerprint.

    Attributes:
        counted: numbers of documents, and of their tokens that the loss counts, in a
            pass over all of them; None where they are not known.
    """

    counted: tuple[int, int] | None = None

    def __init__(
        self,
        rows: Sources,
        size: int,
        fingerprint: str,
        batch_of: Callable[[Row], Any] = to_batch,
        files: Mapping[str, str] | None = None,
    ):
        self.rows, self._size = rows, size
        self._fingerprint, self._batch_of = fingerprint, batch_of
        self._files = files or {}

    def __next__(self) -> Any:
        rows: list[Row] = []
        while len(rows) < self._size and (row := next(self.rows, None)) is not None:
            rows.append(row)
        if not rows:
            raise StopIteration
        return self._stack_rows(rows)

    def of_epoch(self) -> Any:
        """The next batch without a row of another epoch; None if no row is left."""
        rows: list[Row] = []
        while len(rows) < self._size and (row := self.rows.row()) is not None:
            rows.append(row)
        return self._stack_rows(rows) if rows else None

    def _stack_rows(self, rows: list[Row]) -> Any:
        empty = {name: np.zeros_like(array) for name, array in rows[0].items()}
        rows = rows + [empty] * (self._size - len(rows))
        return self._batch_of({key: np.stack([x[key] for x in rows]) for key in empty})

    def rows_of_epochs(self) -> list[int]:
        """The number of rows of each epoch; this reads them all."""
        counted = collections.Counter(self.rows.epochs()[0] for _ in self.rows)
        return [counted[epoch] for epoch in range(len(counted))]

    def get_state(self) -> dict[str, Any]:
        """Return the position after the last batch, as JSON-able values."""
        return {
            "format": _FORMAT,
            "fingerprint": self._fingerprint,
            # A state stays small: it names no file if there are more.
            "files": [*self._files.values()] if len(self._files) <= _NAMED else [],
            "position": self.rows.get_state(),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a position that `get_state` returned, in any process.

        Raises:
          DataError: the state belongs to other data, to other settings or to a version
            that packed otherwise.
        """
        if state.get("format") != _FORMAT:
            raise DataError(
                "an older version of jaxmem saved the position in data.source, with "
                "rows that mix documents of several epochs; finish the run with that "
                "version, or start a new run (run.out_dir) from its weights"
            )
        for (name, digest), saved in zip(
            self._files.items(), state.get("files", []), strict=False
        ):
            if digest != saved:
                raise DataError(
                    f"data.source: {messages.name(name)} is not the file of the saved "
                    "position: this file, or a file before it, was replaced, "
                    "rewritten, added or removed; restore it, or start a new run "
                    "(run.out_dir)"
                )
        if state["fingerprint"] != self._fingerprint:
            raise DataError(
                "the saved position belongs to other data: the text of data.source "
                "(Python's own sources change with its version), its vocabulary, or a "
                "data.* setting has changed; restore it, or start a new run"
            )
        self.rows.set_state(state["position"])


def fingerprint(pieces: Iterable[Row], config: DataConfig, salt: bytes = b"") -> str:
    """Identify pieces, and the settings that order them."""
    layout = [
        config.sequence_length, config.batch_size, config.seed, ROWS_OPEN,
        *(config.weights or ()), *(() if config.shuffle else ("in order",)),
    ]  # fmt: skip
    digest = hashlib.sha256(json.dumps(layout).encode() + salt)
    for piece in pieces:
        digest.update(piece["tokens"].tobytes())
        digest.update(piece["labels"].tobytes())
    return digest.hexdigest()[:24]


def rows_by_source(
    sources: Sequence[int],
    pieces: Callable[[np.ndarray], Callable[[int], grain.IterDataset]],
    config: DataConfig,
    epochs: int | None,
    columns: Sequence[str] = (),
) -> Sources:
    """Packed rows of items, such as documents or blocks.

    Args:
        sources: number of each item's source.
        pieces: takes the numbers of a source's items, and returns the function `pieces`
            of `Epochs`.
        config: layout of the rows. Endless epochs heed `config.weights`; otherwise all
            items count as one source.
        epochs: passes over the items; None never ends.
        columns: as in `Epochs`.

    Raises:
        DataError: a source has no item.
    """
    weights, items = (1.0,), [np.arange(len(sources))]
    if config.weights is not None and epochs is None:
        weights = config.weights
        items = mixing.items_by_source(sources, len(weights))
    rows = [Epochs(pieces(x), config, columns=columns, limit=epochs) for x in items]
    return Sources(rows, weights)
