"""Training: any job, from its configuration to its report."""

import contextlib
import dataclasses
import importlib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.console import Console

from jaxmem.base import files, messages, processes
from jaxmem.data import event_loop
from jaxmem.train import (
    agreement,
    keys,
    loop,
    metrics,
    model_names,
    publishing,
    results,
    starts,
)
from jaxmem.train.jobs.job import Job, job_of
from jaxmem.train.metrics import HeadCost
from jaxmem.train.output import plots, report
from jaxmem.train.output.progress import say
from jaxmem.train.settings import JobConfig
from jaxmem.train.state import ownership
from jaxmem.train.state.ownership import RunDirectory

_FEW_STEPS = 20  # fewer are said to be few


class Result(NamedTuple):
    """The result of `train`; in processes other than the first, only its directory."""

    out_dir: Path  # metrics, checkpoints, summary.json, report.html and report.png
    history: list[Any] = []  # `Job.Metrics` of every step, of earlier processes too
    costs: Mapping[str, HeadCost] = {}  # by `head.logits`; {} without compare_heads
    summary: Mapping[str, Any] = {}  # as in summary.json
    # the cause that ended the run: "run.steps", "eval.patience" or "on_step"
    ended_by: str = "run.steps"

    @property
    def model(self) -> Path | None:
        """The exported adapter or model, for transformers; None if there is none."""
        exported = (self.out_dir / name for name in ("adapter", "model"))
        return next(filter(Path.exists, exported), None)

    def generator(self, config: Any = None) -> Any:
        """Return a `jaxmem.generate.Generator` of the run's last model.

        Args:
            config: a `jaxmem.generate.GenerateConfig`; None: its defaults.
        """
        # That package stands above this one and reads runs by it.
        generate = importlib.import_module("jaxmem.generate")
        model = generate.load(self.out_dir, trust_code=True)  # which this process ran
        return generate.Generator(model, config or generate.GenerateConfig())


def train(
    config: JobConfig,
    operative_text: str = "",
    console: Console | None = None,
    on_step: "loop.OnStep | None" = None,
) -> Result:
    """Train, or resume training, and report what was reached.

    A run that is complete already, with its results, is neither compiled nor changed.

    Args:
        config: everything about the run, which lives in `config.run.out_dir`; a run
            that is there already continues from its newest checkpoint (see
            `loop.open_run`).
        operative_text: the gin text of `config`, which is saved beside the run with the
            commits of models of the Hub; "": it is made from `config`.
        console: where progress goes; a new rich console by default.
        on_step: called in each process with the metrics of every step, as metrics.jsonl
            has them. If it returns False, the run stops, saves a checkpoint and leaves
            its results; the same call resumes it. A step that has started by then,
            while the metrics were read, is the last one.

    Returns:
        The run's directory, its history, the memory of both heads and the summary.

    Raises:
        ValueError: the data cannot be used; the directory holds a run of another model,
            data or backend of the head, or files that are no run's, or another process
            uses it; or the processes of the run differ.
        RunCheckpointError: a checkpoint cannot be written, or all are damaged.
        FloatingPointError: the loss is not finite.
        KeyboardInterrupt: after SIGINT; the current step is finished and saved.
        SystemExit: the same after SIGTERM.
    """
    operative_text = operative_text or keys.text(config)
    config = model_names.with_directories(
        model_names.of_run(config), tells_cached=processes.is_first()
    )
    operative_text = model_names.recorded_text(operative_text, config)
    given = config
    if jax.process_count() > 1:
        processes.agree(agreement.facts(config))
    job = job_of(config)
    _check_samples(job)
    processes.by_first(lambda: _check_directory(job))
    job.reads.today = results.started(config.run.out_dir)
    if console is None:  # FORCE_COLOR, which notebooks set, makes no terminal of a file
        terminal = sys.stdout.isatty()
        console = Console(quiet=not processes.is_first(), force_terminal=terminal)
    every = config.eval.every
    length_key = "run.steps" if config.run.epochs is None else "run.epochs"
    job = with_steps(job)
    config = job.config
    if config.eval.every is not None and config.eval.every != every:
        steps = messages.counted(config.eval.every, "step")
        shown = f"evaluated every {steps}, not every {every:,}"
        say(console, f"an epoch has fewer steps than eval.every: {shown}")
    result = ownership.result_of(config)
    settings = job.settings()._replace(length_key=length_key)
    opened = loop.open_run(config.run, settings, console, config.eval, result)
    with event_loop.closed_at_end(), contextlib.closing(job), opened as run:
        if run.is_complete:
            if (left := _left_results(run, job)) is not None:
                say(console, run.completion())
                publishing.finish(job, run.out_dir, console)
                return left
            say(console, f"{files.shown(run.out_dir)}: all steps are done; writing "
                         "the results that are missing")  # fmt: skip
        job.build()
        run.use_backend(job.program.backend, config.head.implementation)
        job.open()
        if not run.done:
            starts.keep(config)
        if config.eval.every is not None and not job.holds_out():
            say(console, config.eval.nothing_held_out())
        for line in (*job.program.lines(), *job.reads.lines()):
            say(console, line)
        if length_key == "run.epochs" and config.run.steps < _FEW_STEPS:
            say(console, _few_steps(job))
        if not run.is_complete:
            job.begin(run.progress, run.is_stopping)
        run.progress.waiting("compiling")
        job.program.choose_policy(console)
        job.compile(run.progress)
        texts = results.texts(job, operative_text, given)
        state = run.take_steps(job, texts, on_step)
        return _finish(run, job, state, console)


def _few_steps(job: Job) -> str:
    """A line about a run whose epochs have few steps."""
    steps = messages.counted(job.config.run.steps, "step")
    rows = getattr(getattr(job.config, "data", None), "batch_size", 1)
    lower = ", or lower data.batch_size" if rows > 1 else ""
    return f"{steps} in all, which trains little: raise run.epochs{lower}"


def _left_results(run: "loop.Run", job: Job) -> Result | None:
    """The result of a complete run, from its directory; None if a part is missing."""
    out_dir, target = run.out_dir, ownership.result_of(job.config)
    summary = processes.by_first(lambda: results.read_summary(out_dir, target))
    if summary is None or summary.get("steps") != run.done:
        return None
    ended_by = summary.get("ended_by", loop.Ending.STEPS)
    if not processes.is_first():
        return Result(out_dir, ended_by=ended_by)
    report.write(out_dir)  # the last file of a run, which a kill may have prevented
    costs = metrics.costs_of(summary.get("memory", {}))
    return Result(out_dir, run.history(job.Metrics), costs, summary, ended_by)


def _check_samples(job: Job) -> None:
    """Raise if completions are to be shown of a job that samples none."""
    run = job.config.run
    if run.wandb_samples is not None and not job.samples_completions():
        raise ValueError(
            f"run.wandb_samples={run.wandb_samples} shows sampled completions, but "
            f"run.job={run.job!r} samples none here; leave run.wandb_samples out"
        )


def _check_directory(job: Job) -> None:
    """Raise if the run would replace files of others, or files that it reads."""
    config = job.config
    directory = RunDirectory.of(config.run, ownership.result_of(config))
    directory.check_inputs(config)
    directory.check()
    if config.run.push is not None:
        publishing.check_push(config)


def with_steps(job: Job) -> Job:
    """The job with `run.steps` as `run.epochs` says; itself without it.

    `eval.every` becomes the steps of an epoch if that is shorter. To count the steps,
    the data are read and tokenised once more, and packed once an epoch.
    """
    run, evaluation = job.config.run, job.config.eval
    if run.epochs is None:
        return job
    lengths = job.reads.epochs(math.ceil(run.epochs))
    epoch = max(round(math.fsum(lengths) / len(lengths) / run.accumulate), 1)
    lengths[-1] *= 1 - (len(lengths) - run.epochs)  # the last one may be a part
    # The sum of n/B is rounded, so that its error begins no further step.
    steps = math.ceil(round(math.fsum(lengths), 6) / run.accumulate)
    run = dataclasses.replace(run, steps=max(steps, 1), epochs=None)
    if evaluation.every is not None:
        every = min(evaluation.every, epoch)
        evaluation = dataclasses.replace(evaluation, every=every)
    config = dataclasses.replace(job.config, run=run, eval=evaluation)
    counted = type(job)(config)
    counted.reads.today = job.reads.today
    return counted


def _finish(run: "loop.Run", job: Job, state: Any, console: Console) -> Result:
    """Leave the results of a run whose steps are taken."""
    _leave_results(run, job, state, console)
    last = job.finish(state)
    costs = job.costs() if job.config.run.compare_heads else {}
    ended_by = run.ending or loop.Ending.STEPS
    if not processes.is_first():
        return Result(run.out_dir, ended_by=ended_by)
    history = run.history(job.Metrics)
    if not history:  # the file was removed after the last step
        say(
            console,
            f"{run.metrics_path} contains no step, so jaxmem writes no summary and no "
            "report",
        )
        publishing.finish(job, run.out_dir, console)
        return Result(run.out_dir, [], costs, ended_by=ended_by)
    with_last = [*history[:-1], history[-1]._replace(**last)]
    summary = summary_of(job, with_last, costs, ended_by) | run.evaluations.summary()
    _write_report(job, run.out_dir, with_last, costs, summary, console)
    publishing.finish(job, run.out_dir, console)
    return Result(run.out_dir, history, costs, summary, ended_by)


def _leave_results(run: "loop.Run", job: Job, state: Any, console: Console) -> None:
    results.leave(
        run.out_dir, job.program.model(state.params, job.frozen), console, job
    )
    if (best := run.best_state(job)) is not None:
        model = job.program.model(best.params, job.frozen)
        results.leave_best(run.out_dir, model, console, job)


def _write_report(
    job: Job,
    out_dir: Path,
    history: Sequence[Any],
    costs: Mapping[str, HeadCost],
    summary: Mapping[str, Any],
    console: Console,
) -> None:
    """Print what a run reached, and leave its summary, figure and report."""
    if costs:
        console.print(metrics.cost_table(costs))
    for item in job.closing(history):
        say(console, item) if isinstance(item, str) else console.print(item)
    plots.save(out_dir / "report.png", history, costs, *job.chart)
    text = json.dumps(summary, indent=2) + "\n"
    files.write_whole(out_dir / "summary.json", text)
    report.finish(out_dir, console)


def summary_of(
    job: Job, history: Sequence[Any], costs: Mapping[str, HeadCost], ended_by: str
) -> dict[str, Any]:
    """The content of summary.json; memory is in bytes, by `head.logits`."""
    return {
        "steps": history[-1].step,
        "ended_by": ended_by,
        "gradient_samples": getattr(history[-1], "gradient_samples", None),
        **job.summary(history),
        "tokens_per_second": metrics.tokens_per_second(history),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "memory": {
            name: {"head": cost.head._asdict(), "step": cost.step._asdict()}
            for name, cost in costs.items()
        },
    }
