"""What one update learns from: samples of a rollout, in packed micro-batches."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jaxmem.data.documents import NO_LABEL
from jaxmem.packing import Packing
from jaxmem.train.jobs.config import GrpoJobConfig
from jaxmem.train.jobs.policy import PolicyBatch, average
from jaxmem.train.jobs.rollouts import Completions, Supports

# Makes the numbers that choose tokens other ones than those that shuffle samples.
_TOKEN_STREAM = 0x746F6B65


class Minibatch(NamedTuple):
    """Values of N samples; log-probabilities [N, R] are of their sampled tokens."""

    completions: Completions
    advantages: np.ndarray  # [N]
    old: np.ndarray  # before the rollout's first update
    reference: np.ndarray | None  # under the initial weights
    supports: Supports | None  # what the tokens were drawn from; None: the vocabulary

    def select(self, indices: np.ndarray) -> "Minibatch":
        """The samples of these indices."""
        reference, supports = self.reference, self.supports
        return Minibatch(
            self.completions.select(indices),
            self.advantages[indices],
            self.old[indices],
            None if reference is None else reference[indices],
            None if supports is None else supports.select(indices),
        )

    def micro_batches(
        self, config: GrpoJobConfig, kept: np.ndarray | None = None
    ) -> Iterator[tuple[PolicyBatch, np.float32]]:
        """Micro-batches, and the normaliser of all of them.

        Args:
            config: of the job.
            kept: [N, R] the sampled tokens to learn from, see `kept_tokens`; None: all.

        Yields:
            A micro-batch and the normaliser.
        """
        part, slots = self.completions, config.sampling.max_new_tokens
        weights, normalizer = average(config.grpo, part.lengths, slots)
        if kept is not None:
            weights = weights / np.float32(config.grpo.token_fraction)
            labels = np.where(kept, part.sampled, NO_LABEL)
            part = dataclasses.replace(part, sampled=labels)
        packed = packing_of(config, part, config.grpo.max_tokens_train)
        old = packed.place(part.spread(self.old))
        reference = [None] * len(old)
        if self.reference is not None:
            reference = packed.place(part.spread(self.reference))
        supports = itertools.repeat(None)
        if self.supports is not None:
            supports = self.supports.micro_batches(part, packed, kept)
        for i, batch in enumerate(part.batches(packed)):
            sequence = packed.micro_batches[i].sequence
            of_tokens = old[i], self.advantages[sequence], weights[sequence]
            rows = PolicyBatch(batch, *of_tokens, reference[i], next(supports))
            yield rows, normalizer


def kept_tokens(
    config: GrpoJobConfig, step: int, minibatch: int, lengths: np.ndarray
) -> np.ndarray | None:
    """Which sampled tokens an update learns from; None for all of them.

        kept ~ Bernoulli(grpo.token_fraction), each token by itself

    It depends on nothing but the seed of the run and the arguments.

    Args:
        config: of the job.
        step: number of the rollout.
        minibatch: number of the update within the step.
        lengths: [N] tokens of each completion.

    Returns:
        [N, R] booleans, False after the end of a completion.

    Reference: Horvitz and Thompson, "A Generalization of Sampling Without Replacement
    From a Finite Universe", 1952.
    """
    fraction, slots = config.grpo.token_fraction, config.sampling.max_new_tokens
    if fraction == 1:
        return None
    rng = np.random.default_rng([config.run.seed, step, minibatch, _TOKEN_STREAM])
    drawn = rng.random((len(lengths), slots)) < fraction
    return drawn & (np.arange(slots) < lengths[:, None])


def packing_of(
    config: GrpoJobConfig, completions: Completions, max_tokens: int
) -> Packing:
    """How completions are laid out in micro-batches of so many tokens."""
    quadratic = 1 / (6 * config.model.hidden)
    return completions.pack(max_tokens, config.row_lengths, quadratic)
