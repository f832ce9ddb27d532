"""What every job's run is made of: steps, their metrics, and checkpoints to resume."""

import contextlib
import dataclasses
import functools
import math
import signal
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import jax
from rich.console import Console

from jaxmem.train import files, locks, metrics, processes
from jaxmem.train._checks import check_field
from jaxmem.train.checkpoint import (
    Checkpoints,
    check_same_config,
    differences,
    set_aside_damaged,
)
from jaxmem.train.history import MetricsWriter, read_history
from jaxmem.train.metrics import PolicyMetrics, StepMetrics
from jaxmem.train.program import TrainState
from jaxmem.train.stopping import Stop

_FREE = "may_change"  # key of a checkpoint's configuration
_Metrics = TypeVar("_Metrics", StepMetrics, PolicyMetrics)


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


class Settings(NamedTuple):
    """A run's configuration as its checkpoints keep it; by section and field."""

    fixed: Mapping[str, Mapping]  # what a resumed run must share with the saved one
    free: Mapping[str, Mapping]  # what it may change, which is said


def free_settings(
    config: Any, sections: Iterable[str], fixed: Mapping[str, Mapping]
) -> dict[str, dict[str, Any]]:
    """What may change of a job: all of some sections, and of the run what has effect.

    Args:
      config: of the job, whose sections are dataclasses.
      sections: names of those, but for "run".
      fixed: what may not.
    """
    free = {name: dataclasses.asdict(getattr(config, name)) for name in sections}
    free["run"] = {k: getattr(config.run, k) for k in ("steps", "accumulate", "seed")}
    return {
        name: {k: v for k, v in fields.items() if k not in fixed.get(name, {})}
        for name, fields in free.items()
    }


class Run:
    """A run's directory, open: what was done there, and a way to do the rest.

    Attributes:
      out_dir: the directory.
      done: steps that need not be taken again.
      saved: the newest step that can be resumed, 0 without one.
      taken: the last step, saved or not.
      metrics_path: of the file with a line per step.
    """

    def __init__(
        self,
        config: RunConfig,
        settings: Settings,
        console: Console,
        checkpoints: Checkpoints,
        stop: Stop,
    ):
        self._config, self._settings, self._stop = config, settings, stop
        self._console, self._checkpoints = console, checkpoints
        self.out_dir = Path(config.out_dir).expanduser()
        self.done = self.saved = self.taken = checkpoints.latest() or 0
        self.metrics_path = self.out_dir / "metrics.jsonl"
        self._unwritten: list[bytes] = []  # lines of that file
        if self.done:
            changes = self._changes(checkpoints.saved_config(self.done))
            said = f"resuming {self.out_dir} after step {self.done}"
            _say(console, f"{said}; {'; '.join(changes)}" if changes else said)

    def _changes(self, saved: dict[str, Any]) -> list[str]:
        """What is another setting than the saved run's; refused where it may not be."""
        free = saved.pop(_FREE, {})
        where, steps = f"run.out_dir={str(self.out_dir)!r}", self._config.steps
        check_same_config(saved, self._settings.fixed, self.out_dir)
        if self.done > steps:
            raise ValueError(
                f"run.steps={steps} is below the {self.done} steps that {where} has "
                "done; raise it, or name another run.out_dir"
            )
        changes = differences(free, self._settings.free, common=True)
        idle = [change for change in changes if not change.startswith("run.steps ")]
        if idle and self.done == steps:
            raise ValueError(
                f"{where} has done its {steps} steps, so a change has no effect: "
                f"{'; '.join(idle)}. Give the old values back, raise run.steps, or "
                "name another run.out_dir"
            )
        return changes

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
          CheckpointError: one cannot be written or read.
          KeyboardInterrupt, SystemExit: a signal came; what it can save is saved.
        """
        state = self._first_state(job)
        for name, text in texts.items():
            if text and processes.is_first():
                files.write_whole(self.out_dir / name, text)
        run = self._config
        with (
            self._stop.postponed(),
            self._writer() as writer,
            metrics.ProgressReport(
                self._console, run.steps, self.done, run.log_every
            ) as report,
        ):
            while not (stopped := self._must_stop()) and self.taken < run.steps:
                state, taken = job.step(self.taken + 1, state)
                _check_finite(taken)
                self.taken += 1
                if writer is not None:
                    writer.write(taken)
                report.update(taken)
                if self._is_due():
                    self._save(job, state, writer)
            if stopped and run.checkpoint_every and self.saved < self.taken:
                self._save(job, state, writer)
        if stopped:
            self._stop.leave_if_asked()
        return state

    def _first_state(self, job: Job) -> TrainState:
        if not self.done:
            return job.initial_state()
        state, data_state = job.restored_state(self._checkpoints, self.done)
        job.set_state(data_state)
        return state

    def _must_stop(self) -> bool:
        """Whether a signal has come to any of the processes; they agree on it."""
        self._stop.signal = processes.largest(self._stop.signal)
        return bool(self._stop.signal)

    def _is_due(self) -> bool:
        """Whether a checkpoint follows the step just taken."""
        every = self._config.checkpoint_every
        if every is None:
            return False
        return self.taken % every == 0 or self.taken == self._config.steps

    def _save(self, job: Job, state: TrainState, writer: MetricsWriter | None) -> None:
        # Before the checkpoint: a restored step has always been written, if it could.
        if writer is not None:
            writer.flush()
        config = {**self._settings.fixed, _FREE: self._settings.free}
        self._checkpoints.save(self.taken, state, job.get_state(), config)
        self.saved = self.taken

    @contextlib.contextmanager
    def _writer(self) -> Iterator[MetricsWriter | None]:
        """Only the first of several processes writes."""
        if not processes.is_first():
            yield None
            return
        say = functools.partial(_say, self._console)
        every = self._config.log_every
        with MetricsWriter(self.out_dir, self.done, say, every) as writer:
            yield writer
        self._unwritten = writer.unwritten

    def history(self, kind: type[_Metrics]) -> list[_Metrics]:
        """Every step of the run, of earlier processes too."""
        return read_history(self.metrics_path, kind, self._unwritten)

    def where_it_stopped(self) -> str:
        """What a signal has left, and how to go on."""
        name = signal.Signals(self._stop.signal).name
        if not self.taken:
            return f"stopped by {name} before the first step"
        said = f"stopped by {name} after step {self.taken} of {self._config.steps}"
        if self.saved == self.taken:
            return f"{said}, which is saved: the same command resumes {self.out_dir}"
        if self._config.checkpoint_every is None:
            said += ", with run.checkpoint_every=None: nothing of it could be saved"
        if not self.saved:
            return f"{said}; the same command starts anew"
        return f"{said}; the same command resumes after step {self.saved}"


@contextlib.contextmanager
def open_run(config: RunConfig, settings: Settings, console: Console) -> Iterator[Run]:
    """Open the run of `config.out_dir`, old or new; no other process may meanwhile.

    If checkpoints are there, `Run.take_steps` continues from the newest that can be
    read: killed at any step and called again, it takes bitwise the same steps on the
    CPU as if it had never stopped.

    Inside, SIGTERM and SIGINT end the run after its current step, with a checkpoint,
    where Python lets us handle them.

    Args:
      config: of the run.
      settings: what a resumed run must share with the saved one, and what it may not.
      console: where progress goes.

    Raises:
      ValueError: the directory holds a run of which something fixed was different, or
        another process is at it.
      CheckpointError: checkpoints are there, and none can be read.
    """
    out_dir = Path(config.out_dir).expanduser()
    where = f"run.out_dir={str(out_dir)!r}"
    say = functools.partial(_say, console)
    with (
        locks.held(out_dir / "lock", where, say),
        Stop() as stop,
        _all_together(stop),
    ):
        for line in set_aside_damaged(out_dir / "checkpoints"):
            say(line)
        with Checkpoints(out_dir / "checkpoints", config.keep) as checkpoints:
            run = Run(config, settings, console, checkpoints, stop)
            try:
                yield run
            finally:
                if stop.signal:
                    say(run.where_it_stopped())


def _all_together(stop: Stop) -> contextlib.AbstractContextManager:
    """One of several processes must not leave before all have agreed on the step."""
    return stop.postponed() if jax.process_count() > 1 else contextlib.nullcontext()


def _say(console: Console, line: str) -> None:
    """Print a line as it is, unless what takes it is full: no run ends for that."""
    with contextlib.suppress(OSError):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _check_finite(taken: metrics.AnyMetrics) -> None:
    """Before a checkpoint: of a finite loss the gradient may not be."""
    for name, value in (("loss", taken.loss), ("gradient's norm", taken.grad_norm)):
        if not math.isfinite(value):
            raise FloatingPointError(
                f"the {name} of step {taken.step} is {value}; the run can resume from "
                "its last checkpoint, with a lower optimizer.learning_rate"
            )
