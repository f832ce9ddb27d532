"""A rollout, and the line of metrics.jsonl that its step leaves."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

import jaxmem
from jaxmem.models.sampling import Samples
from jaxmem.train.jobs.asked import Asked, Graded
from jaxmem.train.jobs.config import GrpoJobConfig
from jaxmem.train.jobs.rollouts import Completions, Logprobs, Supports


class Rollout(NamedTuple):
    """Completions and what they are worth; numpy arrays of N samples."""

    asked: Asked
    completions: Completions
    samples: Samples  # without support_ids
    supports: Supports | None  # what the tokens were drawn from; None: the vocabulary
    graded: Graded
    advantages: np.ndarray  # [N]; or [N, R] of tokens, where turns are compared
    truncated: np.ndarray  # [N] bool, completions without an end
    turns: np.ndarray  # [N] completions of a conversation
    resampled: int  # rollouts that were sampled besides, for groups that tell nothing
    busy: float | None  # share of the sampler's slots that decoded something

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
        """End the phase of that name, which began where the last one ended."""
        now = time.perf_counter()
        self.seconds[f"{phase}_seconds"] = now - self._last
        self._last = now
        self.seconds["seconds"] = now - self._start


_mismatch = jax.jit(jaxmem.mismatch_report)


def agreement(old: Logprobs, samples: Samples) -> dict[str, float | None]:
    """How far the trainer's probabilities are from the sampler's.

    Of tokens that the trainer has measured; None without any.
    """
    mask = np.asarray(samples.mask) & old.known
    samples = samples._replace(mask=mask)
    report = jax.device_get(_mismatch(old.drawn_from, samples.logprobs, mask))
    unreplayed = None
    if old.whole is not None:
        unreplayed = _inside(old.whole, samples)
    return {
        **{
            name: float(getattr(report, of_report)) if mask.any() else None
            for name, of_report in _REPORTED.items()
        },
        "ratios_inside_1_1": _inside(old.drawn_from, samples),
        "unreplayed_inside_1_1": unreplayed,
    }


# Fields of `PolicyMetrics` by those of a `MismatchReport`.
_REPORTED = {
    **{f"mismatch_{name}": name for name in ("mean", "p50", "p95", "p99", "max")},
    **{f"ratios_{name}": name for name in (
        "outside_1_25", "outside_2", "inside_1_01", "inside_strict",
    )},
}  # fmt: skip


def _inside(logprobs: np.ndarray, samples: Samples) -> float | None:
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
    supports: Supports | None, config: GrpoJobConfig, vocab_size: int
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
    """What an update of the policy measured."""

    loss: Any  # scalar
    grad_norm: Any  # scalar, before clipping
    metrics: Mapping[str, Any]  # summed over its tokens
    tokens: int  # that were learned from
    routed: Any = None  # `balance.Routed`, of a model with experts


def of_updates(updates: Sequence[Update]) -> dict[str, float | None]:
    """Means over a step's updates and their tokens, as fields of `PolicyMetrics`.

    Those over tokens are None where no update has learned from any.
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
    }


def of_rollout(rollout: Rollout, config: GrpoJobConfig) -> dict[str, Any]:
    """Rewards and lengths, as fields of `PolicyMetrics`."""
    lengths = rollout.completions.lengths
    turns = None
    if rollout.completions.own is not None:
        turns = float(rollout.turns.mean())
    return {
        **of_grades(rollout.graded, config.grpo.group_size),
        "truncated": float(rollout.truncated.mean()),
        "resampled": rollout.resampled,
        "turns": turns,
        "busy": rollout.busy,
        "response_length": float(rollout.completions.counts.mean()),
        "tokens": int(rollout.asked.lengths.sum() + lengths.sum()),
    }


def of_grades(graded: Graded, group_size: int) -> dict[str, Any]:
    """Rewards, as fields of `PolicyMetrics` and of `DistillMetrics`."""
    groups = graded.rewards.reshape(-1, group_size)
    return {
        "reward": float(graded.rewards.mean()),
        "accuracy": float(graded.right.mean()),
        "degenerate": float((groups == groups[:, :1]).all(axis=1).mean()),
        "rewards": graded.parts,
    }


def of_held_out(graded: Sequence[Graded]) -> dict[str, float]:
    """Mean reward and accuracy of held-out prompts, as fields of the same."""
    reward, right = (
        float(np.concatenate([getattr(grades, name) for grades in graded]).mean())
        for name in ("rewards", "right")
    )
    return {"held_out_reward": reward, "held_out_accuracy": right}
