"""Losses and corrections of reinforcement learning, by the names of a gin file.

A loss has the name of its function in `jaxmem.losses`.
"""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax

from jaxmem import losses

LossName = Literal["grpo", "dr_grpo", "dapo", "cispo", "ppo_clip", "gspo", "sapo"]


class PolicyLoss(NamedTuple):
    """A loss of tokens, and over what its average is taken."""

    surrogate: Callable[..., jax.Array]
    over: Literal["sequences", "tokens", "slots"]
    clips: bool = True
    of_sequences: bool = False  # whether its ratio is that of a whole sequence

    def bounds(self, low: float | None, high: float | None) -> tuple[float, float]:
        """How far below and above 1 a ratio counts, as given or its own."""
        return (
            _own(self.surrogate, "clip_low") if low is None else low,
            _own(self.surrogate, "clip_high") if high is None else high,
        )


DUAL_CLIP = 3.0  # as in verl and in the paper of the dual clip
LOSSES = {
    # A KL term is added to any of them.
    "grpo": PolicyLoss(functools.partial(losses.grpo, ref_logprob=None), "sequences"),
    "dr_grpo": PolicyLoss(losses.dr_grpo, "slots"),
    "dapo": PolicyLoss(losses.dapo, "tokens"),
    "cispo": PolicyLoss(losses.cispo, "tokens"),
    "ppo_clip": PolicyLoss(
        functools.partial(losses.ppo_clip, dual_clip=DUAL_CLIP), "tokens"
    ),
    "gspo": PolicyLoss(losses.gspo, "sequences", of_sequences=True),
    "sapo": PolicyLoss(losses.sapo, "sequences", clips=False),
}


class Correction(NamedTuple):
    """Weights of tokens that another engine sampled, and the names of their bounds.

    Without weights, the ratio in the loss is that to the sampler.
    """

    weights: Callable[..., jax.Array] | None
    low: str | None
    high: str | None
    of_sequences: bool = False

    def bounds(self, low: float | None, high: float | None) -> tuple[float, float]:
        """Bounds as given or its own; 0 and infinity where it has none."""
        if low is None:
            low = 0.0 if self.low is None else _own(self.weights, self.low)
        if high is None:
            high = math.inf if self.high is None else _own(self.weights, self.high)
        return low, high


CORRECTIONS = {
    "tis": Correction(losses.truncated_importance_weights, None, "cap"),
    "mis": Correction(losses.masked_importance_weights, None, "cap"),
    "icepop": Correction(losses.icepop_weights, "low", "high"),
    "sequence_mask": Correction(
        losses.sequence_mask_weights, "low", "high", of_sequences=True
    ),
    "ratio": Correction(None, None, None),
}


def _own(function: Any, name: str) -> float:
    """The default of an argument."""
    return inspect.signature(function).parameters[name].default
