"""Packs sequences that begin alike into rows that hold each beginning once.

A row of T = prompt + k · width slots holds the beginning of one group, then k blocks of
whole continuations, in the layout of `jaxmem.models.positions.Branches`. `segment_ids`
count the continuations of a block, and `positions` go on after the beginning, so that
`Packing.place` and `unpack` know sequences as they are, beginnings included; of these,
`unpack` has values in one sequence of a row alone.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxmem.packing.plan import Packing, Place, first_fit_decreasing, laid_out


class PrefixGroups(NamedTuple):
    """N sequences of groups that begin alike."""

    lengths: np.ndarray  # [N] tokens of each sequence
    shared: np.ndarray  # [N] of these, the first ones that its group shares
    groups: np.ndarray  # [N] number of the group


class _Row(NamedTuple):
    blocks: list[list[int]]  # sequences
    width: int


def pack_branches(
    parts: PrefixGroups,
    max_tokens: int,
    layout: tuple[int, int],
    row_lengths: Sequence[int],
) -> Packing:
    """Pack groups of sequences into micro-batches of static shape, widest rows first.

    Continuations are put into blocks by `first_fit_decreasing`, and the blocks of a
    group into the rows of the fewest slots. The layout has the slots of a prompt, into
    which what is shared fits, and of a block.

    >>> import numpy as np
    >>> parts = PrefixGroups(*np.array([[5, 4, 3], [2, 2, 2], [0, 0, 0]]))
    >>> packed = pack_branches(parts, 8, (2, 3), (8,))
    >>> [x.tolist() for x in packed.micro_batches[0]]
    [[[1, 1, 1, 1, 1, 1, 1, 2]], [[0, 1, 2, 3, 4, 2, 3, 2]], [[0, 0, 0, 0, 0, 1, 1, 2]]]
    """
    prompt, width = layout
    sizes = [(T - prompt) // width for T in row_lengths]
    rows = []
    for group in np.unique(parts.groups):
        members = np.flatnonzero(parts.groups == group)
        rest = (parts.lengths - parts.shared)[members]
        blocks = [
            members[block].tolist() for block in first_fit_decreasing(rest, width)
        ]
        for size in _sizes(len(blocks), sizes, layout):
            rows.append(_Row(blocks[:size], prompt + size * width))
            blocks = blocks[size:]
    steps = []
    for T in reversed(row_lengths):
        mine, count = [row for row in rows if row.width == T], max_tokens // T
        for start in range(0, len(mine), count):
            chosen = mine[start : start + count]
            steps.append(laid_out((count, T), _places(chosen, parts, layout)))
    return Packing(parts.lengths, tuple(steps))


def _sizes(count: int, sizes: Sequence[int], layout: tuple[int, int]) -> list[int]:
    """Blocks of each row, for so many blocks in the fewest slots."""
    prompt, width = layout
    best: list[tuple[int, list[int]]] = [(0, [])]
    for n in range(1, count + 1):
        options = []
        for size in sizes:
            slots, before = best[max(n - size, 0)]
            options.append((slots + prompt + size * width, [*before, size]))
        best.append(min(options))
    return best[count][1]


def _places(
    rows: list[_Row], parts: PrefixGroups, layout: tuple[int, int]
) -> Iterator[Place]:
    prompt, width = layout
    for r, row in enumerate(rows):
        first = row.blocks[0][0]
        shared = int(parts.shared[first])
        yield r, 0, 1, first, range(shared)
        for b, block in enumerate(row.blocks):
            start = prompt + b * width
            for segment, i in enumerate(block, start=1):
                rest = range(shared, int(parts.lengths[i]))
                yield r, start, segment, i, rest
                start += len(rest)
