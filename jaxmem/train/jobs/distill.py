"""Distillation: a student learns the distribution of a teacher, token by token.

data, or completions that the student samples -> teacher's hidden states, parked on the
host, or a file's columns -> student's gradients -> update
"""

import dataclasses
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import tokenizers
from rich.console import Console

from jaxmem import checkpoints, offload
from jaxmem.core import processes
from jaxmem.data import teacher_files, teacher_streams
from jaxmem.data.documents import Batch
from jaxmem.train import metrics, plots, report, starting
from jaxmem.train.evaluation import Evaluated
from jaxmem.train.jobs import teachers
from jaxmem.train.jobs.config import DistillJobConfig
from jaxmem.train.jobs.distill_program import (
    METRICS,
    Compiled,
    DistillProgram,
    FileColumns,
)
from jaxmem.train.jobs.distill_sources import (
    Example,
    File,
    Prompts,
    Source,
    Text,
)
from jaxmem.train.jobs.distillation import TeacherColumns, TeacherStates
from jaxmem.train.jobs.ending import train_and_leave
from jaxmem.train.jobs.epochs import with_steps
from jaxmem.train.loop import Settings, changeable_settings, open_run
from jaxmem.train.metrics import DistillMetrics
from jaxmem.train.program import TrainState, fixed_weights


class Result(NamedTuple):
    """What `train` leaves."""

    out_dir: Path  # metrics, checkpoints, summary.json and report.png
    history: list[DistillMetrics]  # every step, of earlier processes too


class _Columns:
    """A file's columns, in the place of a teacher."""

    def __init__(self, program: DistillProgram):
        self._layout = program.layout

    def park(self, example: Example) -> Any:
        """The columns of a micro-batch, which are in the host's memory."""
        return example.columns

    def fetch(self, columns: TeacherColumns) -> TeacherColumns:
        """The same where the student's programs read them."""
        return self._layout.place(columns, self._layout.of_hidden(columns))


class _Teacher:
    """The teacher's weights, and its hidden states of micro-batches."""

    def __init__(self, program: DistillProgram, compiled: Compiled):
        self._states = compiled.states
        self._params = program.teacher.initial_params()
        self._head = program.teacher.head_weights(self._params)

    def park(self, example: Example) -> Any:
        """The hidden states of a placed micro-batch, in the host's memory."""
        batch = example.batch
        return offload.park(self._states[batch.tokens.shape](self._params, batch))

    def fetch(self, states: Any) -> TeacherStates:
        """What the student's programs read, back on the device."""
        return TeacherStates(offload.fetch(states), self._head)


class _Job:
    """The steps of a run, for `Run.take_steps`."""

    def __init__(
        self,
        program: DistillProgram,
        frozen: Any,
        source: Source,
    ):
        self._program, self._config = program, program.config
        self._source = source
        self._frozen, self._compiled = frozen, program.compile()
        self._teacher: _Teacher | _Columns = _Columns(program)
        if self._compiled.states:
            self._teacher = _Teacher(program, self._compiled)
        self.initial_state = program.initial_state
        self.restored_state = program.restored_state
        self.get_state, self.set_state = source.get_state, source.set_state
        self.samples = source.samples

    def step(self, number: int, state: TrainState) -> tuple[TrainState, DistillMetrics]:
        start = time.perf_counter()
        taken = self._source.take(number, state.params)
        examples = [self._place(example) for example in taken.examples]
        ready = time.perf_counter()
        parked = [self._teacher.park(example) for example in examples]
        taught = time.perf_counter()
        tokens = sum(self._count(example.batch) for example in examples)
        sums = self._compiled.zeros()
        for i, (batch, _, advantages) in enumerate(examples):
            target, parked[i] = self._teacher.fetch(parked[i]), None
            given = () if advantages is None else (advantages,)
            sums = self._compiled.gradients[batch.tokens.shape](
                state.params, self._frozen, sums, batch, target, tokens, *given
            )
        loss, observed = sums.loss, sums.metrics
        state, norm = self._compiled.update(state, sums.gradients)
        loss, observed, norm, tokens = jax.device_get((loss, observed, norm, tokens))
        end, seen = time.perf_counter(), max(int(tokens), 1)
        return state, DistillMetrics(
            step=number,
            loss=float(loss),
            tokens=int(tokens),
            tokens_per_second=int(tokens) / (end - start),
            grad_norm=float(norm),
            learning_rate=float(np.asarray(self._program.schedule(number - 1))),
            data_seconds=ready - start,
            teacher_seconds=taught - ready,
            update_seconds=end - taught,
            seconds=end - start,
            peak_gib=metrics.peak_gib(),
            backend=self._program.backend,
            **{name: float(observed[name]) / seen for name in METRICS},
            **taken.observed,
        )

    def _place(self, example: Example) -> Example:
        given = example.batch, example.advantages
        batch, advantages = self._program.layout.place(given)
        return example._replace(batch=batch, advantages=advantages)

    def _count(self, batch: Batch) -> jax.Array:
        """Tokens of a placed micro-batch that count, of all processes."""
        return self._compiled.count[batch.tokens.shape](batch.labels)

    def evaluate(self, state: TrainState, taken: DistillMetrics) -> Evaluated | None:
        held_out = self._source.held_out(state.params)
        if held_out is None:
            return None
        means = self._means(state.params, held_out.examples)
        distill = self._config.distill
        cost = means["divergence"] + distill.loss_weight * means["ce"]
        if distill.reward_weight:
            cost -= distill.reward_weight * held_out.observed["held_out_reward"]
        return Evaluated(
            taken._replace(
                held_out_loss=cost,
                held_out_divergence=means["divergence"],
                held_out_ce=means["ce"],
                **held_out.observed,
            ),
            cost,
        )

    def _means(self, params: Any, examples: Iterable[Example]) -> dict[str, float]:
        """Means over the tokens of micro-batches, forward only."""
        observed = []
        for example in map(self._place, examples):
            target = self._teacher.fetch(self._teacher.park(example))
            batch = example.batch
            sums = self._compiled.sums[batch.tokens.shape](
                params, self._frozen, batch, target
            )
            observed.append(sums | {"tokens": self._count(batch)})
        sums = jax.tree.map(lambda *x: float(np.sum(x, dtype=np.float64)), *observed)
        return {name: sums[name] / max(sums["tokens"], 1) for name in METRICS}


def train(
    config: DistillJobConfig, operative_text: str = "", console: Console | None = None
) -> Result:
    """Train a student, or resume.

    Args:
        config: everything about the run, which lives in `config.run.out_dir`; a run
            that is there already continues from its newest checkpoint.
        operative_text: the gin text that says the same; saved beside the run.
        console: where progress goes; a new rich console by default.

    Returns:
        The run's directory and its history.

    Raises:
        ValueError: data or teacher cannot be used; the directory holds a run of another
            model, data or backend of the head, or another process uses it.
        CheckpointError: a checkpoint cannot be written, or all are damaged.
        FloatingPointError: the loss is not finite.
        KeyboardInterrupt: after SIGINT; the current step is finished and saved.
        SystemExit: likewise after SIGTERM.
    """
    config = with_steps(starting.resolved(config))
    console = console or Console(quiet=not processes.is_first())
    with open_run(config.run, _settings(config), console, config.eval) as run:
        tokenizer = teachers.tokenizer_of(config)
        file = _file(config, tokenizer)
        program = _program(config, tokenizer, file)
        run.use_backend(program.backend, config.head.backend)
        source = _source(program, tokenizer, file)
        run.progress.waiting("compiling")
        program.choose_policy_by_gradients(console)
        frozen = program.frozen()
        source = source or Prompts(program, frozen)
        texts = starting.texts(config, operative_text, tokenizer)
        job = _Job(program, frozen, source)
        train_and_leave(run, job, program, frozen, texts, console, config)
        if not processes.is_first():
            return Result(run.out_dir, [])
        result = Result(run.out_dir, run.history(DistillMetrics))
        _report(result, console)
        return result


def _file(
    config: DistillJobConfig, tokenizer: tokenizers.Tokenizer
) -> teacher_files.TeacherFile | None:
    """What is read instead of a teacher, if anything."""
    distill = config.distill
    if distill.mode != "offline":
        return None
    file = teacher_streams.opened(config.data)
    digest = checkpoints.vocabulary_digest(tokenizer)
    teacher_files.check(file, distill.temperature, distill.divergence, digest)
    return file


def _program(
    config: DistillJobConfig,
    tokenizer: tokenizers.Tokenizer,
    file: teacher_files.TeacherFile | None,
) -> DistillProgram:
    columns = None
    if file is not None:
        columns = FileColumns(file.ids.shape[1], file.logprobs is not None)
    return DistillProgram(config, tokenizer.get_vocab_size(), columns)


def _source(
    program: DistillProgram,
    tokenizer: tokenizers.Tokenizer,
    file: teacher_files.TeacherFile | None,
) -> Source | None:
    """Where micro-batches come from; None if the student samples them."""
    if program.config.is_on_policy:
        return None
    return Text(program, tokenizer) if file is None else File(file, program.config)


def _settings(config: DistillJobConfig) -> Settings:
    """Return the settings that are compared when a run is resumed."""
    distill = dataclasses.asdict(config.distill)
    fixed = {
        "data": config.data.fixed(),
        "model": dataclasses.asdict(config.model),
        "distill": {name: distill[name] for name in ("mode", "teacher")},
    }
    changeable = ["optimizer", "distill"]
    if config.is_on_policy:
        del fixed["data"]
        # How long a reward may take decides no value; saved as before there were any.
        task = dataclasses.replace(config.task, timeout=None)
        fixed["task"] = dataclasses.asdict(task)
        changeable.append("sampling")
    weights = fixed_weights(config.optimizer, config.run.seed)
    weights["run"] = {"job": config.run.job, "seed": config.run.seed}
    fixed |= weights
    return Settings(fixed, changeable_settings(config, changeable, fixed))


def _report(result: Result, console: Console) -> None:
    out_dir, history = result
    first, last = history[0], history[-1]
    rewards = ""
    if first.reward is not None and last.reward is not None:
        rewards = f"reward {first.reward:.3f} -> {last.reward:.3f}, "
    console.print(
        f"{rewards}divergence {first.divergence:.4f} -> {last.divergence:.4f}, "
        f"cross-entropy {first.ce:.4f} -> {last.ce:.4f} in {len(history)} steps, "
        f"{metrics.tokens_per_second(history):,.0f} tokens/s",
        highlight=False,
    )
    metrics.save_distill_summary(out_dir / "summary.json", history)
    label = "divergence (nats per token)"
    plots.save(out_dir / "report.png", history, {}, "divergence", label)
    report.finish(out_dir, console)
