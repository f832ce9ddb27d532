"""Minibatches of a rollout's samples, an update each, in packed micro-batches."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from jaxmem.head.maths.random_streams import Stream
from jaxmem.packing import Packing
from jaxmem.train.jobs.config import GrpoJobConfig
from jaxmem.train.jobs.policy_objective import PolicyBatch, average
from jaxmem.train.jobs.rollout.packed import Completions, RolloutSupports


class Cut(NamedTuple):
    """The cut of N completions to random prefixes."""

    counts: np.ndarray  # [N] tokens that the model sampled, before the cut
    inverse: np.ndarray  # float32 [N, R] 1 / probability with which a token is kept


class Minibatch(NamedTuple):
    """Values of N samples; log-probabilities [N, R] are of their sampled tokens."""

    completions: Completions
    advantages: np.ndarray  # [N], or [N, R] of tokens
    old: np.ndarray  # before the rollout's first update, or SAME_WEIGHTS
    reference: np.ndarray | None  # under the initial weights
    # ids that the tokens were drawn from; None: the vocabulary
    supports: RolloutSupports | None
    rollout: np.ndarray | None = None  # of the sampler, for a correction by tokens
    correction: np.ndarray | None = None  # [N, R] weights of one by sequences
    log_ratio: np.ndarray | None = None  # [N] of sequences, for a loss that has one
    learned: np.ndarray | None = None  # [N, R] tokens to learn from; None: all
    cut: Cut | None = None  # of completions; None: they are whole

    def kept(
        self, config: GrpoJobConfig, step: int, minibatch: int
    ) -> np.ndarray | None:
        """The tokens [N, R] to learn from of those that `kept_tokens` draws, or all."""
        part = self.completions
        drawn = kept_tokens(config, step, minibatch, part.lengths)
        kept = [x for x in (drawn, self.learned, part.own) if x is not None]
        return np.logical_and.reduce(kept) if kept else None

    def packing(self, config: GrpoJobConfig) -> Packing:
        """The packing of the samples in `micro_batches`."""
        return packing_of(config, self.completions, config.grpo.max_tokens_train)

    def micro_batches(
        self, config: GrpoJobConfig, kept: np.ndarray | None = None
    ) -> Iterator[tuple[PolicyBatch, np.float32]]:
        """Yield micro-batches of the kept tokens [N, R], each with the normaliser."""
        part = self.completions
        slots = config.sampling.max_new_tokens * config.task.turns
        counts = part.counts if self.cut is None else self.cut.counts
        weights, normalizer = average(config.grpo, counts, slots)
        if kept is not None:
            weights = weights / np.float32(config.grpo.token_fraction)
            part = part.keeping(kept)
        packed = self.packing(config)

        def placed(values: np.ndarray | None) -> Any:
            absent = itertools.repeat(None)
            return absent if values is None else iter(packed.place(part.spread(values)))

        inverse = placed(None if self.cut is None else self.cut.inverse)
        old, reference, rollout = map(placed, (self.old, self.reference, self.rollout))
        of_tokens = iter(())
        if self.advantages.ndim > 1:
            of_tokens = placed(self.advantages)
        correction, supports = placed(self.correction), itertools.repeat(None)
        if self.supports is not None:
            supports = self.supports.micro_batches(part, packed, kept)
        routes = part.routed(packed)
        for i, batch in enumerate(part.batches(packed)):
            sequence = packed.micro_batches[i].sequence
            advantages = next(of_tokens, None)
            if advantages is None:
                advantages = self.advantages[sequence]
            if (factors := next(correction)) is not None:
                advantages = advantages * factors
            token_weights = weights[sequence]
            if (inverse_probability := next(inverse)) is not None:
                token_weights = token_weights * inverse_probability
            rows = PolicyBatch(
                batch,
                old_logprob=next(old),
                advantages=advantages,
                weights=token_weights,
                ref_logprob=next(reference),
                supports=next(supports),
                rollout_logprob=next(rollout),
                routes=next(routes),
            )
            if config.model.router_aux_loss_coef:
                rows = rows._replace(share=packed.share(i))
            if self.log_ratio is not None:
                rows = rows._replace(sequence_log_ratio=self.log_ratio[sequence])
            yield rows, normalizer


def kept_tokens(
    config: GrpoJobConfig, step: int, minibatch: int, lengths: np.ndarray
) -> np.ndarray | None:
    """Mask [N, R] of the sampled tokens that an update learns from; None: all.

        kept ~ Bernoulli(grpo.token_fraction), each token by itself

    The draw depends on the seed of the run and the arguments alone (Horvitz and
    Thompson, 1952).
    """
    fraction, slots = config.grpo.token_fraction, config.completion_length
    if fraction == 1:
        return None
    rng = Stream.KEPT_TOKENS.generator(config.run.seed, step, minibatch)
    drawn = rng.random((len(lengths), slots)) < fraction
    return drawn & (np.arange(slots) < lengths[:, None])


def cut_prefixes(
    config: GrpoJobConfig, step: int, completions: Completions
) -> tuple[Completions, Cut | None]:
    """Completions cut to random prefixes, and the cut; None without grpo.prefix_cut.

        c ~ uniform on {m, ..., n},  m = max(1, ceil(grpo.prefix_cut · n))
        P(token t is kept) = P(c >= t) = (n - max(t, m) + 1) / (n - m + 1)

    for n tokens, of which c are kept. A token's loss divided by that probability has
    the expectation of its loss in the whole completion, because nothing before it is
    missing (arXiv:2603.06619).
    """
    share, n = config.grpo.prefix_cut, completions.lengths
    if share is None:
        return completions, None
    least = np.maximum(np.ceil(share * n).astype(int), 1)
    rng = Stream.PREFIXES.generator(config.run.seed, step)
    kept = rng.integers(least, n, endpoint=True)
    token = np.arange(1, completions.sampled.shape[1] + 1)  # t
    longer = np.maximum(n[:, None] - np.maximum(token, least[:, None]) + 1, 1)
    inverse = ((n - least + 1)[:, None] / longer).astype(np.float32)
    return completions.cut(kept.astype(n.dtype)), Cut(completions.counts, inverse)


def packing_of(
    config: GrpoJobConfig, completions: Completions, max_tokens: int
) -> Packing:
    """The packing of completions in micro-batches of at most `max_tokens` slots."""
    if config.branches is not None:
        return completions.pack_shared(max_tokens, config.row_lengths, config.branches)
    quadratic = 1 / (6 * config.model.hidden)
    return completions.pack(max_tokens, config.row_lengths, quadratic)
