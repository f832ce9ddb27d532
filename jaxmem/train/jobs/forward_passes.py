"""Passes over a rollout that measure log-probabilities, and need no gradient."""

import dataclasses
from typing import Literal

from jaxmem.train.jobs.policy_objective import GrpoConfig


@dataclasses.dataclass(frozen=True)
class ForwardPasses:
    """The old log-probabilities of a rollout's tokens: who measures them, and when.

    Attributes:
        grpo: loss, correction and updates.
        entries: "sampler" or "old pass", which records the entries of
            head.gradient=("recorded", k); None: nothing does.
    """

    grpo: GrpoConfig
    entries: Literal["sampler", "old pass"] | None = None

    @property
    def start_from_sampler(self) -> bool:
        """True if the loss's old log-probabilities are the sampler's."""
        return self.grpo.correction == "ratio" or self.entries == "sampler"

    @property
    def read_own_old(self) -> bool:
        """True if the first update's forward pass replaces the old pass of its samples.

        False where a correction drops sequences, which needs all log-probabilities
        before any gradient; where a later epoch learns from tokens that the first one
        leaves out; and where the old pass records entries.
        """
        grpo = self.grpo
        return not (grpo.drops_sequences or self.entries == "old pass") and (
            grpo.token_fraction == 1 or grpo.epochs == 1 or self.start_from_sampler
        )

    @property
    def have_old_pass(self) -> bool:
        """True if a forward pass measures log-probabilities before the first update."""
        if self.entries == "old pass":
            return True
        if self.start_from_sampler:
            return False
        return self.grpo.minibatches > 1 or not self.read_own_old

    @property
    def count(self) -> float:
        """Number of forward-only passes over a rollout, without the reference's.

        A loss of sequence ratios reads each minibatch once more, except the first one
        where the ratio to its old log-probabilities is 1.
        """
        grpo = self.grpo
        first = 0.0 if self.start_from_sampler else 1 / grpo.minibatches
        old = 1.0 - first * self.read_own_old if self.have_old_pass else 0.0
        return old + grpo.has_sequence_ratio * (grpo.epochs - first)
