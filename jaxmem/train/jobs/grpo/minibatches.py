"""Minibatches of a rollout's samples, an update each, in packed micro-batches.

With `grpo.token_fraction` below 1, an update learns from tokens that `draw_tokens`
keeps at random, the more probably the larger their gradients may be.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from jaxmem.head.maths.random_streams import Stream
from jaxmem.packing import Packing
from jaxmem.train.jobs.config import GrpoJobConfig
from jaxmem.train.jobs.policy_objective import Average, PolicyBatch, average
from jaxmem.train.jobs.rollout.entries import RolloutEntries
from jaxmem.train.jobs.rollout.packed import Completions, RolloutSupports

# Smallest probability with which a token is kept, as a share of `grpo.token_fraction`.
_LEAST_SHARE = 0.1
# Tokens of a step whose log-probabilities from recorded entries are compared with
# exact ones.
PROBES = 512


class Cut(NamedTuple):
    """The cut of N completions to random prefixes."""

    counts: np.ndarray  # [N] tokens that the model sampled, before the cut
    inverse: np.ndarray  # float32 [N, R] 1 / probability with which a token is kept


class TokenDraw(NamedTuple):
    """The random choice of the tokens of N completions that an update learns from."""

    kept: np.ndarray  # bool [N, R]
    # float32 [N, R] 1 / probability with which a token is kept; 0 for tokens that no
    # update learns from
    inverse: np.ndarray


class Minibatch(NamedTuple):
    """Values of N samples; log-probabilities [N, R] are of their sampled tokens."""

    completions: Completions
    advantages: np.ndarray  # [N], or [N, R] of tokens
    old: np.ndarray  # before the rollout's first update, or SAME_WEIGHTS
    reference: np.ndarray | None  # under the initial weights
    # ids that the tokens were drawn from; None: the vocabulary
    supports: RolloutSupports | None
    # of the sampler, for a correction by tokens and for `draw_tokens`
    rollout: np.ndarray | None = None
    correction: np.ndarray | None = None  # [N, R] weights of one by sequences
    log_ratio: np.ndarray | None = None  # [N] of sequences, for a loss that has one
    learned: np.ndarray | None = None  # [N, R] tokens to learn from; None: all
    cut: Cut | None = None  # of completions; None: they are whole
    draw: TokenDraw | None = None  # of the tokens; None: all are kept
    entries: RolloutEntries | None = None  # of the tokens; None: none are recorded
    probed: np.ndarray | None = None  # [N, R] as in `PolicyBatch`

    def drawn(self, config: GrpoJobConfig, step: int, number: int) -> "Minibatch":
        """This minibatch with the tokens that `draw_tokens` keeps."""
        if config.grpo.token_fraction == 1:
            return self
        return self._replace(draw=draw_tokens(config, step, number, self))

    @property
    def learnable(self) -> np.ndarray:
        """The tokens [N, R] that the update may learn from, before any draw."""
        part = self.completions
        within = np.arange(part.sampled.shape[1]) < part.lengths[:, None]
        masks = [x for x in (self.learned, part.own) if x is not None]
        return np.logical_and.reduce([within, *masks])

    @property
    def kept(self) -> np.ndarray:
        """The tokens [N, R] that the update learns from."""
        return self.learnable if self.draw is None else self.draw.kept

    @property
    def inverse(self) -> np.ndarray | None:
        """float32 [N, R] 1 / probability with which a token is kept; None: all are 1.

        It is the factor of a token's loss and of its metrics, whose expected sums are
        then those of all tokens (Horvitz and Thompson, 1952).
        """
        factors = [x.inverse for x in (self.cut, self.draw) if x is not None]
        return functools.reduce(np.multiply, factors) if factors else None

    @property
    def token_count(self) -> float:
        """Sum of `inverse` over the tokens that the update learns from."""
        kept, inverse = self.kept, self.inverse
        return float(kept.sum() if inverse is None else inverse[kept].sum())

    def probes(self, config: GrpoJobConfig, step: int, number: int) -> np.ndarray:
        """Mask [N, R] of `probe_count` random tokens among the kept ones, or of all."""
        kept = np.flatnonzero(self.kept)
        mask, count = np.zeros(self.kept.shape, bool), probe_count(config)
        rng = Stream.PROBES.generator(config.run.seed, step, number)
        mask.flat[rng.choice(kept, min(count, len(kept)), replace=False)] = True
        return mask

    def packing(self, config: GrpoJobConfig) -> Packing:
        """The packing of the samples in `micro_batches`."""
        return packing_of(config, self.completions, config.grpo.max_tokens_train)

    def average(self, config: GrpoJobConfig) -> Average:
        """The average over the tokens that were sampled, before any cut or draw."""
        slots = config.sampling.max_new_tokens * config.task.turns
        counts = self.completions.counts if self.cut is None else self.cut.counts
        return average(config.grpo, counts, slots)

    def micro_batches(
        self, config: GrpoJobConfig
    ) -> Iterator[tuple[PolicyBatch, np.float32]]:
        """Yield micro-batches of the kept tokens, each with the normaliser."""
        kept = self.kept
        part = self.completions.keeping(kept)
        weights, normalizer = self.average(config)
        packed = self.packing(config)

        def placed(values: np.ndarray | None) -> Any:
            absent = itertools.repeat(None)
            return absent if values is None else iter(packed.place(part.spread(values)))

        corrected = self.rollout if config.grpo.corrects_tokens else None
        old, reference, rollout = map(placed, (self.old, self.reference, corrected))
        inverse = placed(self.inverse)
        of_tokens = iter(())
        if self.advantages.ndim > 1:
            of_tokens = placed(self.advantages)
        correction, supports = placed(self.correction), itertools.repeat(None)
        if self.supports is not None:
            supports = self.supports.micro_batches(part, packed, kept)
        entries, probed = itertools.repeat(None), placed(self.probed)
        if self.entries is not None:
            entries = self.entries.micro_batches(part, packed, kept)
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
                inverse=inverse_probability,
                ref_logprob=next(reference),
                supports=next(supports),
                rollout_logprob=next(rollout),
                routes=next(routes),
                entries=next(entries),
                probed=next(probed),
            )
            if config.model.router_aux_loss_coef:
                rows = rows._replace(share=packed.share(i))
            if self.log_ratio is not None:
                rows = rows._replace(sequence_log_ratio=self.log_ratio[sequence])
            yield rows, normalizer


def probe_count(config: GrpoJobConfig) -> int:
    """Probes of an update, of `PROBES` in a step."""
    return -(-PROBES // (config.grpo.minibatches * config.grpo.epochs))


def draw_tokens(
    config: GrpoJobConfig, step: int, number: int, part: Minibatch
) -> TokenDraw:
    """The tokens that an update learns from, each kept with its own probability.

    `keep_probabilities` of `gradient_bounds` are these probabilities. The draw depends
    on nothing else but the seed of the run, `step` and `number`, the minibatch's.
    """
    learnable = part.learnable
    probability = np.ones(learnable.shape)
    probability[learnable] = keep_probabilities(
        gradient_bounds(config, part)[learnable], config.grpo.token_fraction
    )
    rng = Stream.KEPT_TOKENS.generator(config.run.seed, step, number)
    kept = learnable & (rng.random(learnable.shape) < probability)
    return TokenDraw(kept, np.where(learnable, 1 / probability, 0).astype(np.float32))


def gradient_bounds(config: GrpoJobConfig, part: Minibatch) -> np.ndarray:
    """Numbers [N, R] in proportion to bounds of the gradients of tokens.

        bound = w (|A| + kl_coefficient + entropy_coefficient) (1 - p)
        1 - p <= norm of d(-ln p)/d(logits) <= sqrt(2) (1 - p)

    for the advantage A, with the weights of a correction by sequences, the weight w in
    the average, and the probability p with which the sampler drew the token. The square
    of the norm is (1 - p)² plus the sum of the squares of the other probabilities, and
    that sum would make the draw's second moment smaller by 3% at most (Kantorovich).
    The coefficients stand for the terms that do not vanish with the advantage.
    """
    assert part.rollout is not None
    sizes = abs(part.advantages)
    sizes = sizes if sizes.ndim > 1 else sizes[:, None]
    if part.correction is not None:
        sizes = sizes * part.correction
    weights = part.average(config).weights[:, None]
    if part.cut is not None:
        weights = weights * part.cut.inverse
    terms = config.grpo.kl_coefficient + config.grpo.entropy_coefficient
    logprob = np.minimum(part.rollout.astype(np.float64), 0)
    return weights * (sizes + terms) * -np.expm1(logprob)


def keep_probabilities(bounds: np.ndarray, fraction: float) -> np.ndarray:
    """Probabilities [M] with which tokens are kept, `fraction` of them on average.

        π = min(1, max(fraction / 10, c · bound)),   c such that Σ π = fraction · M

    The least probability limits the weights 1/π where a bound is wrong: the sampler's
    probability differs from the trainer's, or the user's loss has a gradient where the
    advantage is 0. If few bounds are above 0, these tokens are always kept, and the sum
    is smaller. If none is, all have the probability `fraction`.
    """
    positive, least = bounds[bounds > 0], _LEAST_SHARE * fraction
    if not positive.size:
        return np.full(bounds.shape, fraction)

    def probabilities(scale: float) -> np.ndarray:
        return np.clip(scale * bounds, least, 1)

    low, high = least / float(positive.max()), 1 / float(positive.min())
    for _ in range(64):
        middle = math.sqrt(low) * math.sqrt(high)
        if probabilities(middle).sum() > fraction * bounds.size:
            high = middle
        else:
            low = middle
    return probabilities(high)


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
