"""AdamW under a linear warmup and a cosine decay, of all weights or of some."""

import dataclasses
import re
from typing import Any

import jax
import optax

from jaxmem.core.fields import check_field, check_numbers
from jaxmem.core.ranges import integers, reals

_DECAY = reals(0, below=1)
_RANGES = {
    "learning_rate": reals(above=0),
    "warmup_steps": integers(0),
    "final_fraction": reals(0, 1),
    "b1": _DECAY,
    "b2": _DECAY,
    "eps": reals(above=0),
    "weight_decay": reals(0),
    "clip_norm": reals(above=0),
}


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW under a linear warmup and a cosine decay."""

    learning_rate: float = 3e-3  # the peak, reached after the warmup
    warmup_steps: int = 10  # steps of linear rise; fewer than run.steps
    final_fraction: float = 0.1  # of the peak, reached after the last step
    b1: float = 0.9  # decay of the mean of the gradients
    b2: float = 0.95  # decay of the mean of their squares
    eps: float = 1e-8  # added to the root of the latter
    weight_decay: float = 0.1  # per unit of learning rate; matrices only
    clip_norm: float | None = 1.0  # largest global gradient norm; None: no clipping
    # None: all weights; or a regular expression searched in their names, which are like
    # "blocks/attention/query/kernel". The others are frozen: no gradient, no moments.
    # Those it finds are kept in float32, as small updates would be lost in 16 bits.
    trainable: str | None = None
    # The moments are on the host, and come to the device slice by slice to be updated.
    offload: bool = False

    def __post_init__(self):
        """Refuse impossible values, by name."""
        check_numbers(self, _RANGES)
        if self.trainable is not None:
            check_field(
                self, "trainable", _is_pattern(self.trainable), "a regular expression"
            )


def _is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True


def learning_rate_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Linear warmup to the peak, then a cosine to `final_fraction` of it.

    Args:
      config: peak, warmup and final fraction.
      steps: of the whole run.

    Returns:
      Count of steps done to the next step's learning rate; never 0 at the first.
    """
    if config.warmup_steps >= steps:
        raise ValueError(
            f"optimizer.warmup_steps={config.warmup_steps} must be below "
            f"run.steps={steps}"
        )
    return optax.warmup_cosine_decay_schedule(
        init_value=config.learning_rate / (config.warmup_steps + 1),
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=steps,
        end_value=config.learning_rate * config.final_fraction,
    )


def make_optimizer(
    config: OptimizerConfig, schedule: optax.Schedule
) -> optax.GradientTransformation:
    """Clip by global norm, if the config says so, then `adamw`."""
    # Either way the state has one structure, so that a run resumes with the other.
    clipping = optax.identity()
    if config.clip_norm is not None:
        clipping = optax.clip_by_global_norm(config.clip_norm)
    return optax.chain(clipping, adamw(config, schedule))


def clip(config: OptimizerConfig, gradients: Any) -> tuple[Any, jax.Array]:
    """The first part of `make_optimizer`, alone; and the norm before it."""
    norm = optax.tree.norm(gradients)
    if config.clip_norm is None:
        return gradients, norm
    clipping = optax.clip_by_global_norm(config.clip_norm)
    return clipping.update(gradients, optax.EmptyState())[0], norm


def adamw(
    config: OptimizerConfig, schedule: optax.Schedule
) -> optax.GradientTransformation:
    """AdamW; norms and biases do not decay."""

    def decays(params: Any) -> Any:
        # By name: stacking the layers gave a norm's scale two axes, like a matrix.
        return jax.tree_util.tree_map_with_path(
            lambda path, _: path[-1].key not in ("scale", "bias"), params
        )

    return optax.adamw(
        schedule,
        b1=config.b1,
        b2=config.b2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=decays,
    )
