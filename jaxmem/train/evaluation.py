"""Evaluation during training: its schedule, and the checkpoint of the best one."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxmem.base.fields import check_numbers
from jaxmem.base.ranges import integers
from jaxmem.train.metrics import AnyMetrics
from jaxmem.train.state.checkpoint import Checkpoints

_RANGES = {"every": integers(1), "prompts": integers(1)}
_BEST = "best"  # key in the saved settings


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Schedule of evaluations on held-out data, and the best one's checkpoint."""

    # steps between evaluations, the last step is evaluated too; None: none but at the
    # end of a supervised run
    every: int | None = None
    prompts: int = 64  # maximum held-out prompts to complete, of the job "grpo"
    keep_best: bool = True  # keep the best evaluation's checkpoint, in out_dir/best

    def __post_init__(self):
        check_numbers(self, _RANGES)

    def is_due(self, step: int, steps: int) -> bool:
        """True if a step, of `steps` in all, is evaluated."""
        return is_due(self.every, step, steps)


def is_due(every: int | None, step: int, steps: int) -> bool:
    """True if `step` is a multiple of `every`, or the last; False for None."""
    return every is not None and (step % every == 0 or step == steps)


class Evaluated(NamedTuple):
    """A step's metrics with those of its evaluation."""

    metrics: AnyMetrics
    cost: float  # the lower, the better


def keep_best(
    directory: Path,
    step: int,
    cost: float,
    save: Callable[[Checkpoints, Mapping], None],
) -> str:
    """Save the step if its cost is lower than that of the checkpoint in a directory.

    A cost that is not finite is never the best: the result is a message, else "". A
    saved cost that is not finite is replaced. `save` gets the checkpoints, and settings
    to add to the run's.
    """
    if not math.isfinite(cost):
        return f"step {step}: an evaluation of {cost} is not kept as the best"
    with Checkpoints(directory, keep=1) as checkpoints:
        saved = checkpoints.latest()
        if saved is not None:
            before: Any = checkpoints.saved_config(saved).get(_BEST, {})
            # A step that is repeated after a kill has the same cost.
            best = before.get("cost", math.nan)
            if math.isfinite(best) and (saved == step or cost >= best):
                return ""
        save(checkpoints, {_BEST: {"cost": cost, "step": step}})
    return ""
