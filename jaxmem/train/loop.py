"""The loop of a run for any job: steps, metrics, and checkpoints to resume from."""

import contextlib
import enum
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console

from jaxmem.base import files, locks, processes
from jaxmem.base.stopping import Stop
from jaxmem.data.rewards import RolloutError
from jaxmem.train import metrics, precision
from jaxmem.train.evaluation import (
    EvalConfig,
    Evaluations,
    NoStep,
    is_due,
    keep_best,
)
from jaxmem.train.jobs.job import Job
from jaxmem.train.output import report, wandb_writer
from jaxmem.train.output.history import MetricsWriter, read_history
from jaxmem.train.output.progress import ProgressReport, say
from jaxmem.train.output.wandb_writer import WandbWriter
from jaxmem.train.program import TrainState
from jaxmem.train.settings import RunConfig, Settings
from jaxmem.train.state import ownership, resuming
from jaxmem.train.state.checkpoint import Checkpoints, RunCheckpointError
from jaxmem.train.state.damaged import set_aside_damaged

_BACKEND = "implementation"  # field of the saved section `head`
_ASKED = 1  # beside the numbers of signals, which are larger: `on_step` asks to stop

OnStep = Callable[[Any], bool | None]  # gets a step's metrics; False: stop and save


class Ending(enum.StrEnum):
    """The causes that end a run; the values are in summary.json."""

    STEPS = "run.steps"  # all steps are taken
    PATIENCE = "eval.patience"
    CALLBACK = "on_step"
    SIGNAL = "signal"


class _HeldResources(NamedTuple):
    """The resources that a run holds from its start to its end."""

    stop: Stop
    lock: locks.Lock
    directory: ownership.RunDirectory


class Run:
    """A run in its directory: its finished steps, and a method that takes the others.

    Attributes:
        done: the step that was restored; 0 in a new run.
        saved: the newest step with a checkpoint; 0 without one.
        taken: the last step.
        evaluations: the evaluations so far.
        ending: the cause that has ended the run; None before its end.
    """

    def __init__(
        self,
        config: RunConfig,
        settings: Settings,
        console: Console,
        checkpoints: Checkpoints,
        held: "_HeldResources",
        evaluation: EvalConfig | None = None,
    ):
        self._config, self._settings = config, settings
        self._stop, self._lock = held.stop, held.lock
        self._directory = held.directory
        self._evaluation = evaluation or EvalConfig()
        self._texts: Mapping[str, str] = {}
        self._console, self._checkpoints = console, checkpoints
        self.out_dir = Path(config.out_dir).expanduser().absolute()
        self.done = self.saved = self.taken = checkpoints.latest() or 0
        self.metrics_path = self.out_dir / "metrics.jsonl"
        self._page = report.ReportPage(self.out_dir)
        self._metrics: MetricsWriter | None = None  # in the first process
        self.progress = ProgressReport(
            console, config.steps, self.done, config.log_every
        )
        self._saved_backend: str | None = None
        self.evaluations, self.ending = Evaluations(), None
        self._on_step: OnStep | None = None
        self._is_asked = False  # True once `on_step` has returned False
        if not self.done:
            say(console, f"new run in {files.shown(self.out_dir)}")
        else:
            self._resume(checkpoints.saved_config(self.done))

    def _resume(self, saved: dict[str, Any]) -> None:
        """Take over the saved settings, and print how the run goes on."""
        self._saved_backend = (
            saved.get(resuming.CHANGEABLE, {}).get("head", {}).get(_BACKEND)
        )
        self.evaluations = Evaluations.restored(saved, self.out_dir / "best")
        out_dir, steps = Path(self._config.out_dir), self._config.steps
        changes = resuming.changes(saved, self._settings, out_dir, self.done, steps)
        parts = ["data position", "optimizer"]
        if resuming.EVALUATIONS in saved:
            parts += self.evaluations.items()
        if self.is_complete:
            lines = changes
        else:
            restored = f"{', '.join(parts[:-1])} and {parts[-1]} restored"
            where = f"{files.shown(self.out_dir)} at step {self.done:,} of {steps:,}"
            lines = ["; ".join([f"resuming {where} ({restored})", *changes])]
        for line in lines:
            say(self._console, line)
        self.progress.notes = self.evaluations.items()

    @property
    def is_complete(self) -> bool:
        """True if no step is left to take."""
        has_all = self.done == self._config.steps
        return has_all or self.evaluations.exhausts(self._evaluation)

    def completion(self) -> str:
        """A line about a complete run, and the key that makes it longer."""
        out_dir, done, steps = files.shown(self.out_dir), self.done, self._config.steps
        if done == steps:
            done = f"{done:,} of {steps:,} steps"
            return (
                f"{out_dir} is complete ({done}); raise "
                f"{self._settings.length_key}, or name another run.out_dir"
            )
        return (
            f"{out_dir} is complete (step {done:,} of {steps:,}): "
            f"{self.evaluations.reason(self._evaluation)}; raise eval.patience, or "
            "name another run.out_dir"
        )

    def use_backend(self, backend: str, named: str | None) -> None:
        """Record the backend of the head's loss, which a resumed run must keep.

        A change of the backend is an error unless the config names the new one.
        """
        saved, where = self._saved_backend, f"run.out_dir={self._config.out_dir!r}"
        if saved not in (None, backend) and self.done < self._config.steps:
            if named is None:
                raise ValueError(
                    f"head.implementation was {saved!r} in {where}, but {backend!r}, "
                    "which rounds differently, is the fastest here: set "
                    f"head.implementation={saved!r} to go on as before, or "
                    f"{backend!r} to change it"
                )
            say(self._console, f"head.implementation was {saved!r}, is {backend!r}")
        changeable = self._settings.changeable
        head = {**changeable.get("head", {}), _BACKEND: backend}
        self._settings = self._settings._replace(
            changeable={**changeable, "head": head}
        )

    def take_steps(
        self, job: Job, texts: Mapping[str, str], on_step: OnStep | None = None
    ) -> TrainState:
        """Take the remaining steps, and record each; after a signal, raise it.

        `texts` are files for the run's directory, by name. They are written, unless
        they are empty, once the saved state is known to belong to this run. `on_step`
        is as in `jobs.train`.
        """
        state = job.initial_state() if not self.done else self._restored_state(job)
        for line in job.warnings(state):
            say(self._console, line)
        self._job, self._texts, self._on_step = job, texts, on_step
        run = self._config
        self._write_texts()
        with self._stop.deferred(), self._open_metrics(), self.progress:
            if self.taken < run.steps:
                self.progress.waiting("compiling")
            if self._evaluation.at_start and not self.taken:
                self._evaluate_start(job, state)
            unread, number = None, self.taken
            while (ending := self._find_ending(number)) is None:
                previous, number = unread, number + 1
                try:
                    state, unread = self._start_step(job, number, state)
                finally:  # while the device takes the step
                    if previous is not None:
                        self._record_step(self._read_finite(previous))
                if self._reads_now(unread, number):
                    step_metrics, unread = self._read_finite(unread), None
                    self._evaluate_step(job, state, step_metrics)
                if self._saves_after(number):
                    self._save_checkpoint(job, state)
            if unread is not None:
                self._record_step(self._read_finite(unread))
            if run.checkpoint_every and self.saved < self.taken:
                self._save_checkpoint(job, state)
        self._end(ending)
        return state

    def _find_ending(self, number: int) -> Ending | None:
        """The cause, in all processes, that no step follows a step; None if one does.

        A signal to any process, or `on_step` in any process, ends the run in all.
        """
        # A signal that arrives while the processes agree is left for the next step.
        agreed = processes.largest(self._stop.signal or _ASKED * self._is_asked)
        if agreed > _ASKED:
            self._stop.signal = agreed
            return Ending.SIGNAL
        if number >= self._config.steps:
            return Ending.STEPS
        if self.evaluations.exhausts(self._evaluation):
            return Ending.PATIENCE
        return Ending.CALLBACK if agreed else None

    def _end(self, ending: Ending) -> None:
        """Print the cause of an end before the last step; raise a signal."""
        self.ending = ending
        if ending is Ending.SIGNAL:
            self._stop.raise_if_requested()
        where = f"stopped after step {self.taken:,} of {self._config.steps:,}"
        if ending is Ending.PATIENCE:
            reason = self.evaluations.reason(self._evaluation)
            say(self._console, f"{where} by {reason}")
        if ending is Ending.CALLBACK:
            say(self._console, f"{where}: on_step returned False")

    def _write_texts(self) -> None:
        processes.by_first(self._directory.mark)
        for name, text in self._texts.items():
            if text and processes.is_first():
                files.write_whole(self.out_dir / name, text)

    def _read_finite(self, read: Any) -> metrics.AnyMetrics:
        """The metrics of a step, which must be finite; waits for them if need be."""
        step_metrics: Any = read() if callable(read) else read
        resuming.check_finite(step_metrics, self._checkpoints, self.saved)
        return step_metrics

    def _start_step(
        self, job: Job, number: int, state: TrainState
    ) -> tuple[TrainState, Any]:
        """Start a step; return the next state, and metrics or a function of them."""
        try:
            return job.step(number, state)
        except RolloutError as error:
            if self._config.checkpoint_every and self.saved < self.taken:
                self._save_checkpoint(job, state)
            # A signal may be why the rollout has failed.
            self._stop.signal = processes.largest(self._stop.signal)
            if self._stop.signal:
                say(self._console, str(error))
            self._stop.raise_if_requested()
            raise

    def is_stopping(self) -> bool:
        """True once a signal has asked the run to end."""
        return bool(self._stop.signal)

    def _reads_now(self, unread: Any, number: int) -> bool:
        """True if a step's metrics are needed before the next step starts."""
        evaluates = self._evaluation.is_due(number, self._config.steps)
        return evaluates or self._saves_after(number) or not callable(unread)

    def _record_step(
        self, step_metrics: metrics.AnyMetrics, line: str | None = None
    ) -> None:
        """Write and show a step, with a line about its evaluation."""
        self.taken = step_metrics.step
        if self._metrics is not None:
            self._metrics.write(step_metrics, self._samples_of(step_metrics.step))
        self.progress.update(step_metrics)
        if line is not None:
            say(self._console, line)
        if self._on_step is not None:
            answer = self._on_step(step_metrics)
            if isinstance(answer, (bool, np.bool_)) and not answer:
                self._is_asked = True

    def _samples_of(self, number: int) -> list[dict[str, Any]]:
        """Completions of a step for Weights & Biases; none where it gets none."""
        run = self._config
        if run.wandb_samples is None or not is_due(run.log_every, number, run.steps):
            return []
        return self._job.samples(run.wandb_samples)

    def _evaluate_start(self, job: Job, state: TrainState) -> None:
        """Evaluate the initial weights, and show the result."""
        evaluated = job.evaluate(state, NoStep())
        if evaluated is None:
            return
        own = evaluated.cost
        cost = processes.by_first(lambda: own)
        self.evaluations = self.evaluations.with_initial(evaluated._replace(cost=cost))
        say(self._console, self.evaluations.initial_line + evaluated.more)

    def _evaluate_step(
        self, job: Job, state: TrainState, step_metrics: metrics.AnyMetrics
    ) -> None:
        """Record a step, which is evaluated if that is due."""
        number, config = step_metrics.step, self._evaluation
        is_due = config.is_due(number, self._config.steps)
        evaluated = job.evaluate(state, step_metrics) if is_due else None
        if evaluated is None:
            self._record_step(step_metrics)
            return
        # One cost decides in all processes.
        own = evaluated.cost
        cost = processes.by_first(lambda: own)
        evaluated = evaluated._replace(cost=cost)
        self.evaluations = self.evaluations.added(number, evaluated, config.min_delta)
        if config.keep_best:
            self._keep_best(job, state, number, cost)
        self.progress.notes = self.evaluations.items(cost)
        line = self.evaluations.line(number, cost, config) + evaluated.more
        self._record_step(evaluated.metrics, line)

    def _keep_best(self, job: Job, state: TrainState, number: int, cost: float) -> None:
        """Save the step in `out_dir/best` if its evaluation is the best."""

        def save(where: Checkpoints, more: Mapping) -> None:
            where.save(number, state, job.get_state(), {**self._saved_settings, **more})

        with resuming.advising(self.saved):
            message = keep_best(self.out_dir / "best", number, cost, save)
        if message:
            say(self._console, message)

    def _restored_state(self, job: Job) -> TrainState:
        state, data_state = job.restored_state(self._checkpoints, self.done)
        saved = self._checkpoints.saved_shapes(self.done)
        if (line := precision.widened(saved["params"], state.params)) is not None:
            say(self._console, line)
        job.set_state(data_state)
        return state

    def _saves_after(self, number: int) -> bool:
        run = self._config
        return is_due(run.checkpoint_every, number, run.steps)

    def _save_checkpoint(self, job: Job, state: TrainState) -> None:
        self._renew_directory()
        # Before the checkpoint, so that the metrics of a restored step are on disk.
        if self._metrics is not None:
            self._metrics.flush()
        arguments = self.taken, state, job.get_state(), self._saved_settings
        with resuming.advising(self.saved):
            try:
                self._checkpoints.save(*arguments)
            except RunCheckpointError:
                if not self._renew_directory():
                    raise
                self._checkpoints.save(*arguments)  # it was removed at that moment
        self.saved = self.taken
        if self._metrics is not None:
            self._write_report(job)

    def _renew_directory(self) -> bool:
        """Make the run's directory anew if it was removed; True if so."""
        if message := processes.by_first(self._lock.renew):
            say(self._console, message)
            self._write_texts()
        return bool(message)

    def _write_report(self, job: Job) -> None:
        """Write the report; a full disk does not end the run."""
        lines = [json.dumps(sample) + "\n" for sample in job.samples()]
        try:
            if lines:
                files.write_whole(self.out_dir / "samples.jsonl", "".join(lines))
            for line in self._page.write():
                say(self._console, line)
        except OSError as error:
            say(self._console, f"{error}; training goes on")

    @property
    def _saved_settings(self) -> dict[str, Any]:
        settings = self._settings
        evaluations = self.evaluations.settings()
        return {
            **settings.fixed, resuming.CHANGEABLE: settings.changeable, **evaluations
        }  # fmt: skip

    @contextlib.contextmanager
    def _open_metrics(self) -> Iterator[None]:
        """Within it, the first process has a metrics writer."""
        if not processes.is_first():
            yield
            return
        log = functools.partial(say, self._console)
        every = self._config.log_every
        with (
            self._open_wandb(log) as board,
            MetricsWriter(self.out_dir, self.done, log, every, board) as self._metrics,
        ):
            yield

    def _open_wandb(
        self, log: Callable[[str], None]
    ) -> contextlib.AbstractContextManager:
        project, settings = self._config.wandb, self._settings
        if project is None:
            return contextlib.nullcontext()
        merged = {
            name: {**settings.changeable.get(name, {}), **settings.fixed.get(name, {})}
            for name in {**settings.fixed, **settings.changeable}
        }
        return WandbWriter(project, self.out_dir, self.done, merged, log)

    def history(self, kind: type) -> list[Any]:
        """Every step of the run, including those of earlier processes."""
        unwritten = self._metrics.unwritten if self._metrics is not None else ()
        return read_history(self.metrics_path, kind, unwritten)

    def best_state(self, job: Job) -> TrainState | None:
        """The state of the best evaluation, from `out_dir/best`; None without one."""
        directory = self.out_dir / "best"
        if not self._evaluation.keep_best or not directory.exists():
            return None
        with Checkpoints(directory, keep=1) as checkpoints:
            step = checkpoints.latest()
            return None if step is None else job.restored_state(checkpoints, step)[0]

    def position(self) -> str:
        """The last step and how to resume after it, in words."""
        if not self.taken:
            return "before the first step"
        where = f"after step {self.taken} of {self._config.steps}"
        if self.saved == self.taken:
            where += ", which is saved: the same command resumes"
            return f"{where} {files.shown(self.out_dir)}"
        if self._config.checkpoint_every is None:
            where += ", which is not saved because of run.checkpoint_every=None"
        if not self.saved:
            return f"{where}; the same command starts from the beginning"
        return f"{where}; the same command resumes after step {self.saved}"


@contextlib.contextmanager
def open_run(
    config: RunConfig,
    settings: Settings,
    console: Console,
    evaluation: EvalConfig | None = None,
    result: str = "model",
) -> Iterator[Run]:
    """Open the run in `config.out_dir`, old or new, for this process alone.

    If checkpoints are there, `Run.take_steps` continues from the newest that can be
    read: killed at any step and called again, it takes bitwise the same steps on the
    CPU as if it had never stopped. SIGTERM and SIGINT end the run after the current
    step and save it; see `Stop`. `result` is the directory that the run leaves in the
    end, as in `ownership.result_of`.
    """
    directory = ownership.RunDirectory.of(config, result)
    out_dir, where = directory.path, directory.key
    log = functools.partial(say, console)
    if config.wandb is not None and processes.is_first():
        wandb_writer.check(config.wandb)
    with Stop() as stop:
        run, is_alone = None, jax.process_count() == 1
        try:
            with (
                locks.exclusive(out_dir / "lock", where, log) as lock,
                directory.claimed(),
                # Several processes must agree on the last step.
                contextlib.nullcontext() if is_alone else stop.deferred(),
            ):
                for name, needed in (("checkpoints", True), ("best", False)):
                    for line in set_aside_damaged(out_dir / name, needed):
                        log(line)
                with Checkpoints(out_dir / "checkpoints", config.keep) as checkpoints:
                    if config.checkpoint_every and checkpoints.latest() is None:
                        with stop.deferred():  # orbax runs event loops, which must end
                            checkpoints.check_storage()
                        if is_alone:
                            stop.raise_if_requested()
                    held = _HeldResources(stop, lock, directory)
                    run = Run(config, settings, console, checkpoints, held, evaluation)
                    with run.progress:
                        yield run
        finally:
            if stop.signal:
                last = run.position() if run is not None else "before the first step"
                log(f"stopped by {stop.name} {last}")
