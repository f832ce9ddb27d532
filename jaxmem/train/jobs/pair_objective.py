"""Losses of pairs of answers: DPO and its kin, or a loss of one's own.

`dpo.loss` names a row of `PAIR_LOSSES`, or a loss of one's own by "file.py:name": a
`PairLoss`, or its function alone.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp

from jaxmem import losses
from jaxmem.base import messages, user_code
from jaxmem.base.fields import check, check_rules
from jaxmem.base.ranges import reals
from jaxmem.base.rules import must
from jaxmem.train.jobs import loss_arguments

_REFERENCE = "ref_chosen", "ref_rejected"
_ARRAYS = "chosen", "rejected", *_REFERENCE
_NUMBERS = "beta", "gamma"


@dataclasses.dataclass(frozen=True)
class PairLoss:
    """A loss of pairs of answers, with all that a run has to know of it.

    The function gets an array per pair, float32 of one shape, for each of these names
    that its parameters have:

        chosen, rejected          ln p of both answers under the weights being updated;
                                  the gradient goes through them
        ref_chosen, ref_rejected  constants, under the weights that the run starts from,
                                  which score all pairs once; no reference is run if
                                  neither is named

    and the numbers dpo.beta and dpo.gamma, if its parameters have these names. It
    returns a loss per pair, which depends on no other pair.

    Attributes:
        function: the loss of each pair, such as `jaxmem.losses.dpo`.
        averages: True if ln p are means over an answer's tokens, and not their sums.

    Raises:
        ValueError: the function has another parameter without a default.
    """

    function: Callable[..., jax.Array]
    averages: bool = False

    def __post_init__(self):
        """Refuse impossible values, by name."""
        if not callable(self.function):
            setting, got = "PairLoss.function", self.function
            raise ValueError(messages.must_be(setting, "a function", got))
        try:
            loss_arguments.named(self.function, (*_ARRAYS, *_NUMBERS))
        except ValueError as error:
            raise ValueError(f"PairLoss.function cannot be used: {error}") from error

    @functools.cached_property
    def arguments(self) -> tuple[str, ...]:
        """Names of the arrays and numbers that the function gets."""
        return loss_arguments.named(self.function, (*_ARRAYS, *_NUMBERS))

    @property
    def has_reference(self) -> bool:
        """True if the loss reads log-probabilities under the initial weights."""
        return any(name in self.arguments for name in _REFERENCE)

    def number(self, name: str, value: float | None) -> float | None:
        """The value, or the function's default if it is None; None without both."""
        if value is not None or name not in self.arguments:
            return value
        own = loss_arguments.default_of(self.function, name)
        return None if own is inspect.Parameter.empty else own

    def of_pairs(self, values: dict[str, Any]) -> jax.Array:
        """Losses of pairs, from arrays and numbers by name."""
        return self.function(**{name: values[name] for name in self.arguments})


PAIR_LOSSES = {
    "sigmoid": PairLoss(losses.dpo),
    "ipo": PairLoss(losses.ipo),
    "ipo_mean": PairLoss(losses.ipo, averages=True),
    "simpo": PairLoss(losses.simpo, averages=True),
    "orpo": PairLoss(losses.orpo, averages=True),
}


@dataclasses.dataclass(frozen=True)
class DpoConfig:
    """The loss of pairs of answers and its numbers."""

    loss: Annotated[
        str,
        user_code.Named(PAIR_LOSSES),
        'loss of a pair. "sigmoid" is DPO; "ipo" is the squared distance of sums over '
        'an answer\'s tokens, as in the paper, and "ipo_mean" of means, as in TRL. '
        'Without a reference, over means: "simpo" is SimPO\'s margin, and "orpo" '
        "the supervised loss with an odds ratio. Or your own loss",
    ] = "sigmoid"
    beta: Annotated[
        float | None,
        reals(above=0),
        "strength of the reference; IPO's τ, SimPO's scale of rewards, ORPO's weight. "
        'None: the loss\'s own value, which is 2 for "simpo" and 0.1 for the others',
    ] = None
    gamma: Annotated[
        float | None, reals(0), "SimPO's margin. None: the loss's own value, 0.5"
    ] = None
    label_smoothing: Annotated[
        float,
        reals(0, below=0.5),
        "probability that the chosen and the rejected answer of a pair are swapped",
    ] = 0.0
    drop_long: Annotated[
        bool,
        "True: leave out pairs that are longer than a row. False: stop with an error",
    ] = False

    # Rules that read the row of `loss`, for which a user's file is executed.
    LOSS_RULES = tuple(
        rule
        for name in _NUMBERS
        for rule in (
            must(
                name,
                f"None for loss={{loss!r}}, which has no {name}",
                lambda dpo, name=name: (
                    getattr(dpo, name) is None or name in dpo.pair_loss.arguments
                ),
            ),
            must(
                name,
                "a number for loss={loss!r}, which has no default for it",
                lambda dpo, name=name: (
                    name not in dpo.pair_loss.arguments or dpo.numbers[name] is not None
                ),
            ),
        )
    )

    def __post_init__(self):
        """Refuse impossible values, by name."""
        check(self)
        if self.loss in PAIR_LOSSES:
            self.check_loss()

    def check_loss(self) -> None:
        """Refuse values that the loss cannot have; a user's loss is loaded for it."""
        check_rules(self, self.LOSS_RULES)

    @functools.cached_property
    def pair_loss(self) -> PairLoss:
        """The row that `loss` names; a user's file is executed for it."""
        return load(self.loss)

    @property
    def numbers(self) -> dict[str, float | None]:
        """`beta` and `gamma`, or the loss's own; None where it has none."""
        number = self.pair_loss.number
        return {name: number(name, getattr(self, name)) for name in _NUMBERS}


def load(name: str) -> PairLoss:
    """The loss of a name: a row of `PAIR_LOSSES`, or one of the user's code.

    Raises:
        UserCodeError: it cannot be loaded; or a pair's loss raises, is no number, or
            depends on other pairs.
    """
    if name in PAIR_LOSSES:
        return PAIR_LOSSES[name]
    loss = loss_arguments.load_row("dpo.loss", name, PAIR_LOSSES, PairLoss)
    arrays = [name for name in loss.arguments if name in _ARRAYS]
    numbers: dict[str, Any] = dict.fromkeys(_NUMBERS, 1.0)

    def of_pairs(*values: jax.Array) -> jax.Array:
        return loss.of_pairs(numbers | dict(zip(arrays, values, strict=True)))

    setting, code = f"dpo.loss={messages.short(name)}", loss.function
    loss_arguments.check(setting, code, of_pairs, len(arrays), "pair", "micro-batch")
    return loss


def pair_losses(
    config: DpoConfig, logprobs: jax.Array, reference: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Losses [B] of pairs, and their rewards, from log-probabilities [B, 2] of answers.

        out = (1 - ε) l(chosen, rejected) + ε l(rejected, chosen)
        reward = beta (ln p - ln p of the reference)

    ln p are sums over tokens, or means where the loss averages. A reference that the
    loss does not read is 0, and beta is 1 in the reward of a loss without one.
    """
    loss, numbers = config.pair_loss, config.numbers
    (c, r), (ref_c, ref_r) = logprobs.T, reference.T

    def of_pairs(*arrays: jax.Array) -> jax.Array:
        return loss.of_pairs(numbers | dict(zip(_ARRAYS, arrays, strict=True)))

    out, smoothing = of_pairs(c, r, ref_c, ref_r), config.label_smoothing
    if smoothing:
        out = (1 - smoothing) * out + smoothing * of_pairs(r, c, ref_r, ref_c)
    beta = numbers["beta"] or 1.0
    chosen, rejected = (beta * (logprobs - reference)).T
    margin = chosen - rejected
    return out, {
        "chosen_reward": chosen,
        "rejected_reward": rejected,
        "margin": margin,
        "accuracy": (margin > 0).astype(jnp.float32),
    }
