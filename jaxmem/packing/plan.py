"""Packs ragged sequences into micro-batches of a few static shapes.

    lengths -> rows of whole sequences -> micro-batches of at most max_tokens per rank

A row holds whole sequences one after the other, in the layout of packed documents in
`jaxmem.data`: `segment_ids` are 1, 2, ... in the row and 0 on padding, `positions`
start from 0 within each sequence. Attention stays inside a sequence, and padding is at
the end of a row. Everything is numpy and depends only on the arguments: processes that
call `pack` with the same lengths compute the same packing without communication.
"""

import dataclasses
import functools
import heapq
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from jaxmem.base import messages, ranges
from jaxmem.packing import checks

# Row, first slot, number in the row, sequence, positions of its tokens.
Place = tuple[int, int, int, int, range]


class MicroBatch(NamedTuple):
    """The layout of tokens in one step: int32 arrays [ranks · rows, T], rank by rank.

    Attributes:
        segment_ids: 1, 2, ... per sequence in the row; 0 is padding.
        positions: position of the token in its sequence, from 0; 0 on padding.
        sequence: index of the token's sequence among all packed ones; -1 is padding.
    """

    segment_ids: np.ndarray
    positions: np.ndarray
    sequence: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Packing:
    """The position of every token of every sequence; created by `pack`.

    Attributes:
        lengths: tokens in each sequence, in the order of the input.
        micro_batches: one per step, the widest rows first.
    """

    lengths: np.ndarray
    micro_batches: tuple[MicroBatch, ...]

    @property
    def shapes(self) -> set[tuple[int, ...]]:
        """Shapes of the micro-batches; each is compiled once."""
        return {batch.segment_ids.shape for batch in self.micro_batches}

    @property
    def padding(self) -> float:
        """Fraction of slots that hold no token."""
        slots = sum(batch.segment_ids.size for batch in self.micro_batches)
        return 1 - sum(self._held) / slots if slots else 0.0

    @functools.cached_property
    def _held(self) -> list[int]:
        return [int((b.segment_ids > 0).sum()) for b in self.micro_batches]

    def share(self, number: int) -> np.float32:
        """Fraction of all tokens that the micro-batch of that number holds."""
        return np.float32(self._held[number] / max(sum(self._held), 1))

    def place(self, values: Sequence[ArrayLike], fill: Any = 0) -> list[np.ndarray]:
        """Copy one array per sequence into the layout of the micro-batches.

        Values of whole sequences need no placing: an array `x [sequences]` is
        `x[batch.sequence]` at the tokens (and its last entry on padding).

        Args:
            values: for each sequence an array [length, ...]: ids, labels, log-probs.
            fill: value of padding slots, -1 for labels.

        Returns:
            For each micro-batch an array [ranks · rows, T, ...].

        Raises:
            ValueError: there is not one array per sequence, an array has another
                length, or the values' dtype cannot represent fill.
        """
        arrays = checks.as_arrays("values", values)
        checks.check_each_length(arrays, self.lengths)
        if not self.micro_batches:
            return []
        # An empty sequence may be an empty list, whose dtype would be float64.
        whole = [a for a in arrays if len(a)] or arrays[:1]
        checks.check_alike("values", whole, first_axes=1)
        flat = np.concatenate(whole)
        checks.check_fill(fill, flat.dtype)
        placed = []
        for batch in self.micro_batches:
            mask = batch.segment_ids > 0
            out = np.full(mask.shape + flat.shape[1:], fill, flat.dtype)
            out[mask] = flat[self._source_index(batch, mask)]
            placed.append(out)
        return placed

    def unpack(self, results: Sequence[ArrayLike]) -> list[np.ndarray]:
        """Collect per-token results by sequence, in the order of the input.

        Args:
            results: for each micro-batch an array [ranks · rows, T, ...]; its values on
                padding are dropped.

        Returns:
            For each sequence an array [length, ...].

        Raises:
            ValueError: there is not one array per micro-batch, or one has another
                shape.
        """
        arrays = checks.as_arrays("results", results)
        want = [batch.segment_ids.shape for batch in self.micro_batches]
        if [array.shape[:2] for array in arrays] != want:
            got = [array.shape for array in arrays]
            raise ValueError(
                "results must have one array per micro-batch, of shapes "
                f"{messages.short(want)} (and more axes), got {messages.short(got)}"
            )
        if not arrays:
            return [np.zeros(0, np.float32) for _ in self.lengths]
        checks.check_alike("results", arrays, first_axes=2)
        dtype = np.result_type(*arrays)
        flat = np.zeros((int(self.lengths.sum()), *arrays[0].shape[2:]), dtype)
        for batch, array in zip(self.micro_batches, arrays, strict=True):
            mask = batch.segment_ids > 0
            flat[self._source_index(batch, mask)] = array[mask]
        return np.split(flat, np.cumsum(self.lengths)[:-1])

    def _source_index(self, batch, mask):
        """Index of each token in the concatenation of all sequences."""
        start = np.cumsum(self.lengths) - self.lengths
        return start[batch.sequence[mask]] + batch.positions[mask]


def pack(
    lengths: ArrayLike,
    max_tokens: int,
    *,
    row_lengths: Sequence[int] | None = None,
    ranks: int = 1,
    quadratic: float = 0.0,
) -> Packing:
    """Pack whole sequences into micro-batches of static shape.

        every rank, every step: [max_tokens // T, T] slots,  T in row_lengths

    First-fit decreasing determines the number of steps: the longest remaining sequence
    goes into the first row with room; if there is none, a new step is opened for all
    ranks at once, with the narrowest rows that hold the sequence. Karmarkar-Karp then
    balances the costs of the rows of each width, wherever the result fits, and rows are
    dealt to ranks and steps in the order of falling cost. Every rank has the same
    number of micro-batches of the same shapes; a rank's slots may be all padding.

    Call it once with the number of tokens that a training step has memory for, and
    again with the larger number for a forward-only pass:
    `other.place(packing.unpack(results))` transfers results from one packing to the
    other. The order of the sequences within a step has no meaning; normalise losses by
    numbers of the whole step.

    Args:
        lengths: tokens in each sequence [sequences]; 0 is allowed, and takes no slot.
        max_tokens: slots of one micro-batch on one rank.
        row_lengths: allowed T, increasing, each at most max_tokens; None for
            (max_tokens,), a single row. Each one is a shape to compile: `buckets`
            returns a few. Dense attention costs T² per row, so narrow rows are cheap.
        ranks: data-parallel ranks; the rows of a micro-batch are ordered by rank, so
            that sharding the first axis gives each rank its own.
        quadratic: coefficient of attention's cost; the balanced cost is len·(1 +
            quadratic·len). 0 balances tokens; about 1 / (6·D) balances the FLOPs of a
            decoder of width D.

    Raises:
        TypeError: lengths are not integers.
        ValueError: a sequence is longer than a row, or another argument is impossible.

    >>> from jaxmem import packing
    >>> packed = packing.pack([2, 5, 3, 4], max_tokens=8)
    >>> for batch in packed.micro_batches:
    ...     print(batch.segment_ids[0], batch.sequence[0])
    [1 1 2 2 2 2 2 0] [ 0  0  1  1  1  1  1 -1]
    [1 1 1 2 2 2 2 0] [ 2  2  2  3  3  3  3 -1]
    >>> ids = [[10, 11], [20, 21, 22, 23, 24], [30, 31, 32], [40, 41, 42, 43]]
    >>> [batch.tolist() for batch in packed.place(ids)]
    [[[10, 11, 20, 21, 22, 23, 24, 0]], [[30, 31, 32, 40, 41, 42, 43, 0]]]
    >>> [ids.tolist() for ids in packed.unpack(packed.place(ids))] == ids
    True

    Reference: first-fit decreasing within 11/9 of the best, Johnson, 1973; the largest
    differencing method, Karmarkar and Karp, 1982; for batches of a trainer, Sheng et
    al., 2024, arXiv:2409.19256 (verl).
    """
    ranges.check("max_tokens", max_tokens, checks.COUNTS)
    ranges.check("ranks", ranks, checks.COUNTS)
    ranges.check("quadratic", quadratic, checks.QUADRATIC)
    widths = checks.check_row_lengths(row_lengths, max_tokens)
    checks.check_size(max_tokens, widths[0], ranks)
    tokens = checks.check_lengths(lengths, max_tokens, widths[-1])
    cost = tokens * (1 + quadratic * tokens)
    rows, row_widths = _fit(tokens, widths, [max_tokens // T * ranks for T in widths])
    steps = []
    for width in reversed(widths):
        mine = [row for row, T in zip(rows, row_widths, strict=True) if T == width]
        mine = _balance(mine, tokens, cost, width)
        hands = _deal(mine, cost, len(mine) // (max_tokens // width))
        for step in zip(*_deal(hands, cost, ranks), strict=True):
            own = [row for hand in step for row in hand]
            steps.append(laid_out((len(own), width), _places(own, tokens)))
    return Packing(tokens, tuple(steps))


def buckets(max_tokens: int, count: int = 3) -> tuple[int, ...]:
    """Row lengths of micro-batches that all have about max_tokens slots.

        max_tokens / 2^(count-1), ..., max_tokens / 2, max_tokens

    Args:
        max_tokens: slots of one micro-batch on one rank.
        count: number of row lengths.

    Returns:
        The row lengths, increasing.

    Raises:
        ValueError: max_tokens cannot be halved that often.

    >>> from jaxmem import packing
    >>> packing.buckets(8192)
    (2048, 4096, 8192)
    """
    ranges.check("max_tokens", max_tokens, checks.COUNTS)
    ranges.check("count", count, checks.COUNTS)
    if count > int(max_tokens).bit_length():
        raise ValueError(
            f"max_tokens={max_tokens} cannot be halved {count - 1} times; lower count"
        )
    return tuple(max_tokens // 2**i for i in reversed(range(count)))


def first_fit_decreasing(lengths: ArrayLike, capacity: int) -> list[list[int]]:
    """Indices of sequences by bin: the longest first, each in the first bin with room.

    It uses at most 11/9 of the minimum number of bins, plus one.

    Args:
        lengths: tokens in each sequence [sequences].
        capacity: tokens per bin.

    Returns:
        For each bin the indices of its sequences, ascending.

    Raises:
        ValueError: a sequence is longer than a bin.

    >>> from jaxmem import packing
    >>> packing.first_fit_decreasing([2, 5, 3, 4], capacity=7)
    [[0, 1], [2, 3]]
    """
    ranges.check("capacity", capacity, ranges.integers(1, limit=2**62))
    tokens = checks.check_lengths(lengths, capacity, capacity, "capacity")
    return _fit(tokens, (capacity,), [1])[0]


def karmarkar_karp(costs: ArrayLike, k: int) -> list[list[int]]:
    """Indices of costs in k parts of nearly equal sums, the largest sum first.

    The largest differencing method: the two partial partitions whose sums differ most
    are merged, the largest part with the smallest, until one remains. The time grows
    with len(costs) · k.

    Args:
        costs: numbers that are not negative [n].
        k: number of parts; if k > n, some are empty.

    Returns:
        For each part the indices of its costs, ascending.

    Raises:
        ValueError: a cost is negative or not finite, or k is not a positive integer.

    >>> from jaxmem import packing
    >>> packing.karmarkar_karp([8, 7, 6, 5, 4], 2)
    [[1, 3, 4], [0, 2]]
    """
    ranges.check("k", k, ranges.integers(1, limit=checks.ROWS))
    costs = checks.check_costs(costs)
    # Entries are (-difference, unique number, parts); a part is (sum, indices). Empty
    # parts at the end are not stored.
    heap = [(-c, i, [(c, [i])]) for i, c in enumerate(costs.tolist())]
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        parts = _merge(heapq.heappop(heap)[2], heapq.heappop(heap)[2], k)
        difference = parts[0][0] - (parts[-1][0] if len(parts) == k else 0)
        heapq.heappush(heap, (-difference, number, parts))
        number += 1
    bins = [sorted(indices) for _, indices in (heap[0][2] if heap else [])]
    return bins + [[] for _ in range(k - len(bins))]


def _merge(a, b, k):
    """Merge two sorted partitions, the largest parts with the smallest."""
    b = b[::-1]
    ahead = k - len(b)  # number of parts of a that merge with an empty part of b
    both = [(x[0] + y[0], x[1] + y[1]) for x, y in zip(a[ahead:], b, strict=False)]
    alone = b[max(len(a) - ahead, 0) :]
    return sorted([*a[:ahead], *both, *alone], key=lambda part: -part[0])


def _fit(tokens, widths, rows_of_step):
    """Rows and their widths: first fit that opens the rows of a whole step at once."""
    rows, row_widths = [], []
    room = np.zeros(0, np.int64)
    for i in np.argsort(-tokens, kind="stable").tolist():
        need = tokens[i]
        if need == 0:
            break
        fits = room >= need
        first = int(np.argmax(fits)) if len(room) else 0
        if not len(room) or not fits[first]:
            kind = next(b for b, width in enumerate(widths) if width >= need)
            first, count = len(rows), rows_of_step[kind]
            rows += [[] for _ in range(count)]
            row_widths += [widths[kind]] * count
            room = np.append(room, np.full(count, widths[kind]))
        rows[first].append(i)
        room[first] -= need
    return [sorted(row) for row in rows], row_widths


def _balance(rows, tokens, cost, width):
    """Balance the sequences over as many rows, if they fit."""
    if not rows:
        return rows
    members = np.array(sorted(i for row in rows for i in row))
    even = [members[part].tolist() for part in karmarkar_karp(cost[members], len(rows))]
    return even if max(tokens[row].sum() for row in even) <= width else rows


def _deal(things, cost, hands):
    """Deal things in snake order to equally large hands, the costliest first."""
    if not hands:
        return []
    dealt = [[] for _ in range(hands)]
    order = sorted(range(len(things)), key=lambda i: -_total(things[i], cost))
    for turn, i in enumerate(order):
        lap, hand = divmod(turn, hands)
        dealt[hand if lap % 2 == 0 else hands - 1 - hand].append(things[i])
    return dealt


def _total(thing, cost):
    """The cost of a row (indices), or of a list of rows."""
    return sum(cost[x] if isinstance(x, int) else _total(x, cost) for x in thing)


def _places(rows, tokens):
    """The places of whole sequences in rows, one after the other."""
    for r, row in enumerate(rows):
        stops = np.cumsum(tokens[row])
        for segment, (i, stop) in enumerate(zip(row, stops, strict=True), start=1):
            yield r, stop - tokens[i], segment, i, range(tokens[i])


def laid_out(shape: tuple[int, int], places: Iterable[Place]) -> MicroBatch:
    """The layout in which tokens of sequences have these places."""
    segment_ids, positions = (np.zeros(shape, np.int32) for _ in range(2))
    sequence = np.full(shape, -1, np.int32)
    for row, start, segment, i, numbers in places:
        slots = slice(start, start + len(numbers))
        segment_ids[row, slots], sequence[row, slots] = segment, i
        positions[row, slots] = np.arange(numbers.start, numbers.stop)
    return MicroBatch(segment_ids, positions, sequence)
