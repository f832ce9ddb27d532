"""A rollout, and the line of metrics.jsonl that its step leaves."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

import jaxmem
from jaxmem.models.sampling import Samples
from jaxmem.train.jobs.config import GrpoJobConfig
from jaxmem.train.jobs.grpo.minibatches import TokenDraw
from jaxmem.train.jobs.policy_objective import HeadCheck
from jaxmem.train.jobs.rollout.entries import RolloutEntries
from jaxmem.train.jobs.rollout.nested_rows import join
from jaxmem.train.jobs.rollout.packed import Completions, Logprobs, RolloutSupports
from jaxmem.train.jobs.rollout.prompts import Graded, PromptIds
from jaxmem.train.jobs.rollout.samples import Sampled


class Rollout(NamedTuple):
    """Completions, their rewards and advantages; numpy arrays of N samples."""

    prompts: PromptIds
    completions: Completions
    samples: Samples  # without support_ids and entries
    # ids that the tokens were drawn from; None: the vocabulary
    supports: RolloutSupports | None
    entries: RolloutEntries | None  # of the sampler; None: it records none
    graded: Graded
    advantages: np.ndarray  # [N]; or [N, R] of tokens, where turns are compared
    truncated: np.ndarray  # [N] bool, completions without an end
    # fields of `PolicyMetrics` about all sampled completions, of which N are kept
    sampled: dict[str, Any]

    @property
    def learned(self) -> np.ndarray:
        """The tokens [N, R] of completions that have an end."""
        return np.asarray(self.samples.mask) & ~self.truncated[:, None]


class Clock:
    """Seconds of phases that follow one another."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self._start = self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """End a part of the phase of that name; it began where the last one ended."""
        now, name = time.perf_counter(), f"{phase}_seconds"
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now
        self.seconds["seconds"] = now - self._start


_mismatch = jax.jit(jaxmem.mismatch_report)


def agreement(old: Logprobs, samples: Samples) -> dict[str, float | None]:
    """Differences between the trainer's probabilities and the sampler's.

    They are of tokens that the trainer has measured, and None without any.
    """
    mask = np.asarray(samples.mask) & old.known
    samples = samples._replace(mask=mask)
    report = jax.device_get(_mismatch(old.drawn_from, samples.logprobs, mask))
    unreplayed = None
    if old.whole is not None:
        unreplayed = _share_inside(old.whole, samples)
    return {
        **{
            name: float(getattr(report, of_report)) if mask.any() else None
            for name, of_report in _REPORTED.items()
        },
        "ratios_inside_1_1": _share_inside(old.drawn_from, samples),
        "unreplayed_inside_1_1": unreplayed,
    }


# Fields of `PolicyMetrics` by those of a `MismatchReport`.
_REPORTED = {
    **{f"mismatch_{name}": name for name in ("mean", "p50", "p95", "p99", "max")},
    **{f"ratios_{name}": name for name in (
        "outside_1_25", "outside_2", "inside_1_01", "inside_strict",
    )},
}  # fmt: skip


def _share_inside(logprobs: np.ndarray, samples: Samples) -> float | None:
    """Share of sampled tokens whose ratio to the sampler is in [0.9, 1.1]."""
    mask = np.asarray(samples.mask)
    if not mask.any():
        return None
    ratios = np.exp((logprobs - np.asarray(samples.logprobs))[mask])
    return float(np.mean((ratios >= 0.9) & (ratios <= 1.1)))


def dropped(
    weights: np.ndarray | None, old: Logprobs, samples: Samples
) -> dict[str, float | None]:
    """Share of measured tokens that a correction drops, a field of `PolicyMetrics`."""
    if weights is None:
        return {}
    mask = np.asarray(samples.mask) & old.known
    return {"dropped": float((weights[mask] == 0).mean()) if mask.any() else None}


def of_supports(
    supports: RolloutSupports | None, config: GrpoJobConfig, vocab_size: int
) -> dict[str, float | None]:
    """Sizes of the supports of sampled tokens, as fields of `PolicyMetrics`."""
    if supports is None:
        return {}
    sizes = supports.sizes[supports.sizes > 0]
    full = None
    # The limit cuts no support that top_k or the vocabulary bounds as well.
    if config.sampling.top_k is None and supports.limit < vocab_size:
        full = float(np.mean(sizes == supports.limit))
    return {"support_mean": float(sizes.mean()), "support_full": full}


class Update(NamedTuple):
    """Measurements of one update of the policy."""

    loss: Any  # scalar
    grad_norm: Any  # scalar, before clipping
    metrics: Mapping[str, Any]  # weighted sums over its tokens
    tokens: float  # sum of these weights; without any, the number of tokens
    routed: Any = None  # `balance.Routed`, of a model with experts
    # the tokens that were drawn by grpo.token_fraction; None: all
    draw: TokenDraw | None = None
    checks: Sequence[HeadCheck] = ()  # of micro-batches with entries


def of_updates(updates: Sequence[Update]) -> dict[str, float | None]:
    """Means over a step's updates and their tokens, as fields of `PolicyMetrics`.

    Means over tokens are None where no update has learned from any.
    """
    tokens = sum(update.tokens for update in updates)
    per_token = {
        name: float(sum(u.metrics[name] for u in updates)) / tokens if tokens else None
        for name in updates[0].metrics
    }
    return {
        "loss": float(np.mean([update.loss for update in updates])),
        "grad_norm": float(np.mean([update.grad_norm for update in updates])),
        **({"kl": None} | per_token),
        **_of_draws([update.draw for update in updates if update.draw is not None]),
        **_of_checks([check for update in updates for check in update.checks]),
    }


def _of_checks(checks: Sequence[HeadCheck]) -> dict[str, float | None]:
    """Errors of log-probabilities from entries, as fields of `PolicyMetrics`."""
    if not checks:
        return {}

    def mean(errors: list[float], counts: list[int]) -> float | None:
        return float(np.average(errors, weights=counts)) if any(counts) else None

    tokens = [int(check.tokens) for check in checks]
    probed = [int(check.probed) for check in checks]
    return {
        "forward_error": mean([float(check.estimated) for check in checks], tokens),
        "head_error": mean([float(check.measured) for check in checks], probed),
        "head_rejected": sum(bool(check.rejected) for check in checks),
        "head_checked": len(checks),
        "head_without_estimate": sum(int(check.without_estimate) for check in checks),
    }


def _of_draws(draws: Sequence[TokenDraw]) -> dict[str, float | None]:
    """Share and largest weight of the tokens kept, as fields of `PolicyMetrics`."""
    kept = sum(int(draw.kept.sum()) for draw in draws)
    if not kept:
        return {}
    learnable = sum(int((draw.inverse > 0).sum()) for draw in draws)
    weights = [draw.inverse.max(initial=0, where=draw.kept) for draw in draws]
    return {"token_share": kept / learnable, "token_weight_max": float(max(weights))}


def of_rollout(rollout: Rollout) -> dict[str, Any]:
    """Rewards and lengths, as fields of `PolicyMetrics`."""
    tokens = rollout.prompts.lengths.sum() + rollout.completions.lengths.sum()
    return {**rollout.sampled, "tokens": int(tokens)}


def of_sampled(
    parts: Sequence[Sampled], kept: Sampled | None, group_size: int
) -> dict[str, Any]:
    """Fields of `PolicyMetrics` about all rollouts of a step.

    `kept` are the completions that `grpo.resample` has chosen; None without it.
    """
    means = _mean_metrics(parts, group_size)
    turns = busy = None
    if parts[0].completions.own is not None:
        turns = float(np.concatenate([part.turns for part in parts]).mean())
    if slots := sum(part.decoded.slots for part in parts):
        busy = sum(part.decoded.tokens for part in parts) / slots
    kept_means = None
    if kept is not None:
        of_kept = _mean_metrics([kept], group_size)
        kept_means = {name: of_kept[name] for name in _OF_KEPT}
    counts = {"resampled": len(parts) - 1, "turns": turns, "busy": busy}
    return {**means, **counts, "kept": kept_means}


_OF_KEPT = "reward", "accuracy", "degenerate", "truncated", "response_length"


def _mean_metrics(parts: Sequence[Sampled], group_size: int) -> dict[str, Any]:
    counts = np.concatenate([part.completions.counts for part in parts])
    truncated = np.concatenate([part.truncated for part in parts])
    return {
        **of_grades(join([part.graded for part in parts]), group_size),
        "truncated": float(truncated.mean()),
        "response_length": float(counts.mean()),
    }


def of_grades(graded: Graded, group_size: int) -> dict[str, Any]:
    """Rewards, as fields of `PolicyMetrics` and of `DistillMetrics`.

    Means are over completions that have a reward, and over groups with one of these.
    """
    rewarded = graded.rewarded.reshape(-1, group_size)
    groups = graded.rewards.reshape(-1, group_size)
    highest = groups.max(axis=1, where=rewarded, initial=-np.inf)
    lowest = groups.min(axis=1, where=rewarded, initial=np.inf)
    equal = (highest == lowest)[rewarded.any(axis=1)]
    parts = graded.parts
    return {
        "reward": mean_of(graded.rewards),
        "accuracy": mean_of(graded.right),
        "degenerate": float(equal.mean()) if len(equal) else None,
        "rewards": parts and {name: mean_of(values) for name, values in parts.items()},
        "unrewarded": int((~rewarded).sum()),
        "unparsed": _count(graded.unparsed),
    }


def mean_of(values: np.ndarray) -> float | None:
    """The mean of the values that are not NaN; None without any."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None


def of_held_out(graded: Sequence[Graded]) -> dict[str, Any]:
    """Means over held-out completions with a reward, as fields of the metrics."""
    whole = join(graded)
    return {
        "held_out_reward": mean_of(whole.rewards),
        "held_out_accuracy": mean_of(whole.right),
        "held_out_unrewarded": int((~whole.rewarded).sum()),
        "held_out_unparsed": _count(whole.unparsed),
    }


def of_held_out_samples(
    graded: Sequence[Graded], count: int
) -> dict[str, float | None]:
    """Means over `count` completions of each held-out prompt.

    They are `held_out_avg@count`, the mean reward, and `held_out_pass@k` of k = 1, 2,
    4, ... and `count`, the expected share of prompts of which one of k completions is
    right. Prompts of which fewer than k completions have a reward are left out.
    """
    whole = join(graded)
    right = whole.right.reshape(-1, count)
    sizes = 2 ** np.arange(count.bit_length())
    passed = {
        f"held_out_pass@{k}": mean_of(np.array([pass_at(k, row) for row in right]))
        for k in sorted({*sizes[sizes < count].tolist(), count})
    }
    return {f"held_out_avg@{count}": mean_of(whole.rewards), **passed}


def pass_at(k: int, right: np.ndarray) -> float:
    """The probability that one of k completions is right, drawn from n without return.

        pass@k = 1 - C(n - c, k) / C(n, k),   c of the n completions are right

    Args:
        k: completions that are drawn.
        right: [N] 1 for a right completion, 0 for a wrong one and NaN for one without a
            reward, which is no completion.

    Returns:
        The unbiased estimate; NaN if n < k.

    Reference: Chen et al., "Evaluating Large Language Models Trained on Code", 2021,
    arXiv:2107.03374.
    """
    known = right[~np.isnan(right)]
    total, wrong = len(known), int(np.sum(known == 0))
    if total < k:
        return math.nan
    return 1 - math.comb(wrong, k) / math.comb(total, k)


def _count(flags: np.ndarray | None) -> int | None:
    return None if flags is None else int(flags.sum())
