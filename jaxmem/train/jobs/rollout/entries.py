"""Recorded entries of a rollout's tokens on the host, and in packed micro-batches."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxmem.head.maths.recorded import EMPTY, RecordedEntries
from jaxmem.packing import Packing
from jaxmem.train.jobs.rollout.packed import Completions


@dataclasses.dataclass(frozen=True, eq=False)
class RolloutEntries:
    """The entries that were recorded of each sampled token's softmax.

    They take 8·K + 16 bytes a token.
    """

    recorded: RecordedEntries  # arrays [M, ...] of all tokens of a rollout
    numbers: np.ndarray  # [N, R] row of `recorded` of each sampled token

    @classmethod
    def of_samples(cls, entries: RecordedEntries) -> "RolloutEntries":
        """The entries of a sampler, whose arrays have the leading axes [N, R]."""
        shape = np.shape(entries.logsumexp)
        rows = jax.tree.map(lambda x: np.reshape(x, (-1, *x.shape[2:])), entries)
        return cls(rows, _numbers(shape))

    @classmethod
    def of_packed(
        cls,
        completions: Completions,
        packed: Packing,
        outputs: Sequence[RecordedEntries],
    ) -> "RolloutEntries":
        """The entries that a forward pass recorded, one tree for each micro-batch."""
        numbers = _numbers(completions.sampled.shape)
        rows = no_entries((numbers.size,), outputs[0].k)
        places = packed.place(completions.spread(numbers, -1), -1)
        for place, output in zip(places, outputs, strict=True):
            _copy_rows(rows, place[place >= 0], output, place >= 0)
        return cls(rows, numbers)

    @property
    def logprobs(self) -> np.ndarray:
        """Log-probabilities [N, R] of the sampled tokens, as they were recorded."""
        rows = self.recorded
        return (rows.label_logit - rows.logsumexp)[self.numbers]

    def __getitem__(self, rows: np.ndarray) -> "RolloutEntries":
        """The entries of the sequences `rows`."""
        return dataclasses.replace(self, numbers=self.numbers[rows])

    def micro_batches(
        self, completions: Completions, packed: Packing, kept: np.ndarray | None = None
    ) -> Iterator[RecordedEntries]:
        """Yield the entries of each micro-batch, in arrays [B, T, ...].

        Only the tokens `kept` [N, R] have entries; None: all sampled ones.
        """
        numbers = self.numbers
        if kept is not None:
            numbers = np.where(kept, numbers, -1)
        for rows in packed.place(completions.spread(numbers, -1), -1):
            entries = no_entries(rows.shape, self.recorded.k)
            _copy_rows(entries, rows >= 0, self.recorded, rows[rows >= 0])
            yield entries


def bytes_of_token(k: int) -> int:
    """Bytes of a token's entries: columns and logits, and four numbers."""
    return 8 * k + 16


def entry_shapes(shape: tuple[int, ...], k: int) -> RecordedEntries:
    """Shapes of the entries of tokens of this shape."""
    floats = jax.ShapeDtypeStruct(shape, np.float32)
    columns = jax.ShapeDtypeStruct((*shape, k), np.int32)
    logits = jax.ShapeDtypeStruct((*shape, k), np.float32)
    return RecordedEntries(columns, logits, floats, floats, floats, floats)


def _numbers(shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(math.prod(shape), dtype=np.int32).reshape(shape)


def no_entries(shape: tuple[int, ...], k: int) -> RecordedEntries:
    """Writable arrays of tokens that have no entries."""

    def zeros() -> Any:
        return np.zeros(shape, np.float32)

    columns = np.full((*shape, k), EMPTY, np.int32)
    logits = np.zeros((*shape, k), np.float32)
    return RecordedEntries(columns, logits, zeros(), zeros(), zeros(), zeros())


def _copy_rows(
    target: RecordedEntries,
    target_rows: np.ndarray,
    source: RecordedEntries,
    source_rows: np.ndarray,
) -> None:
    """Copy some tokens of one tree of arrays to as many of another."""
    for copies, values in zip(target, source, strict=True):
        copies[target_rows] = np.asarray(values)[source_rows]
