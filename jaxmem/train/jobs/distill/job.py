"""Distillation: a student learns the distribution of a teacher, token by token.

data, or completions that the student samples -> teacher's hidden states, parked on the
host, or a file's columns -> student's gradients -> update
"""

import dataclasses
import functools
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tokenizers

from jaxmem import checkpoints
from jaxmem.data import teacher_files, vocabulary
from jaxmem.data.documents import Batch
from jaxmem.head.verbs.column_targets import Columns, Drawn
from jaxmem.models.decoder import ModelConfig
from jaxmem.remat import offload
from jaxmem.train import metrics
from jaxmem.train.evaluation import Evaluated
from jaxmem.train.jobs.config import DistillJobConfig
from jaxmem.train.jobs.distill import teachers
from jaxmem.train.jobs.distill.program import (
    METRICS,
    Counted,
    DistillProgram,
    FileColumns,
    TeacherStates,
)
from jaxmem.train.jobs.distill.sources import (
    DistillBatch,
    File,
    StudentSamples,
    TextRows,
)
from jaxmem.train.jobs.job import Job
from jaxmem.train.jobs.reading import Documents, TeacherRows
from jaxmem.train.jobs.rollout.prompt_tasks import TaskPrompts
from jaxmem.train.metrics import DistillMetrics
from jaxmem.train.output.progress import ProgressReport
from jaxmem.train.phases import Phase, Programs, device_bytes
from jaxmem.train.program import TrainState


class Distill(Job, name="distill"):
    """A student that learns from a teacher, or from a file of one."""

    Config, Metrics = DistillJobConfig, DistillMetrics
    chart = ("divergence", "divergence (nats per token)")

    def sizes(self) -> ModelConfig:
        """See `Job`; without a checkpoint, with its teacher's vocabulary."""
        return teachers.of_same_vocabulary(self.config, super().sizes())

    def reading(self) -> Documents | TaskPrompts:
        config, model = self.config, teachers.reading(self.config)
        if config.is_on_policy:
            prompts = config.distill.prompts
            return TaskPrompts(config.task, config.sampling, model.checkpoint, prompts)
        kind = TeacherRows if config.distill.mode == "offline" else Documents
        return kind(config.data, model)

    @functools.cached_property
    def tokenizer(self) -> tokenizers.Tokenizer:
        """See `Job`: that of student and teacher."""
        checkpoint = teachers.reading(self.config).checkpoint
        assert checkpoint is not None
        return vocabulary.of_checkpoint(checkpoint)

    @property
    def changeable(self) -> list[str]:
        sampling = ["sampling"] if self.config.is_on_policy else []
        return ["optimizer", "distill", *sampling]

    def fixed(self) -> dict[str, Any]:
        config, fixed = self.config, super().fixed()
        if config.is_on_policy:  # as in runs that are older than the time limit
            fixed["task"] = dataclasses.replace(config.task, timeout=None).fixed()
        distill = config.distill
        own = {"mode": distill.mode, "teacher": distill.teacher}
        if distill.teacher_base is not None:  # older runs lack it
            own["teacher_base"] = distill.teacher_base
        return fixed | {"distill": own}

    def text(self, directory: Path) -> checkpoints.Text:
        """See `Job`: as its teacher does."""
        return teachers.text(self.config, self.reads.chat_template)

    def scaled(self, factor: float) -> tuple[int, dict[str, Any]] | None:
        config = self.config
        if not config.is_on_policy:
            return super().scaled(factor)
        slots = int(config.distill.max_tokens * factor)
        rows, rest = divmod(slots, config.row_lengths[-1])
        return None if rest else (rows, {"distill.max_tokens": slots})

    def make_program(self, vocab_size: int) -> DistillProgram:
        distill, rows = self.config.distill, self.config.model.vocab_size
        if distill.mode != "offline":
            return DistillProgram(self.config, vocab_size)
        file, digest = self.reads.file, checkpoints.vocabulary_digest(self.tokenizer)
        teacher_files.check(file, distill.temperature, distill.divergence, digest)
        if rows is not None:
            teacher_files.check_ids(file, rows, self.config.data.source)
        columns = FileColumns(file.ids.shape[1], file.logprobs is not None)
        return DistillProgram(self.config, vocab_size, columns)

    def plan(self) -> Programs:
        """See `Job`; the teacher's states of a step wait on the host."""
        if self.config.distill.mode == "offline":
            raise ValueError(
                "distill.mode='offline' has no plan, because its memory depends on "
                "the columns of data.source; plan run.job='sft' for a model of these "
                "sizes"
            )
        programs, program = super().plan(), self.program
        states = device_bytes(program.teacher.states(program.shapes[-1]))
        waiting = math.ceil(programs.backward.runs) * states
        return dataclasses.replace(programs, on_host=programs.on_host + waiting)

    def phases(self) -> list[Phase]:
        return self.program.phases()

    def open(self) -> None:
        config, reads = self.config, self.reads
        if config.is_on_policy:
            self._task = reads.task
            self._task.agree()
            if config.distill.reward_weight is not None:
                self._task.check()
        elif config.distill.mode == "offline":
            self.batches = File(reads, config)
        else:
            self.batches = TextRows(self.program, reads)

    def compile(self, progress: ProgressReport) -> None:
        program = self.program
        if self.config.is_on_policy:
            self.batches = StudentSamples(program, self.frozen, self._task)
        self._compiled = program.compile()
        self._teacher_weights: Any = (
            None  # weights of the teacher; None: a file is read
        )
        if self._compiled.states:
            self._teacher_weights = program.teacher.initial_params()
            self._head = program.teacher.head_weights(self._teacher_weights)

    def samples_completions(self) -> bool:
        return self.config.is_on_policy

    def samples(self, count: int = 8) -> list[dict[str, Any]]:
        return self.batches.samples(count)

    def step(self, number: int, state: TrainState) -> tuple[TrainState, DistillMetrics]:
        start = time.perf_counter()
        data = self.batches.take(number, state.params)
        examples = [self._place_batch(example) for example in data.examples]
        ready = time.perf_counter()
        parked = [self._park_target(example) for example in examples]
        taught = time.perf_counter()
        counts = jax.device_get(
            [self._count_tokens(example.batch) for example in examples]
        )
        counted = jax.tree.map(lambda *x: np.sum(x, dtype=np.float32), *counts)
        sums = self._compiled.zeros()
        for i, example in enumerate(examples):
            target, parked[i] = self._fetch_target(parked[i]), None
            drawn_by = self.program.micro_batch_numbers(self.config.head, number, 0, i)
            sums, _ = self._compiled.gradients[example.batch.tokens.shape](
                state.params, self.frozen, sums, example.batch, target, counted,
                example.advantages, *drawn_by,
            )  # fmt: skip
        sums, slopes = sums._replace(gradients=None), sums.gradients
        state, norm = self._compiled.update(state, slopes)
        sums, norm, tokens = jax.device_get((sums, norm, counted.learned))
        observed = sums.metrics
        end, seen = time.perf_counter(), max(int(tokens), 1)
        return state, DistillMetrics(
            step=number,
            loss=float(sums.loss),
            tokens=int(tokens),
            tokens_per_second=int(tokens) / (end - start),
            grad_norm=float(norm),
            learning_rate=float(self.learning_rates[number - 1]),
            data_seconds=ready - start,
            teacher_seconds=taught - ready,
            update_seconds=end - taught,
            seconds=end - start,
            peak_gib=metrics.peak_gib(),
            backend=self.program.backend,
            routers=self.program.routers(sums.routed),
            **{name: float(observed[name]) / seen for name in METRICS},
            **data.observed,
        )

    def _place_batch(self, example: DistillBatch) -> DistillBatch:
        arrays = example.batch, example.advantages
        batch, advantages = self.program.layout.place(arrays)
        return example._replace(batch=batch, advantages=advantages)

    def _park_target(self, example: DistillBatch) -> Any:
        """The target of a placed micro-batch, in the host's memory."""
        if self._teacher_weights is None:
            return example.columns
        batch = example.batch
        run = self._compiled.states[batch.tokens.shape]
        return offload.park(run(self._teacher_weights, batch))

    def _fetch_target(self, parked: Any) -> TeacherStates | Columns | Drawn:
        """The target that the student's programs read, back on the device."""
        if self._teacher_weights is None:
            layout = self.program.layout
            return layout.place(parked, layout.of_hidden(parked))
        return TeacherStates(offload.fetch(parked), self._head)

    def _count_tokens(self, batch: Batch) -> Counted:
        """Counts of tokens of a placed micro-batch, over all processes."""
        return self._compiled.count[batch.tokens.shape](batch)

    def holds_out(self) -> bool:
        if self.config.is_on_policy:  # whose samples need programs
            return self._task.held_out() is not None
        return self.batches.holds_out()

    def evaluate(
        self, state: TrainState, step_metrics: DistillMetrics
    ) -> Evaluated | None:
        held_out = self.batches.held_out(state.params)
        if held_out is None:
            return None
        means = self._mean_metrics(state.params, held_out.examples)
        distill = self.config.distill
        cost = means["divergence"] + distill.loss_weight * means["ce"]
        if distill.reward_weight:
            reward = held_out.observed["held_out_reward"]
            cost -= distill.reward_weight * (math.nan if reward is None else reward)
        return Evaluated(
            step_metrics._replace(
                held_out_loss=None if math.isnan(cost) else cost,
                held_out_divergence=means["divergence"],
                held_out_ce=means["ce"],
                **held_out.observed,
            ),
            cost,
        )

    def _mean_metrics(
        self, params: Any, examples: Iterable[DistillBatch]
    ) -> dict[str, float]:
        """Means over the tokens of micro-batches, forward only."""
        observed = []
        for example in map(self._place_batch, examples):
            target = self._fetch_target(self._park_target(example))
            batch = example.batch
            sums = self._compiled.sums[batch.tokens.shape](
                params, self.frozen, batch, target
            )
            observed.append(sums | {"tokens": self._count_tokens(batch).learned})
        sums = jax.tree.map(lambda *x: float(np.sum(x, dtype=np.float64)), *observed)
        return {name: sums[name] / max(sums["tokens"], 1) for name in METRICS}

    def summary(self, history: Sequence[DistillMetrics]) -> Mapping[str, Any]:
        held_out = ["held_out_loss", "held_out_divergence", "held_out_ce"]
        held_out += ["held_out_reward"] if history[-1].reward is not None else []
        return {
            **super().summary(history),
            "last_divergence": history[-1].divergence,
            **metrics.last_of(history, *held_out),
        }

    def closing(self, history: Sequence[DistillMetrics]) -> Iterator[str]:
        first, last, rewards = history[0], history[-1], ""
        if first.reward is not None and last.reward is not None:
            rewards = f"reward {first.reward:.3f} -> {last.reward:.3f}, "
        yield (
            f"{rewards}divergence {first.divergence:.4f} -> {last.divergence:.4f}, "
            f"cross-entropy {first.ce:.4f} -> {last.ce:.4f} in {len(history)} steps, "
            f"{metrics.tokens_per_second(history):,.0f} tokens/s"
        )
