"""The loss of a policy's tokens in packed rows, and its average.

    loss = Σ_t w_t (surrogate_t + kl_coefficient · k3_t - entropy_coefficient · H_t) / n

Weights w and normaliser n belong to a whole minibatch, are known before it is read, and
determine the average; advantages come from `jaxmem.train.jobs.advantages`.

Where the sampler truncates, the log-probabilities in the surrogate and in k3 are those
within the support that the token was drawn from, so that ratios compare the
distributions that were sampled from. H is the entropy over the whole vocabulary.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxmem
from jaxmem import losses
from jaxmem.base import user_code
from jaxmem.base.fields import Must, check, check_rules
from jaxmem.base.ranges import integers, reals
from jaxmem.base.rules import must, wrong
from jaxmem.data.documents import Batch
from jaxmem.head.maths.gradients import Recorded, Sample
from jaxmem.head.maths.recorded import RecordedEntries
from jaxmem.heads.nnx import LMHead
from jaxmem.packing import Supports
from jaxmem.train.jobs import policy_losses
from jaxmem.train.jobs.advantages import ADVANTAGES
from jaxmem.train.jobs.policy_losses import POLICY_LOSSES, PolicyLoss
from jaxmem.train.jobs.rollout.packed import SAME_WEIGHTS


def _are_widths(widths: tuple[int, ...]) -> bool:
    """True if they can be widths of packed rows."""
    positive = bool(widths) and all(type(w) is int and w >= 1 for w in widths)
    return positive and list(widths) == sorted(set(widths))


_NO_BOUND = "None for correction={correction!r}, which has no such bound"
_UNCUT = "a different value with prefix_cut={prefix_cut}"
ROW_LENGTHS = Must("increasing positive integers", _are_widths)


@dataclasses.dataclass(frozen=True)
class GrpoConfig:
    """Size of a rollout, loss and advantages, and the updates that follow."""

    prompts: Annotated[int, integers(1), "number of prompts in a rollout"] = 32
    group_size: Annotated[
        int, integers(2), "number of completions per prompt; at least 2"
    ] = 16
    loss: Annotated[
        str,
        user_code.Named(POLICY_LOSSES),
        'policy loss. "grpo", "gspo" and "sapo" average the means of sequences; '
        '"dr_grpo" divides by neither lengths nor deviations; "dapo", "cispo" and '
        '"ppo_clip" (with a dual clip of 3) average over tokens. Or your own loss',
    ] = "grpo"
    advantage: Annotated[
        str | None,
        user_code.Named(ADVANTAGES),
        'function from rewards to advantages. "grpo", "dr_grpo" and "batch_std" '
        "subtract the group's mean; \"grpo\" then divides by the group's deviation, "
        '"batch_std" by the rollout\'s. "rloo" subtracts the mean of the group\'s '
        'other completions, and "reinforce_plus_plus" treats the rollout as one '
        "group. Or your own function. None: the loss's own advantage, which is "
        '"dr_grpo" for the loss "dr_grpo" and "grpo" for the others',
    ] = None
    clip_low: Annotated[
        float | None, "ratios are clipped below 1 - this. None: the loss's own value"
    ] = None
    clip_high: Annotated[
        float | None, "ratios are clipped above 1 + this. None: the loss's own value"
    ] = None
    correction: Annotated[
        Literal["tis", "mis", "icepop", "sequence_mask", "ratio"] | None,
        "correction of the mismatch between the sampler's probabilities and the "
        'trainer\'s. Tokens get a weight that is truncated ("tis"), or set to 0 '
        'above a cap ("mis") or outside a band ("icepop"); "sequence_mask" drops '
        'sequences whose mean ratio is outside a band; "ratio" makes the loss\'s '
        "ratio that of trainer to sampler, which needs no old pass. None: no "
        "correction",
    ] = None
    correction_low: Annotated[
        float | None, "lower bound of the band. None: the correction's own bound"
    ] = None
    correction_high: Annotated[
        float | None,
        "upper bound of the band, or the cap. None: the correction's own bound",
    ] = None
    turn_rewards: Annotated[
        bool,
        "True: the advantage of a turn compares the rewards from this turn on. False: "
        "the advantage of all turns compares all rewards",
    ] = False
    mask_truncated: Annotated[
        bool, "learn nothing from completions that have no end token"
    ] = False
    replay_routing: Annotated[
        bool,
        "in old and update passes, use the experts that the sampler's routers chose",
    ] = False
    resample: Annotated[
        int,
        integers(0, below=1000),
        "maximum number of further rollouts per step. They sample other prompts to "
        "replace groups whose rewards are all equal, which have no gradient. 0: keep "
        "these groups",
    ] = 0
    kl_coefficient: Annotated[
        float,
        reals(0),
        "weight of the KL divergence to the initial weights. 0: no copy of the "
        "initial weights is kept",
    ] = 0.0
    entropy_coefficient: Annotated[float, reals(0), "weight of the entropy bonus"] = 0.0
    minibatches: Annotated[
        int, integers(1), "number of minibatches per rollout; each gives one update"
    ] = 1
    epochs: Annotated[int, integers(1), "number of passes over a rollout"] = 1
    max_tokens_train: Annotated[
        int,
        integers(1),
        "maximum token positions, padding included, of a micro-batch with a backward "
        "pass",
    ] = 2048
    max_tokens_forward: Annotated[
        int,
        integers(1),
        "maximum token positions, padding included, of a micro-batch without a "
        "backward pass",
    ] = 8192
    row_lengths: Annotated[
        tuple[int, ...] | None,
        ROW_LENGTHS,
        "lengths of packed rows, increasing; jax compiles a program for each. None: "
        "the longest possible sequence, rounded up to 16. None with "
        "grpo.share_prompts: a prompt and as many completions as a group has, and a "
        "quarter as many",
    ] = None
    share_prompts: Annotated[
        bool,
        "True: all passes read a group's prompt once per row, which contains this "
        "prompt and several completions",
    ] = False
    prefix_cut: Annotated[
        float | None,
        reals(0, below=1),
        "each completion is cut at a random position after at least this fraction of "
        "its tokens; tokens are weighted by 1 / probability of being kept. None: no "
        "cuts",
    ] = None
    token_fraction: Annotated[
        float,
        reals(above=0, high=1),
        "share of the sampled tokens that an update learns from, and the head "
        "computes. Tokens are kept at random, with probabilities in proportion to a "
        "bound of their gradients, by which their losses are divided, so that the "
        "expected gradient stays the same",
    ] = 1.0
    max_head_error: Annotated[
        float,
        reals(above=0),
        'with head.gradient=("recorded", k): a micro-batch takes an exact forward pass '
        "if the mean error of its log-probabilities, in nats, exceeds this: the error "
        "that is estimated for all tokens, or the one that is measured at a few",
    ] = 0.01

    RULES = (
        must(
            "correction_low",
            _NO_BOUND,
            lambda grpo: (
                grpo.correction_low is None or grpo.correction_row.low is not None
            ),
        ),
        must(
            "correction_high",
            _NO_BOUND,
            lambda grpo: (
                grpo.correction_high is None or grpo.correction_row.high is not None
            ),
        ),
        must("correction_low", "0 or more, or None", lambda grpo: grpo.bounds[0] >= 0),
        must(
            "correction_high",
            "at least correction_low={bounds[0]:g}, or None",
            lambda grpo: grpo.bounds[1] >= grpo.bounds[0],
        ),
        wrong(
            "minibatches",
            "must divide prompts x group_size = {samples}, got {value}",
            lambda grpo: grpo.samples % grpo.minibatches,
        ),
    )
    # Rules that read the row of `loss`, for which a user's file is executed.
    LOSS_RULES = (
        must(
            "clip_low",
            "None for loss={loss!r}",
            lambda grpo: grpo.clip_low is None or grpo.policy_loss.clips,
        ),
        must(
            "clip_high",
            "None for loss={loss!r}",
            lambda grpo: grpo.clip_high is None or grpo.policy_loss.clips,
        ),
        must(
            "clip_low",
            "{lowest_clips}, or None",
            lambda grpo: (
                grpo.clip_low is None
                or 0 <= grpo.clip_low <= grpo.policy_loss.clip_low_max
            ),
        ),
        must(
            "clip_high",
            "0 or more, or None",
            lambda grpo: grpo.clip_high is None or grpo.clip_high >= 0,
        ),
        must(
            "loss",
            f"{_UNCUT}: it reads whole sequences",
            lambda grpo: grpo.prefix_cut is None or not grpo.has_sequence_ratio,
        ),
        must(
            "correction",
            f"{_UNCUT}: it reads whole sequences",
            lambda grpo: grpo.prefix_cut is None or not grpo.drops_sequences,
        ),
        must(
            "epochs",
            f"{_UNCUT}: all completions would be cut at the same place",
            lambda grpo: grpo.prefix_cut is None or grpo.epochs == 1,
        ),
    )

    def __post_init__(self):
        """Refuse impossible values, by name."""
        check(self)
        if self.loss in POLICY_LOSSES:
            self.check_loss()

    def check_loss(self) -> None:
        """Refuse values that the loss cannot have; a user's loss is loaded for it."""
        check_rules(self, self.LOSS_RULES)

    @functools.cached_property
    def policy_loss(self) -> PolicyLoss:
        """The row that `loss` names; a user's file is executed for it."""
        return policy_losses.load(self.loss)

    @property
    def advantage_name(self) -> str:
        """`advantage`, or the loss's own."""
        return self.advantage or self.policy_loss.advantage

    @property
    def lowest_clips(self) -> str:
        """The range of `clip_low` for the loss, in words."""
        # CISPO's weights have no lower bound from 1 on, as verl's example has it.
        highest = self.policy_loss.clip_low_max
        return "0 or more" if math.isinf(highest) else f"in [0, {highest:g}]"

    @property
    def correction_row(self) -> policy_losses.Correction:
        """The row that `correction` names; "ratio", which has no weights, for None."""
        return policy_losses.CORRECTIONS[self.correction or "ratio"]

    @property
    def bounds(self) -> tuple[float, float]:
        """The bounds of the correction: its own, or those that are set."""
        return self.correction_row.bounds(self.correction_low, self.correction_high)

    @property
    def has_sequence_ratio(self) -> bool:
        """True if the loss's ratio is that of a whole sequence."""
        return self.policy_loss.of_sequences

    @property
    def has_reference(self) -> bool:
        """True if log-probabilities under the initial weights are part of the loss."""
        return bool(self.kl_coefficient) or self.policy_loss.has_reference

    @property
    def differentiates_entropy(self) -> bool:
        """True if entropies are part of the loss, and not metrics alone."""
        return bool(self.entropy_coefficient) or self.policy_loss.has_entropy

    @property
    def drops_sequences(self) -> bool:
        """True if the correction drops whole sequences, before their gradients."""
        return self.correction_row.of_sequences

    @property
    def corrects_tokens(self) -> bool:
        """True if the correction has a weight for each token in the loss."""
        return self.correction_row.weights is not None and not self.drops_sequences

    @property
    def keeps_at_random(self) -> bool:
        """True if updates learn from random tokens, each with its own weight."""
        return self.token_fraction < 1 or self.prefix_cut is not None

    @property
    def samples(self) -> int:
        """Completions in a rollout."""
        return self.prompts * self.group_size

    @property
    def clips(self) -> tuple[float, float] | None:
        """Distances below and above 1 at which ratios are clipped; None: never."""
        loss = self.policy_loss
        return loss.bounds(self.clip_low, self.clip_high) if loss.clips else None


class PolicyBatch(NamedTuple):
    """Completions in packed rows: arrays [B, T], arbitrary where masked."""

    batch: Batch  # labels are the sampled tokens; -1 in prompts and padding
    # under the weights before the rollout's first update; SAME_WEIGHTS where these are
    # still the weights
    old_logprob: np.ndarray | jax.Array
    advantages: np.ndarray | jax.Array
    weights: np.ndarray | jax.Array  # of each token in the sum of the loss
    ref_logprob: np.ndarray | jax.Array | None  # under the initial weights
    # ids that each token was drawn from, in row-major order; None: the vocabulary
    supports: Supports | None = None
    rollout_logprob: np.ndarray | jax.Array | None = (
        None  # of the sampler, for `correction`
    )
    # `losses.sequence_log_ratio` before this update, where the loss has one
    sequence_log_ratio: np.ndarray | jax.Array | None = None
    share: Any = None  # scalar, of the minibatch's tokens; None: no loss of routers
    routes: np.ndarray | jax.Array | None = None  # [B, T, ...] that are replayed
    # weights of the tokens in sums of metrics; None: all are 1
    inverse: np.ndarray | jax.Array | None = None
    # of the tokens' softmax when they were sampled, or before the first update; None:
    # the loss reads none
    entries: RecordedEntries | None = None
    # [B, T] True for tokens whose exact log-probability is computed, too; with entries
    probed: np.ndarray | jax.Array | None = None

    def of_tokens(self) -> dict[str, np.ndarray | jax.Array]:
        """The arrays [B, T] that the objective reads, by name."""
        others = (
            "batch", "supports", "share", "routes", "inverse", "entries", "probed"
        )  # fmt: skip
        fields = self._asdict().items()
        return {k: x for k, x in fields if x is not None and k not in others}


# Largest error of a token in means, in nats: a few tokens without an estimate have the
# results of their record, and do not decide about thousands of others.
MOST_ERROR = 1.0


class HeadCheck(NamedTuple):
    """Errors of the log-probabilities that recorded entries give in a micro-batch.

    A token's error counts as `MOST_ERROR` at most.
    """

    rejected: Any  # bool: a mean is above grpo.max_head_error, or undefined
    estimated: Any  # mean over all tokens of the standard deviations that are estimated
    measured: Any  # mean over the tokens that are probed of their absolute errors
    tokens: Any  # number of all tokens
    probed: Any  # number of those that are probed
    without_estimate: Any  # number of tokens whose standard deviation is infinite


def token_objective(config: GrpoConfig, names: Sequence[str]) -> Callable:
    """The function of statistics and of the arrays `names` for `jaxmem.token_loss`."""
    loss, clips = config.policy_loss, config.clips

    def objective(stats, *values):
        arrays = dict(zip(names, values, strict=True))
        lp, entropy = stats.logprob, stats.entropy
        old, advantages = arrays["old_logprob"], arrays["advantages"]
        old = jnp.where(old == SAME_WEIGHTS, jax.lax.stop_gradient(lp), old)
        if "rollout_logprob" in arrays:
            advantages *= correction(config, old, arrays["rollout_logprob"])
        log_ratio = arrays["sequence_log_ratio"] if loss.of_sequences else lp - old
        computed = {"logprob": lp, "old_logprob": old, "advantages": advantages}
        total = loss.of_tokens(arrays | computed | {"entropy": entropy}, clips)
        metrics = {
            "logprob": lp,
            "entropy": entropy,
            "sum_pi_squared": stats.sum_pi_squared,
            "clip_fraction": loss.clipped(log_ratio, advantages, clips),
        }
        if "ref_logprob" in arrays:
            kl = losses.kl_k3(lp, arrays["ref_logprob"])
            if config.kl_coefficient:
                total += config.kl_coefficient * kl
            metrics["kl"] = kl
        if config.entropy_coefficient:
            coefficient = config.entropy_coefficient
            total += losses.entropy_bonus(entropy, coefficient=coefficient)
        return arrays["weights"] * total, metrics

    return objective


def correction(
    config: GrpoConfig, old: Any, rollout: Any, where: Any = None
) -> jax.Array:
    """Weights of tokens by `grpo.correction`, factors of the loss.

    `old` are the trainer's log-probabilities under the weights that sampled, `rollout`
    the sampler's; `where` [N, R] masks the tokens of a correction of sequences.
    """
    chosen, (low, high) = config.correction_row, config.bounds
    assert chosen.weights is not None
    bounds = {chosen.low: low, chosen.high: high}
    options = {name: x for name, x in bounds.items() if name is not None}
    if chosen.of_sequences:
        ids = jnp.ones(jnp.shape(old), jnp.int32)
        return chosen.weights(old, rollout, ids, where=where, **options)
    return chosen.weights(old, rollout, **options)


@dataclasses.dataclass(frozen=True)
class PolicyHeadOptions:
    """Options of `policy_loss` for its calls of the head."""

    temperature: float  # of the sampler
    logits: Literal["fused", "materialised"]  # without logits, or by autodiff
    max_ids: int | None = None  # of a token's support; None without supports
    sample: Sample | None = None  # how to sample the gradient, where "fused"
    key: jax.Array | None = None  # with `sample`
    # True: from the micro-batch's entries, where "fused"
    recorded: bool = False


def policy_loss(
    head: LMHead,
    hidden: jax.Array,
    micro_batch: PolicyBatch,
    normalizer: jax.Array,
    config: GrpoConfig,
    call: PolicyHeadOptions,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Loss of one micro-batch of hidden states [B, T, D], and metrics of its tokens.

    The metrics [B, T] are `logprob`, `entropy`, `sum_pi_squared`, `clip_fraction` and,
    with a reference, `kl` and, with supports, `whole`, the log-probability over the
    vocabulary; 0 where masked.
    """
    labels, arrays = jnp.asarray(micro_batch.batch.labels), micro_batch.of_tokens()
    objective, per_token = token_objective(config, tuple(arrays)), [*arrays.values()]
    if call.logits == "fused" and micro_batch.supports is None:
        return head.token_loss(
            objective,
            hidden,
            labels,
            *per_token,
            normalizer=normalizer,
            temperature=call.temperature,
            gradient=Recorded(micro_batch.entries) if call.recorded else call.sample,
            key=call.key,
        )
    stats, whole = _head_stats(head, hidden, labels, call), {}
    if micro_batch.supports is not None:
        whole = {"whole": stats.logprob}
        if not config.differentiates_entropy:  # metrics only: no backward pass
            stats = jax.lax.stop_gradient(stats)
        within = within_supports(head, hidden, labels, micro_batch.supports, call)
        stats = stats._replace(logprob=within)
    live = labels >= 0
    # Before the loss, not after it: 0 · NaN would be NaN in the gradient.
    per_token = [jnp.where(live, x, 0) for x in per_token]
    terms, metrics = objective(stats, *per_token)
    metrics = {k: jnp.where(live, v, 0) for k, v in (metrics | whole).items()}
    return jnp.sum(jnp.where(live, terms, 0)) / jnp.maximum(normalizer, 1), metrics


def within_supports(
    head: LMHead,
    hidden: jax.Array,
    labels: jax.Array,
    supports: Supports,
    call: PolicyHeadOptions,
) -> jax.Array:
    """Log-probabilities [B, T] of labels among the ids that they were drawn from."""
    return head.support_logprobs(
        hidden,
        labels,
        supports.ids,
        temperature=call.temperature,
        offsets=supports.offsets,
        max_ids=call.max_ids,
    )


def _head_stats(
    head: LMHead, hidden, labels, call: PolicyHeadOptions
) -> jaxmem.TokenStats:
    if call.logits == "fused":
        return head.token_stats(hidden, labels, temperature=call.temperature)
    return jaxmem.token_stats_from_logits(
        head(hidden), labels, None, temperature=call.temperature
    )


class Average(NamedTuple):
    """Weights and normaliser of the tokens of one minibatch."""

    weights: np.ndarray  # float32, of each sequence's tokens
    normalizer: np.float32


def average(
    config: GrpoConfig, lengths: Sequence[int] | np.ndarray, max_new_tokens: int
) -> Average:
    """The average over a minibatch of sequences of `lengths` sampled tokens.

    >>> average(GrpoConfig(loss="grpo"), [1, 4], 8)
    Average(weights=array([1.  , 0.25], dtype=float32), normalizer=np.float32(2.0))
    >>> average(GrpoConfig(loss="dapo"), [1, 4], 8)
    Average(weights=array([1., 1.], dtype=float32), normalizer=np.float32(5.0))
    """
    lengths, over = np.asarray(lengths), config.policy_loss.average
    if over == "sequences":
        weights = (1 / np.maximum(lengths, 1)).astype(np.float32)
        return Average(weights, np.float32(len(lengths)))
    total = len(lengths) * max_new_tokens if over == "slots" else lengths.sum()
    return Average(np.ones(len(lengths), np.float32), np.float32(total))
