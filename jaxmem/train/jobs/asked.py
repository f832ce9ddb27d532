"""Prompts of a rollout, and what completions are worth."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from jaxmem.train.jobs.rows import take


class Asked(NamedTuple):
    """Prompts of a rollout, as ids of the model."""

    ids: np.ndarray  # int32 [N, P], right-padded
    lengths: np.ndarray  # int32 [N]
    items: Any  # what a task scores them by

    def repeated(self, count: int) -> "Asked":
        """Each prompt `count` times, one after the other."""
        return take(self, np.repeat(np.arange(len(self.lengths)), count))

    def first(self, count: int) -> "Asked":
        """The first prompts; only of lists of items."""
        return Asked(*(x[:count] for x in self))

    def parts(self, rows: int) -> Iterator[tuple["Asked", int]]:
        """Parts of exactly so many prompts, and how many of each are not repeated."""
        for start in range(0, len(self.lengths), rows):
            chosen = np.arange(start, min(start + rows, len(self.lengths)))
            yield take(self, np.resize(chosen, rows)), len(chosen)


class Graded(NamedTuple):
    """What completions are worth: float32 arrays [N]."""

    rewards: np.ndarray
    right: np.ndarray  # 1 where the (first) reward is 1 or more, else 0
    parts: dict[str, float] | None = None  # mean by reward function, of several
