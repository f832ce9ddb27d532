"""The order in which items are learned from: all in turn, or sources by weights.

    order(sources, weights, seed, stream, shuffle) -> numbers of items, without end

The item at an index is a function of the index alone, so that a run resumes anywhere.
"""

import functools
import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxmem.base import messages
from jaxmem.base.rules import must
from jaxmem.data.records import DataError
from jaxmem.head.maths.random_streams import Stream

Weights = tuple[float, ...]  # one a source
_CYCLE = 10_000  # most items after which each source has had its share
_LEAST = 1e-3  # share of a source, so that a cycle has it within five per cent


class Shuffled(Sequence[int]):
    """Numbers of items without end: all in each epoch, in an order of its own.

    Args:
        count: number of items.
        seed: of the orders.
        stream: the random stream, which `keys` subdivide.
        keys: such as the number of a source.
    """

    def __init__(
        self, count: int, seed: int, stream: Stream, keys: tuple[int, ...] = ()
    ):
        self._count, self._seed = count, seed
        self._stream, self._keys = stream, keys
        self._epochs: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: Any) -> Any:  # an integer; slices are of no use
        epoch, offset = divmod(int(index), self._count)
        if epoch not in self._epochs:
            rng = self._stream.generator(self._seed, *self._keys, epoch)
            kept = {k: v for k, v in self._epochs.items() if k == epoch - 1}
            self._epochs = kept | {epoch: rng.permutation(self._count)}
        return int(self._epochs[epoch][offset])


class Unshuffled(Sequence[int]):
    """Numbers of items without end: all in each epoch, in the order of the files."""

    def __init__(self, count: int):
        self._count = count

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: Any) -> Any:  # an integer; slices are of no use
        return int(index) % self._count


class Mixed(Sequence[int]):
    """Numbers of items of sources in proportion to weights, without end.

    Every item of a source comes once before any comes again; in another order each
    time if `shuffle` is True.

    Raises:
        DataError: a source has no item.
    """

    def __init__(
        self,
        sources: Sequence[int],
        weights: Weights,
        seed: int,
        shuffle: bool = True,
    ):
        self._own = items_by_source(sources, len(weights))
        self._orders = [
            Shuffled(len(own), seed, Stream.SOURCES, (i,))
            if shuffle
            else Unshuffled(len(own))
            for i, own in enumerate(self._own)
        ]
        self._pattern, self._ranks = _plan_cycle(weights)
        self._counts = np.bincount(self._pattern)

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: Any) -> Any:  # an integer; slices are of no use
        cycle, offset = divmod(int(index), len(self._pattern))
        source = self._pattern[offset]
        number = cycle * int(self._counts[source]) + int(self._ranks[offset])
        return int(self._own[source][self._orders[source][number]])


def items_by_source(sources: Sequence[int], count: int) -> list[np.ndarray]:
    """The numbers of the items of each of `count` sources.

    `sources` has the source of each item.

    Raises:
        DataError: a source has no item.
    """
    numbers = [np.flatnonzero(np.equal(sources, i)) for i in range(count)]
    for i, own in enumerate(numbers):
        if not len(own):
            raise DataError(
                f"source {i + 1} of {count} has nothing to train on; remove it, hold "
                "out less, or lower data.streams if it is above 1"
            )
    return numbers


@functools.cache
def _plan_cycle(weights: Weights) -> tuple[np.ndarray, np.ndarray]:
    """The sources of a cycle's items, evenly spread, and the items' ranks in these."""
    shares = np.array(weights) / math.fsum(weights)
    for length in range(1, _CYCLE + 1):
        if np.allclose(shares * length, counts := np.rint(shares * length)):
            break
    counts = counts.astype(int)
    pattern, ranks = np.zeros((2, int(counts.sum())), int)
    counted = np.zeros(len(counts), int)
    for index in range(len(pattern)):
        source = int(np.argmax(counts * (index + 1) - counted * len(pattern)))
        pattern[index], ranks[index] = source, counted[source]
        counted[source] += 1
    return pattern, ranks


def order(
    sources: Sequence[int],
    weights: Weights | None,
    seed: int,
    stream: Stream,
    shuffle: bool = True,
) -> Sequence[int]:
    """The order of items without end: `Mixed` by weights; without, all in each epoch.

    Each epoch has an order of its own if `shuffle` is True, else that of the files.
    """
    if weights is not None:
        return Mixed(sources, weights, seed, shuffle)
    return Shuffled(len(sources), seed, stream) if shuffle else Unshuffled(len(sources))


def lines(config: Any, section: str) -> list[str]:
    """Lines on a section's order: shares of weighted sources, and `shuffle=False`."""
    said = [] if config.weights is None else [_shares(config, section)]
    if not config.shuffle:
        said.append(
            f"{section}.shuffle=False: each epoch reads the records in the order of "
            "the files"
        )
    return said


def _shares(config: Any, section: str) -> str:
    total = math.fsum(config.weights)
    named = (
        f"{weight / total:.1%} of {messages.name(source)}"
        for weight, source in zip(config.weights, config.source, strict=True)
    )
    return f"{section}.weights: {', '.join(named)}"


def _are_weights(config: Any) -> bool:
    """True if a section's `weights` are one for each of the entries of its `source`."""
    weights, source = config.weights, config.source
    count = len(source) if isinstance(source, tuple) else 0
    return len(weights) == count > 1 and all(
        type(w) in (int, float) and 0 < w < math.inf for w in weights
    )


RULES = (  # of a section with a source and its weights
    must(
        "weights",
        "a positive number for each entry of source, which must have several entries",
        lambda config: config.weights is None or _are_weights(config),
    ),
    must(
        "weights",
        "at least a thousandth of their sum each",
        lambda config: (
            config.weights is None
            or min(config.weights) >= _LEAST * math.fsum(config.weights)
        ),
    ),
)
