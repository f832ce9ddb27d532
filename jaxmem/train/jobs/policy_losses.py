"""Losses of a policy's tokens, and corrections, by the names of a gin file.

`grpo.loss` names a row of `POLICY_LOSSES`, or a loss of one's own by "file.py:name": a
`PolicyLoss`, or its surrogate alone.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxmem import losses
from jaxmem.base import messages
from jaxmem.train.jobs import loss_arguments
from jaxmem.train.jobs.advantages import ADVANTAGES
from jaxmem.train.jobs.loss_arguments import default_of

_CLIPS = "clip_low", "clip_high"
ARRAYS = (
    "logprob", "old_logprob", "advantages", "sequence_log_ratio", "ref_logprob",
    "entropy",
)  # fmt: skip
_AVERAGES = "sequences", "tokens", "slots"


@dataclasses.dataclass(frozen=True)
class PolicyLoss:
    """A loss of a policy's tokens, with all that a run has to know of it.

        loss = Σ_t w_t (surrogate_t + kl_coefficient · k3_t - entropy_coefficient · H_t)

    The surrogate gets an array per token, float32 of one shape, for each of these names
    that its parameters have:

        logprob             ln p of the sampled token under the weights being updated;
                            the gradient goes through it
        old_logprob         ln p under the weights that sampled; with
                            grpo.correction="ratio", that of the sampler itself
        advantages          A of the completion, or of its turn, with the weights of
                            grpo.correction
        sequence_log_ratio  mean of ln p - old ln p over the completion's tokens, before
                            this update
        ref_logprob         ln p under the initial weights, which the run then keeps
        entropy             of the token's distribution over the vocabulary; the
                            gradient goes through it

    All but two are constants. It returns a loss per token, which depends on no other
    token: `sequence_log_ratio` is all that a loss knows of its sequence. A KL term and
    a bonus for entropy are added to any loss.

    Attributes:
        surrogate: the loss of each token, such as `jaxmem.losses.ppo_clip`.
        average: what the average is taken over: the means of "sequences"; all "tokens";
            or all "slots", completions times the longest that may be sampled.
        clips: True if the surrogate has parameters `clip_low` and `clip_high`, with
            defaults, which grpo.clip_low and grpo.clip_high replace. The metric
            `clip_fraction` then counts ratios beyond them.
        clip_low_max: the largest `clip_low`; infinite if ratios may have no lower
            bound.
        clip_by_sign: True if the sign of A selects the bound that holds, as in PPO;
            False if both hold for all tokens, as in CISPO.
        dual_clip: the surrogate's argument `dual_clip`, the largest ratio of a token
            with A < 0; None: it has none.
        advantage: the row of `ADVANTAGES` that grpo.advantage=None stands for.

    Raises:
        ValueError: the surrogate has another parameter without a default, or a field is
            impossible.
    """

    surrogate: Callable[..., jax.Array]
    average: Literal["sequences", "tokens", "slots"] = "tokens"
    clips: bool = False
    clip_low_max: float = 1.0
    clip_by_sign: bool = True
    dual_clip: float | None = None
    advantage: str = "grpo"

    def __post_init__(self):
        """Refuse impossible values, by name."""
        for name, known in (("average", _AVERAGES), ("advantage", tuple(ADVANTAGES))):
            if (value := getattr(self, name)) not in known:
                key, expected = f"PolicyLoss.{name}", f"one of {known}"
                raise ValueError(messages.must_be(key, expected, value))
        if not callable(self.surrogate):
            setting, got = "PolicyLoss.surrogate", self.surrogate
            raise ValueError(messages.must_be(setting, "a function", got))
        known = (*ARRAYS, *_CLIPS * self.clips, *self._dual_clip)
        try:
            arguments = loss_arguments.named(self.surrogate, known)
        except ValueError as error:
            raise ValueError(f"PolicyLoss.surrogate cannot be used: {error}") from error
        for name in _CLIPS * self.clips:
            own = default_of(self.surrogate, name) if name in arguments else None
            if not isinstance(own, int | float):
                raise ValueError(
                    f"PolicyLoss.clips=True needs a surrogate with a parameter {name}, "
                    "whose default is a number"
                )
        if self.dual_clip is not None and "dual_clip" not in arguments:
            raise ValueError(
                f"PolicyLoss.dual_clip={self.dual_clip} needs a surrogate with a "
                "parameter dual_clip"
            )

    @property
    def _dual_clip(self) -> dict[str, float]:
        return {} if self.dual_clip is None else {"dual_clip": self.dual_clip}

    @functools.cached_property
    def arrays(self) -> tuple[str, ...]:
        """Names of the arrays that the surrogate gets."""
        known = *ARRAYS, *_CLIPS, "dual_clip"
        arguments = loss_arguments.named(self.surrogate, known)
        return tuple(name for name in ARRAYS if name in arguments)

    @property
    def of_sequences(self) -> bool:
        """True if the loss's ratio is that of a whole sequence."""
        return "sequence_log_ratio" in self.arrays

    @property
    def has_reference(self) -> bool:
        """True if the loss reads log-probabilities under the initial weights."""
        return "ref_logprob" in self.arrays

    @property
    def has_entropy(self) -> bool:
        """True if the gradient may go through entropies."""
        return "entropy" in self.arrays

    def bounds(self, low: float | None, high: float | None) -> tuple[float, float]:
        """Distances below and above 1 at which ratios are clipped.

        An argument that is None stands for the surrogate's default.
        """
        own = functools.partial(default_of, self.surrogate)
        return (
            own("clip_low") if low is None else low,
            own("clip_high") if high is None else high,
        )

    def of_tokens(
        self, values: Mapping[str, jax.Array], clips: tuple[float, float] | None
    ) -> jax.Array:
        """Losses of tokens, from arrays by name and the clips of `bounds`."""
        options: dict[str, Any] = {name: values[name] for name in self.arrays}
        if clips is not None:
            options |= dict(zip(_CLIPS, clips, strict=True))
        return self.surrogate(**options, **self._dual_clip)

    def clipped(
        self,
        log_ratio: jax.Array,
        advantages: jax.Array,
        clips: tuple[float, float] | None,
    ) -> jax.Array:
        """1 where the clip changes a token's gradient; in PPO, it is 0 there."""
        if clips is None:
            return jnp.zeros_like(log_ratio)
        low, high = clips
        above, below = log_ratio > jnp.log1p(high), jnp.exp(log_ratio) < 1 - low
        if self.clip_by_sign:
            if self.dual_clip is not None:
                below |= log_ratio > math.log(self.dual_clip)
            above, below = above & (advantages > 0), below & (advantages < 0)
        return (above | below).astype(jnp.float32)


POLICY_LOSSES = {
    # A loss has the name of its function in `jaxmem.losses`. A KL term is added to any
    # of them.
    "grpo": PolicyLoss(
        functools.partial(losses.grpo, ref_logprob=None), "sequences", clips=True
    ),
    "dr_grpo": PolicyLoss(losses.dr_grpo, "slots", clips=True, advantage="dr_grpo"),
    "dapo": PolicyLoss(losses.dapo, clips=True),
    "ppo_clip": PolicyLoss(
        losses.ppo_clip,
        clips=True,
        dual_clip=3.0,  # as in verl and in the paper of the dual clip
    ),
    "cispo": PolicyLoss(
        losses.cispo, clips=True, clip_low_max=math.inf, clip_by_sign=False
    ),
    "gspo": PolicyLoss(losses.gspo, "sequences", clips=True),
    "sapo": PolicyLoss(losses.sapo, "sequences"),
}


def load(name: str) -> PolicyLoss:
    """The loss of a name: a row of `POLICY_LOSSES`, or one of the user's code.

    Raises:
        UserCodeError: it cannot be loaded; or a token's loss raises, is no number, or
            depends on other tokens.
    """
    if name in POLICY_LOSSES:
        return POLICY_LOSSES[name]
    loss = loss_arguments.load_row("grpo.loss", name, POLICY_LOSSES, PolicyLoss)
    clips = loss.bounds(None, None) if loss.clips else None

    def of_tokens(*values: jax.Array) -> jax.Array:
        return loss.of_tokens(dict(zip(loss.arrays, values, strict=True)), clips)

    setting, count = f"grpo.loss={messages.short(name)}", len(loss.arrays)
    loss_arguments.check(setting, loss.surrogate, of_tokens, count, "token", "chunk")
    return loss


class Correction(NamedTuple):
    """Weights of tokens that another engine sampled, and the names of their bounds.

    Without weights, the loss's own ratio is to the sampler's probability.
    """

    weights: Callable[..., jax.Array] | None
    low: str | None
    high: str | None
    of_sequences: bool = False

    def bounds(self, low: float | None, high: float | None) -> tuple[float, float]:
        """The bounds `low` and `high`; the defaults of `weights` where they are None.

        A bound that the correction does not have is 0 or infinite.
        """
        own = functools.partial(default_of, self.weights)
        lowest = 0.0 if self.low is None else own(self.low)
        highest = math.inf if self.high is None else own(self.high)
        return (
            lowest if low is None else low,
            highest if high is None else high,
        )


CORRECTIONS = {
    "tis": Correction(losses.truncated_importance_weights, None, "cap"),
    "mis": Correction(losses.masked_importance_weights, None, "cap"),
    "icepop": Correction(losses.icepop_weights, "low", "high"),
    "sequence_mask": Correction(
        losses.sequence_mask_weights, "low", "high", of_sequences=True
    ),
    "ratio": Correction(None, None, None),
}
