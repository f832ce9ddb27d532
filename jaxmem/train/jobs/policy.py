"""What a policy learns from: the loss of its tokens, packed, and how it is averaged.

    loss = Σ_t w_t (surrogate_t + kl_coefficient · k3_t - entropy_coefficient · H_t) / n

Weights w and normaliser n, which are those of a whole minibatch and known before it is
read, are all that tells one average from another; advantages come from
`jaxmem.losses.grpo_advantages`.

Where the sampler truncates, every log-probability in the surrogate and in k3 is that
within the support which the token was drawn from, so that ratios compare the
distributions that were sampled from. H is the entropy over the whole vocabulary.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxmem
from jaxmem import losses
from jaxmem.core.fields import check_field
from jaxmem.core.gradients import Sample
from jaxmem.data.documents import Batch
from jaxmem.heads.nnx import LMHead
from jaxmem.packing import Supports

_SURROGATES: dict[str, Callable[..., jax.Array]] = {
    "grpo": losses.ppo_clip,
    "dr_grpo": losses.dr_grpo,
    "dapo": losses.dapo,
    "cispo": losses.cispo,
}


@dataclasses.dataclass(frozen=True)
class GrpoConfig:
    """What a rollout is, and how the policy learns from it."""

    prompts: int = 32  # problems in a rollout
    group_size: int = 16  # samples of each problem; at least 2
    # grpo: mean of the sequences' means; dr_grpo: divided by neither lengths nor
    # deviations; dapo and cispo: mean over tokens
    loss: Literal["grpo", "dr_grpo", "dapo", "cispo"] = "grpo"
    clip_low: float | None = (
        None  # how far below 1 a ratio counts; None: the loss's own
    )
    clip_high: float | None = None  # how far above
    kl_coefficient: float = 0.0  # weight of the KL to the initial weights; 0: no copy
    entropy_coefficient: float = 0.0  # weight of the bonus for entropy
    minibatches: int = 1  # minibatches per rollout, an update each
    epochs: int = 1  # times that a rollout is gone through
    max_tokens_train: int = 2048  # slots of a micro-batch that has a backward pass
    max_tokens_forward: int = 8192  # slots of one that has none
    # widths of packed rows, increasing, each a shape to compile; None: the longest
    # sequence that there can be, rounded up to 16
    row_lengths: tuple[int, ...] | None = None
    # probability with which a sampled token is learned from; its loss is divided by it,
    # so that the expected gradient is the same, and the head computes only these tokens
    token_fraction: float = 1.0

    def __post_init__(self):
        """Refuse impossible values, by name."""
        for name in ("prompts", "minibatches", "epochs"):
            check_field(self, name, getattr(self, name) >= 1, "at least 1")
        for name in ("max_tokens_train", "max_tokens_forward"):
            check_field(self, name, getattr(self, name) >= 1, "at least 1")
        check_field(self, "group_size", self.group_size >= 2, "at least 2")
        known = tuple(_SURROGATES)
        check_field(self, "loss", self.loss in known, f"one of {known}")
        for name in ("kl_coefficient", "entropy_coefficient"):
            check_field(self, name, getattr(self, name) >= 0, "0 or more")
        if self.clip_low is not None:
            # CISPO's weights have no lower bound from 1 on, as verl's example has it.
            most = math.inf if self.loss == "cispo" else 1
            wanted = "0 or more" if self.loss == "cispo" else "in [0, 1]"
            good = 0 <= self.clip_low <= most
            check_field(self, "clip_low", good, f"{wanted}, or None")
        if self.clip_high is not None:
            check_field(self, "clip_high", self.clip_high >= 0, "0 or more, or None")
        good = 0 < self.token_fraction <= 1
        check_field(self, "token_fraction", good, "in (0, 1]")
        if self.samples % self.minibatches:
            raise ValueError(
                "GrpoConfig.minibatches must divide prompts x group_size = "
                f"{self.samples}, got {self.minibatches}"
            )
        if self.row_lengths is not None:
            check_widths(self, self.row_lengths)

    @property
    def samples(self) -> int:
        """Completions in a rollout."""
        return self.prompts * self.group_size

    @property
    def clips(self) -> tuple[float, float]:
        """How far below and above 1 a ratio counts."""
        default = inspect.signature(_SURROGATES[self.loss]).parameters
        low = default["clip_low"].default if self.clip_low is None else self.clip_low
        high = (
            default["clip_high"].default if self.clip_high is None else self.clip_high
        )
        return low, high


def check_widths(config: object, widths: tuple[int, ...]) -> None:
    """Raise unless the field `row_lengths` has widths of packed rows."""
    good = bool(widths) and all(type(w) is int and w >= 1 for w in widths)
    increasing = good and list(widths) == sorted(set(widths))
    check_field(config, "row_lengths", increasing, "increasing positive integers")


class PolicyBatch(NamedTuple):
    """Completions in packed rows: arrays [B, T], whatever a masked token holds."""

    batch: Batch  # labels are the sampled tokens; -1 in prompts and padding
    old_logprob: np.ndarray | jax.Array  # before the rollout's first update
    advantages: np.ndarray | jax.Array  # of its sequence
    weights: np.ndarray | jax.Array  # of a token in the sum
    ref_logprob: np.ndarray | jax.Array | None  # under the initial weights
    # ids that each token was drawn from, in row-major order; None: the vocabulary
    supports: Supports | None = None


def token_objective(config: GrpoConfig) -> Callable:
    """The function that `jaxmem.token_loss` makes a loss of."""
    surrogate, (low, high) = _SURROGATES[config.loss], config.clips

    def objective(stats, old, advantages, weights, *reference):
        lp, entropy = stats.logprob, stats.entropy
        loss = surrogate(lp, old, advantages, clip_low=low, clip_high=high)
        metrics = {
            "entropy": entropy,
            "sum_pi_squared": stats.sum_pi_squared,
            "clip_fraction": _is_clipped(config, lp - old, advantages),
        }
        if reference:
            kl = losses.kl_k3(lp, reference[0])
            loss, metrics["kl"] = loss + config.kl_coefficient * kl, kl
        if config.entropy_coefficient:
            coefficient = config.entropy_coefficient
            loss += losses.entropy_bonus(entropy, coefficient=coefficient)
        return weights * loss, metrics

    return objective


def _is_clipped(config, log_ratio, advantages):
    """1 where the clip changes what a token does: in PPO, it does nothing any more."""
    low, high = config.clips
    above, below = log_ratio > jnp.log1p(high), jnp.exp(log_ratio) < 1 - low
    if config.loss != "cispo":
        above, below = above & (advantages > 0), below & (advantages < 0)
    return (above | below).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class HeadCall:
    """How `policy_loss` calls the head."""

    temperature: float  # of the sampler
    implementation: Literal["fused", "materialised"]  # without logits, or by autodiff
    max_ids: int | None = None  # of a token's support; None without supports
    sample: Sample | None = None  # how to sample the gradient, where "fused"
    key: jax.Array | None = None  # with `sample`


def policy_loss(
    head: LMHead,
    hidden: jax.Array,
    micro_batch: PolicyBatch,
    normalizer: jax.Array,
    config: GrpoConfig,
    call: HeadCall,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Loss of one micro-batch, and metrics of its tokens.

    Args:
        head: of the policy.
        hidden: final hidden states [B, T, hidden].
        micro_batch: of B rows.
        normalizer: of the whole minibatch.
        config: which loss.
        call: options of the head.

    Returns:
        A float32 scalar, and `entropy`, `sum_pi_squared`, `clip_fraction` and, with a
        reference, `kl`, [B, T] each; 0 where masked.
    """
    labels, objective = jnp.asarray(micro_batch.batch.labels), token_objective(config)
    per_token = [micro_batch.old_logprob, micro_batch.advantages, micro_batch.weights]
    reference = micro_batch.ref_logprob
    per_token += [] if reference is None else [reference]
    if call.implementation == "fused" and micro_batch.supports is None:
        return head.token_loss(
            objective,
            hidden,
            labels,
            *per_token,
            normalizer=normalizer,
            temperature=call.temperature,
            gradient=call.sample,
            key=call.key,
        )
    stats = _stats(head, hidden, labels, call)
    if micro_batch.supports is not None:
        if not config.entropy_coefficient:  # they are metrics only: no backward pass
            stats = jax.lax.stop_gradient(stats)
        within = within_supports(head, hidden, labels, micro_batch.supports, call)
        stats = stats._replace(logprob=within)
    live = labels >= 0
    # Before the loss, not after it: 0 · NaN would be NaN in the gradient.
    per_token = [jnp.where(live, x, 0) for x in per_token]
    terms, metrics = objective(stats, *per_token)
    metrics = {k: jnp.where(live, v, 0) for k, v in metrics.items()}
    return jnp.sum(jnp.where(live, terms, 0)) / jnp.maximum(normalizer, 1), metrics


def within_supports(
    head: LMHead,
    hidden: jax.Array,
    labels: jax.Array,
    supports: Supports,
    call: HeadCall,
) -> jax.Array:
    """Log-probabilities [B, T] of labels among the ids that they were drawn from.

    Args:
        head: of the policy.
        hidden: final hidden states [B, T, hidden].
        labels: [B, T]; -1 marks padding.
        supports: of the tokens in row-major order.
        call: options of the head.
    """
    return head.support_logprobs(
        hidden,
        labels,
        supports.ids,
        temperature=call.temperature,
        offsets=supports.offsets,
        max_ids=call.max_ids,
    )


def _stats(head: LMHead, hidden, labels, call: HeadCall) -> jaxmem.TokenStats:
    """Statistics over the whole vocabulary."""
    if call.implementation == "fused":
        return head.token_stats(hidden, labels, None, call.temperature)
    return jaxmem.token_stats_from_logits(
        head(hidden), labels, None, temperature=call.temperature
    )


class Average(NamedTuple):
    """How the tokens of one minibatch are summed up."""

    weights: np.ndarray  # float32, of each sequence's tokens
    normalizer: np.float32


def average(
    config: GrpoConfig, lengths: Sequence[int] | np.ndarray, max_new_tokens: int
) -> Average:
    """Weights and normaliser of a minibatch.

    Args:
      config: which loss.
      lengths: tokens sampled in each of its sequences.
      max_new_tokens: the most there can be, Dr. GRPO's constant.

    >>> average(GrpoConfig(loss="grpo"), [1, 4], 8)
    Average(weights=array([1.  , 0.25], dtype=float32), normalizer=np.float32(2.0))
    >>> average(GrpoConfig(loss="dapo"), [1, 4], 8)
    Average(weights=array([1., 1.], dtype=float32), normalizer=np.float32(5.0))
    """
    lengths = np.asarray(lengths)
    if config.loss == "grpo":
        weights = (1 / np.maximum(lengths, 1)).astype(np.float32)
        return Average(weights, np.float32(len(lengths)))
    total = len(lengths) * max_new_tokens if config.loss == "dr_grpo" else lengths.sum()
    return Average(np.ones(len(lengths), np.float32), np.float32(total))
