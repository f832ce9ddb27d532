"""What every job's run is made of: steps, their metrics, and checkpoints to resume."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from rich.console import Console

from jaxmem.core import processes
from jaxmem.core.fields import check_field
from jaxmem.train import metrics
from jaxmem.train.checkpoint import Checkpoints, check_same_config
from jaxmem.train.program import TrainState


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Which job, how long to train, and what to leave behind."""

    job: Literal["sft", "grpo"] = "sft"  # supervised, or reinforcement learning
    steps: int = 60  # optimizer steps in all; rollouts of the job "grpo"
    accumulate: int = 1  # micro-batches (data.batch_size rows each) in a step
    seed: int = 0  # initial weights, and what a policy samples
    out_dir: str = "runs/sft"  # directory of the run; one that holds a run resumes it
    # steps between checkpoints, the last is saved in any case; None: no checkpoints
    checkpoint_every: int | None = 20
    keep: int = 2  # newest checkpoints to keep
    log_every: int = 10  # steps between plain progress lines (not on a terminal)
    compare_heads: bool = True  # at the end, compile both heads and show their memory

    def __post_init__(self):
        """Refuse impossible values, by name."""
        for name in ("steps", "accumulate", "keep", "log_every"):
            check_field(self, name, getattr(self, name) >= 1, "at least 1")
        if self.checkpoint_every is not None:
            good = self.checkpoint_every >= 1
            check_field(self, "checkpoint_every", good, "at least 1, or None")
        check_field(self, "seed", 0 <= self.seed < 2**31, "in [0, 2**31)")
        check_field(self, "job", self.job in ("sft", "grpo"), "'sft' or 'grpo'")


class Job(Protocol):
    """What a run takes steps of."""

    def initial_state(self) -> TrainState:
        """What the first step starts from."""
        ...

    def restored_state(
        self, checkpoints: Checkpoints, step: int
    ) -> tuple[TrainState, dict[str, Any]]:
        """What the step after that one starts from, and what `get_state` returned."""
        ...

    def step(
        self, number: int, state: TrainState
    ) -> tuple[TrainState, metrics.AnyMetrics]:
        """Take the step of that number, from 1; the state given is consumed."""
        ...

    def get_state(self) -> dict[str, Any]:
        """Return where the job's data stands, as JSON-able values."""
        ...

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from where `get_state` said that the data stood."""
        ...


class Run:
    """A run's directory, open: what was done there, and a way to do the rest.

    Attributes:
      out_dir: the directory.
      done: steps that need not be taken again.
      metrics_path: of the file with a line per step.
    """

    def __init__(
        self,
        config: RunConfig,
        fixed: Mapping[str, Mapping],
        console: Console,
        checkpoints: Checkpoints,
    ):
        self._config, self._fixed = config, fixed
        self._console, self._checkpoints = console, checkpoints
        self.out_dir = Path(config.out_dir).expanduser()
        self.done = checkpoints.latest() or 0
        self.metrics_path = self.out_dir / "metrics.jsonl"
        if self.done:
            saved = checkpoints.saved_config(self.done)
            check_same_config(saved, fixed, self.out_dir)
            console.print(
                f"resuming {self.out_dir} after step {self.done}", highlight=False
            )

    def take_steps(self, job: Job, texts: Mapping[str, str]) -> TrainState:
        """Take the steps that are left, recording each.

        Args:
          job: whose steps they are.
          texts: files of the run's directory, by name, written once it is known that
            what is saved there is of this run; empty ones are not.

        Returns:
          The state after the last.

        Raises:
          FloatingPointError: a loss or a gradient is not finite.
        """
        if self.done:
            state, data_state = job.restored_state(self._checkpoints, self.done)
            job.set_state(data_state)
        else:
            state = job.initial_state()
        for name, text in texts.items():
            if text and processes.is_first():
                (self.out_dir / name).write_text(text, "utf-8")
        run = self._config
        with (
            _writer(self.out_dir, self.done, self._console) as writer,
            metrics.ProgressReport(
                self._console, run.steps, self.done, run.log_every
            ) as report,
        ):
            for number in range(self.done + 1, run.steps + 1):
                state, taken = job.step(number, state)
                _check_finite(taken)
                # Before the checkpoint: a restored step has always been written.
                if writer is not None:
                    writer.write(taken)
                report.update(taken)
                if self._is_due(number):
                    self._checkpoints.save(number, state, job.get_state(), self._fixed)
        return state

    def _is_due(self, number: int) -> bool:
        """Whether a checkpoint follows that step."""
        every = self._config.checkpoint_every
        if every is None:
            return False
        return number % every == 0 or number == self._config.steps


@contextlib.contextmanager
def open_run(
    config: RunConfig, fixed: Mapping[str, Mapping], console: Console
) -> Iterator[Run]:
    """Open the run of `config.out_dir`, old or new.

    If checkpoints are there, `Run.take_steps` continues from the newest: killed at any
    step and called again, it takes bitwise the same steps on the CPU as if it had never
    stopped.

    Args:
      config: of the run.
      fixed: what a resumed run must share with the saved one, by section and field.
      console: where progress goes.

    Raises:
      ValueError: the directory holds a run of which something fixed was different.
    """
    out_dir = Path(config.out_dir).expanduser()
    with Checkpoints(out_dir / "checkpoints", config.keep) as checkpoints:
        yield Run(config, fixed, console, checkpoints)


def _writer(
    out_dir: Path, done: int, console: Console
) -> contextlib.AbstractContextManager[metrics.MetricsWriter | None]:
    """Only the first of several processes writes."""
    if not processes.is_first():
        return contextlib.nullcontext()
    writer = metrics.MetricsWriter(out_dir, done)
    if writer.moved_to is not None:
        said = f"steps of a run without checkpoints are now in {writer.moved_to}"
        console.print(said, highlight=False, soft_wrap=True)
    return writer


def _check_finite(taken: metrics.AnyMetrics) -> None:
    """Before a checkpoint: of a finite loss the gradient may not be."""
    for name, value in (("loss", taken.loss), ("gradient's norm", taken.grad_norm)):
        if not math.isfinite(value):
            raise FloatingPointError(
                f"the {name} of step {taken.step} is {value}; the run can resume from "
                "its last checkpoint, with a lower optimizer.learning_rate"
            )
