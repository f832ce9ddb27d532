"""Evaluation during training: its schedule, its end by patience, and the best one."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from jaxmem.base import processes
from jaxmem.base.fields import check
from jaxmem.base.ranges import integers, reals
from jaxmem.base.rules import unfit, unread
from jaxmem.train.metrics import AnyMetrics
from jaxmem.train.state.checkpoint import Checkpoints
from jaxmem.train.state.resuming import EVALUATIONS

_BEST = "best"  # key in the saved settings of out_dir/best


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Schedule of evaluations on held-out data, and the best one's checkpoint."""

    every: Annotated[
        int | None,
        integers(1),
        "steps between evaluations; the last step is always evaluated. None: no "
        "evaluation, except at the end of a supervised run",
    ] = None
    at_start: Annotated[
        bool, "with eval.every, evaluate the weights before the first step too"
    ] = False
    prompts: Annotated[
        int,
        integers(1),
        'job "grpo": maximum number of held-out prompts that are completed',
    ] = 64
    samples: Annotated[
        int | None,
        integers(1, limit=2**10),
        'job "grpo": number of further completions per held-out prompt, which give '
        "held_out_avg@k and held_out_pass@k. None: only one at temperature 0",
    ] = None
    temperature: Annotated[
        float, reals(above=0), "divisor of the logits for eval.samples"
    ] = 1.0
    keep_best: Annotated[
        bool, "keep the checkpoint of the best evaluation in out_dir/best"
    ] = True
    patience: Annotated[
        int | None,
        integers(1),
        "stop after this many evaluations in a row without improvement. None: take "
        "all steps",
    ] = None
    min_delta: Annotated[
        float,
        reals(0),
        "with eval.patience, minimum improvement that counts, in nats or units of the "
        "reward",
    ] = 0.0

    RULES = (
        unread(
            "min_delta",
            "without eval.patience; set eval.patience, or leave eval.min_delta out",
            lambda config: config.patience is None,
        ),
        unread(
            "temperature",
            "without eval.samples; set eval.samples, or leave eval.temperature out",
            lambda config: config.samples is None,
        ),
        unfit(
            "patience samples at_start",
            "is for evaluations during training, and there are none: set eval.every, "
            "the steps between them",
            lambda config: config.every is None,
        ),
    )

    def __post_init__(self):
        check(self)

    def nothing_held_out(self) -> str:
        """A line that says that no record is held out.

        Raises:
            ValueError: a setting of evaluations needs held-out records.
        """
        advice = "nothing is held out; see data.held_out and task.held_out"
        for name in ("patience", "samples", "at_start"):
            if getattr(self, name) not in (None, False):
                raise ValueError(
                    f"eval.{name}={getattr(self, name)} has nothing to evaluate: "
                    f"{advice}"
                )
        return f"eval.every={self.every} evaluates nothing: {advice}"

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
    is_reward: bool = False  # True if the cost is a reward's negative
    more: str = ""  # further numbers, as its line has them


class NoStep:
    """The metrics of no step, for `Job.evaluate` of the initial weights."""

    step = 0

    def _replace(self, **values: Any) -> "NoStep":
        """As a step's: numbers of an evaluation are left out."""
        del values
        return self


@dataclasses.dataclass(frozen=True)
class Evaluations:
    """A run's evaluations so far, which its checkpoints record.

    An improvement is an evaluation whose cost is below that of the improvement before
    it by more than `EvalConfig.min_delta`.
    """

    best: float | None = None  # the lowest finite cost; None before one
    step: int = 0  # the step of the best one
    improved: float | None = None  # the cost of the last improvement
    without: int = 0  # evaluations since the last improvement
    is_reward: bool = False  # as in `Evaluated`
    initial: float | None = None  # cost before the first step; None: not evaluated

    @classmethod
    def restored(cls, saved: Mapping[str, Mapping], directory: Path) -> "Evaluations":
        """The evaluations in saved settings; of older versions, those of a directory.

        These have the best one alone, as `keep_best` saves it.
        """
        if EVALUATIONS in saved:
            return cls(**saved[EVALUATIONS])
        if not processes.by_first(directory.exists):
            return cls()
        with Checkpoints(directory, keep=1) as checkpoints:
            _, best = _saved_best(checkpoints)
        if not math.isfinite(best.get("cost", math.nan)):
            return cls()
        return cls(best["cost"], best["step"], best["cost"])

    def settings(self) -> dict[str, dict[str, Any]]:
        """A section of the saved settings; none before the first evaluation."""
        return {} if self == Evaluations() else {EVALUATIONS: dataclasses.asdict(self)}

    def added(self, step: int, evaluated: Evaluated, min_delta: float) -> "Evaluations":
        """The evaluations with that of a step."""
        cost, is_reward = evaluated.cost, evaluated.is_reward
        new = dataclasses.replace(self, without=self.without + 1, is_reward=is_reward)
        if not math.isfinite(cost):
            return new
        if self.best is None or cost < self.best:
            new = dataclasses.replace(new, best=cost, step=step)
        if self.improved is None or cost < self.improved - min_delta:
            new = dataclasses.replace(new, improved=cost, without=0)
        return new

    def with_initial(self, evaluated: Evaluated) -> "Evaluations":
        """The evaluations with that of the initial weights, which is never the best."""
        cost, is_reward = evaluated.cost, evaluated.is_reward
        return dataclasses.replace(self, initial=cost, is_reward=is_reward)

    @property
    def initial_line(self) -> str:
        """A line about the evaluation of the initial weights."""
        assert self.initial is not None
        return f"before step 1 held out {self._number(self.initial)}"

    def exhausts(self, config: EvalConfig) -> bool:
        """True if the last `eval.patience` evaluations were no improvement."""
        return config.patience is not None and self.without >= config.patience

    def line(self, step: int, cost: float, config: EvalConfig) -> str:
        """A line about the evaluation of a step, which is the last one."""
        best = f"best, step {step}" if self.step == step else self.best_text
        if config.patience is not None and self.without:
            count = f"{self.without} of {config.patience}"
            if self.step == step:  # the best one, yet no improvement
                best += f", but by no more than eval.min_delta={config.min_delta:g}"
                best += f"; {count}"
            else:
                best += f"; {count} without improvement"
        return f"step {step} held out {self._number(cost)} ({best})"

    @property
    def best_text(self) -> str:
        """The best one in words."""
        if self.best is None:
            return "none is finite"
        return f"best {self._number(self.best)}, step {self.step}"

    def reason(self, config: EvalConfig) -> str:
        """The reason to stop, where `exhausts` is true, in words."""
        by = f" by more than {config.min_delta:g}" if config.min_delta else ""
        last = "evaluation" if self.without == 1 else f"{self.without} evaluations"
        return (
            f"eval.patience={config.patience}: the last {last} did not improve{by} "
            f"({self.best_text})"
        )

    def items(self, cost: float | None = None) -> list[str]:
        """The last cost, if it is known, and the best one, as a bar shows them."""
        last = [] if cost is None else [f"held out {self._number(cost)}"]
        return last if self.best is None else [*last, self.best_text]

    def summary(self) -> dict[str, float | int]:
        """The best loss, or reward, and that of the start, for summary.json."""
        sign = -1 if self.is_reward else 1
        values: dict[str, float | int] = {}
        if self.initial is not None and math.isfinite(self.initial):
            values["initial_held_out"] = sign * self.initial
        if self.best is not None:
            values |= {"best_held_out": sign * self.best, "best_step": self.step}
        return values

    def _number(self, cost: float) -> str:
        return f"reward {-cost:.3f}" if self.is_reward else f"{cost:.4f}"


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
        return f"step {step}: jaxmem does not keep an evaluation of {cost} as the best"
    with Checkpoints(directory, keep=1) as checkpoints:
        saved, before = _saved_best(checkpoints)
        # A step that is repeated after a kill has the same cost.
        best = before.get("cost", math.nan)
        if math.isfinite(best) and (saved == step or cost >= best):
            return ""
        save(checkpoints, {_BEST: {"cost": cost, "step": step}})
    return ""


def _saved_best(checkpoints: Checkpoints) -> tuple[int | None, Mapping[str, Any]]:
    """The step of the newest checkpoint, and the cost and step that `save` recorded."""
    saved = checkpoints.latest()
    if saved is None:
        return None, {}
    return saved, checkpoints.saved_config(saved).get(_BEST, {})
