"""What a model learns from pairs of answers: the losses of DPO and IPO."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from jaxmem import losses
from jaxmem.base.fields import check_field, check_numbers
from jaxmem.base.ranges import reals

_RANGES = {"beta": reals(above=0), "label_smoothing": reals(0, below=0.5)}
_LOSSES = {"sigmoid": losses.dpo, "ipo": losses.ipo, "ipo_mean": losses.ipo}


@dataclasses.dataclass(frozen=True)
class DpoConfig:
    """How a model learns from pairs of answers."""

    # DPO's own; or IPO's squared distance, of sums over an answer's tokens as in the
    # paper, or of their means ("ipo_mean"), as in TRL
    loss: Literal["sigmoid", "ipo", "ipo_mean"] = "sigmoid"
    beta: float = 0.1  # how strongly the reference holds; IPO's τ
    label_smoothing: float = 0.0  # probability that a pair is the wrong way round
    drop_long: bool = False  # leave out pairs longer than a row, instead of stopping

    def __post_init__(self):
        check_numbers(self, _RANGES)
        ways = tuple(_LOSSES)
        check_field(self, "loss", self.loss in ways, f"one of {ways}")

    @property
    def averages(self) -> bool:
        """Whether log-probabilities are means over an answer's tokens."""
        return self.loss == "ipo_mean"


def pair_losses(
    config: DpoConfig, logprobs: jax.Array, reference: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Losses [B] of pairs, and their rewards, from log-probabilities [B, 2] of answers.

        out = (1 - ε) l(chosen, rejected) + ε l(rejected, chosen)
        reward = beta (ln p - ln p of the reference)

    ln p are sums over tokens, or means where `config.averages`.
    """
    loss = _LOSSES[config.loss]
    (c, r), (ref_c, ref_r) = logprobs.T, reference.T
    out, smoothing = loss(c, r, ref_c, ref_r, beta=config.beta), config.label_smoothing
    if smoothing:
        swapped = loss(r, c, ref_r, ref_c, beta=config.beta)
        out = (1 - smoothing) * out + smoothing * swapped
    chosen, rejected = (config.beta * (logprobs - reference)).T
    margin = chosen - rejected
    return out, {
        "chosen_reward": chosen,
        "rejected_reward": rejected,
        "margin": margin,
        "accuracy": (margin > 0).astype(jnp.float32),
    }
