"""AdamW with a learning-rate schedule, for all weights or some of them."""

import dataclasses
import re
from typing import Any, Literal

import jax
import optax

from jaxmem.core.fields import check_field, check_numbers
from jaxmem.core.ranges import integers, reals

_DECAY = reals(0, below=1)
_RANGES = {
    "learning_rate": reals(above=0),
    "warmup_steps": integers(0),
    "warmup_fraction": reals(0, 1),
    "decay_fraction": reals(0, 1),
    "final_fraction": reals(0, 1),
    "b1": _DECAY,
    "b2": _DECAY,
    "eps": reals(above=0),
    "weight_decay": reals(0),
    "clip_norm": reals(above=0),
}


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with a learning-rate schedule that starts with a linear warmup."""

    learning_rate: float = 3e-3  # the peak, reached after the warmup
    # steps of linear rise, fewer than run.steps; None: warmup_fraction says it
    warmup_steps: int | None = None
    final_fraction: float = 0.1  # of the peak, reached after the last step
    b1: float = 0.9  # decay of the mean of the gradients
    b2: float = 0.95  # decay of the mean of the squared gradients
    eps: float = 1e-8  # added to the root of the mean square
    weight_decay: float = 0.1  # per unit of learning rate; matrices only
    clip_norm: float | None = 1.0  # largest global gradient norm; None: no clipping
    # None: all weights; or a regular expression searched in their names, which are like
    # "blocks/attention/query/kernel". The others are frozen: no gradient, no moments.
    # Matching weights are stored in float32, because 16 bits would lose small updates.
    trainable: str | None = None
    # Keep the moments on the host, and fetch them slice by slice for the update.
    offload: bool = False
    # after the warmup, a decay to final_fraction by a cosine or linearly, or none; wsd:
    # none but over the last decay_fraction of the steps, linearly
    schedule: Literal["cosine", "constant", "linear", "wsd"] = "cosine"
    warmup_fraction: float = 0.1  # of run.steps, where warmup_steps is None
    decay_fraction: float = 0.2  # of run.steps, of the schedule "wsd"

    def __post_init__(self):
        """Raise a ValueError that names a field with an impossible value."""
        check_numbers(self, _RANGES)
        known = ("cosine", "constant", "linear", "wsd")
        check_field(self, "schedule", self.schedule in known, f"one of {known}")
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


def warmup_steps(config: OptimizerConfig, steps: int) -> int:
    """Warmup steps of a run of `steps` steps.

    Args:
        config: of the optimizer.
        steps: of the whole run.

    Returns:
        The number of steps.

    Raises:
        ValueError: `optimizer.warmup_steps` is not below `steps`.
    """
    if config.warmup_steps is None:
        return min(round(config.warmup_fraction * steps), steps - 1)
    if config.warmup_steps >= steps:
        raise ValueError(
            f"optimizer.warmup_steps={config.warmup_steps} must be below "
            f"run.steps={steps}; or leave it None, for optimizer.warmup_fraction"
        )
    return config.warmup_steps


def learning_rate_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Linear warmup to the peak, followed by `optimizer.schedule`.

    Args:
        config: peak, warmup, schedule and final fraction.
        steps: of the whole run.

    Returns:
        A function from the number of finished steps to the learning rate of the next
        one; it is never 0 in the first step.

    Raises:
        ValueError: the warmup is not shorter than the run.
    """
    warmup, peak = warmup_steps(config, steps), config.learning_rate
    start, final = peak / (warmup + 1), peak * config.final_fraction
    if config.schedule == "cosine":
        return optax.warmup_cosine_decay_schedule(start, peak, warmup, steps, final)
    stable = {
        "constant": steps,
        "linear": warmup,
        "wsd": max(warmup, steps - round(config.decay_fraction * steps)),
    }[config.schedule]
    parts = [
        optax.linear_schedule(start, peak, warmup),
        optax.constant_schedule(peak),
        optax.linear_schedule(peak, final, max(steps - stable, 1)),
    ]
    return optax.join_schedules(parts, [warmup, stable])


def make_optimizer(
    config: OptimizerConfig, schedule: optax.Schedule
) -> optax.GradientTransformation:
    """Clipping by the global norm, if configured, followed by `adamw`."""
    # The state has one structure in both cases, so a resumed run may change clip_norm.
    clipping = optax.identity()
    if config.clip_norm is not None:
        clipping = optax.clip_by_global_norm(config.clip_norm)
    return optax.chain(clipping, adamw(config, schedule))


def clip(config: OptimizerConfig, gradients: Any) -> tuple[Any, jax.Array]:
    """The clipped gradients, as in `make_optimizer`, and their norm before clipping."""
    norm = optax.tree.norm(gradients)
    if config.clip_norm is None:
        return gradients, norm
    clipping = optax.clip_by_global_norm(config.clip_norm)
    return clipping.update(gradients, optax.EmptyState())[0], norm


def adamw(
    config: OptimizerConfig, schedule: optax.Schedule
) -> optax.GradientTransformation:
    """AdamW without weight decay of norms and biases."""

    def decays(params: Any) -> Any:
        # Select by name: stacking over layers gives a norm's scale two axes.
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
