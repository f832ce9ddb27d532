"""Sampled completions with their rewards, and groups of them that tell something."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxmem.models.sampling import Samples
from jaxmem.train.jobs.asked import Asked, Graded
from jaxmem.train.jobs.rollouts import Completions


class Decoded(NamedTuple):
    """How many of the sampler's slots had something to decode.

    The first token of a completion comes from its prompt, and is not counted.
    """

    tokens: int  # of completions
    slots: int  # steps times slots

    @property
    def busy(self) -> float | None:
        """The share; None where nothing was decoded."""
        return self.tokens / self.slots if self.slots else None


class Sampled(NamedTuple):
    """N completions, those of a prompt one after the other."""

    asked: Asked
    completions: Completions
    samples: Samples
    graded: Graded
    truncated: np.ndarray  # [N] bool, whether the last one has no end
    turns: np.ndarray  # [N] completions of a conversation
    decoded: Decoded  # for these and for completions that were not selected

    def tells(self, group_size: int) -> np.ndarray:
        """Which groups have rewards that differ: booleans, one a group."""
        groups = self.graded.rewards.reshape(-1, group_size)
        return (groups != groups[:, :1]).any(axis=1)

    def select(self, rows: np.ndarray) -> "Sampled":
        """The completions of these numbers."""
        graded = self.graded
        return Sampled(
            self.asked.select(rows),
            self.completions.select(rows),
            jax.tree.map(lambda x: np.asarray(x)[rows], self.samples),
            Graded(graded.rewards[rows], graded.right[rows], graded.parts),
            self.truncated[rows],
            self.turns[rows],
            self.decoded,
        )

    @classmethod
    def joined(cls, parts: Sequence["Sampled"]) -> "Sampled":
        """Those of several rollouts, one after the other."""
        asked, completions, samples, graded, truncated, turns, decoded = zip(
            *parts, strict=True
        )
        names = graded[0].parts or {}
        means = {
            name: float(np.mean([g.parts[name] for g in graded])) for name in names
        }
        return cls(
            Asked.joined(asked),
            Completions.joined(completions),
            jax.tree.map(lambda *x: np.concatenate(x), *samples),
            Graded(
                np.concatenate([g.rewards for g in graded]),
                np.concatenate([g.right for g in graded]),
                means or None,
            ),
            np.concatenate(truncated),
            np.concatenate(turns),
            Decoded(*(sum(counts) for counts in zip(*decoded, strict=True))),
        )


def telling(parts: Sequence[Sampled], prompts: int, group_size: int) -> Sampled:
    """The first groups whose rewards differ; others, in order, where those are few.

    Args:
        parts: rollouts, of as many prompts each.
        prompts: groups that are wanted.
        group_size: completions of a group.

    Reference: dynamic sampling, Yu et al., 2025, arXiv:2503.14476 (DAPO).
    """
    if len(parts) == 1:
        return parts[0]
    tells = np.concatenate([part.tells(group_size) for part in parts])
    groups = np.sort(np.argsort(~tells, kind="stable")[:prompts])
    rows = (groups[:, None] * group_size + np.arange(group_size)).ravel()
    return Sampled.joined(parts).select(rows)
