"""Prompts of a rollout, and what completions are worth."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxmem.data import tasks


class Asked(NamedTuple):
    """Prompts of a rollout, as ids of the model."""

    ids: np.ndarray  # int32 [N, P], right-padded
    lengths: np.ndarray  # int32 [N]
    items: Any  # what a task scores them by

    def repeated(self, count: int) -> "Asked":
        """Each prompt `count` times, one after the other."""
        ids, lengths = (np.repeat(x, count, axis=0) for x in self[:2])
        return Asked(ids, lengths, _repeated(self.items, count))

    def first(self, count: int) -> "Asked":
        """The first prompts; only of lists of items."""
        return Asked(*(x[:count] for x in self))

    def select(self, rows: np.ndarray) -> "Asked":
        """The prompts of these numbers."""
        if isinstance(self.items, tasks.Problems):
            items: Any = tasks.Problems(*(x[rows] for x in self.items))
        else:
            items = [self.items[i] for i in rows]
        return Asked(self.ids[rows], self.lengths[rows], items)

    @classmethod
    def joined(cls, parts: Sequence["Asked"]) -> "Asked":
        """Those of several, one after the other."""
        if isinstance(parts[0].items, tasks.Problems):
            columns = zip(*(part.items for part in parts), strict=True)
            items: Any = tasks.Problems(*map(np.concatenate, columns))
        else:
            items = [item for part in parts for item in part.items]
        ids, lengths = (np.concatenate([p[i] for p in parts]) for i in (0, 1))
        return cls(ids, lengths, items)

    def parts(self, rows: int) -> Iterator[tuple["Asked", int]]:
        """Parts of exactly so many prompts, and how many of each are not repeated."""
        for start in range(0, len(self.lengths), rows):
            chosen = np.arange(start, min(start + rows, len(self.lengths)))
            filled = np.resize(chosen, rows)
            items = [self.items[i] for i in filled]
            yield Asked(self.ids[filled], self.lengths[filled], items), len(chosen)


def _repeated(items: Any, count: int) -> Any:
    if isinstance(items, tasks.Problems):
        return tasks.Problems(*(np.repeat(x, count, axis=0) for x in items))
    return [item for item in items for _ in range(count)]


class Graded(NamedTuple):
    """What completions are worth: float32 arrays [N]."""

    rewards: np.ndarray
    right: np.ndarray  # 1 where the (first) reward is 1 or more, else 0
    parts: dict[str, float] | None = None  # mean by reward function, of several

    def first(self, count: int) -> "Graded":
        """The first completions; `parts` stay those of all."""
        return Graded(self.rewards[:count], self.right[:count], self.parts)
