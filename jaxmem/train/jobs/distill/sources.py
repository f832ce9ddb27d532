"""Sources of a student's micro-batches: a text, a file, or its own completions."""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmem import losses
from jaxmem.data import teacher_files, teacher_streams
from jaxmem.data.documents import Batch
from jaxmem.data.rewards import RewardError, TrainerState
from jaxmem.head.verbs.column_targets import Columns, Drawn
from jaxmem.models.sampling import Samples
from jaxmem.train.jobs import rollout_metrics
from jaxmem.train.jobs.config import DistillJobConfig
from jaxmem.train.jobs.distill.program import DistillProgram
from jaxmem.train.jobs.distill_objective import of_file
from jaxmem.train.jobs.reading import Documents, TeacherRows
from jaxmem.train.jobs.rollout.nested_rows import take
from jaxmem.train.jobs.rollout.packed import Completions
from jaxmem.train.jobs.rollout.prompts import PromptIds, Task
from jaxmem.train.jobs.rollout.samples import SlotUse
from jaxmem.train.jobs.rollout.shown_samples import table
from jaxmem.train.jobs.rollout.turns import SamplePrograms, Turns


class DistillBatch(NamedTuple):
    """A micro-batch, with the teacher's columns of a file where one is read."""

    batch: Batch
    columns: Columns | Drawn | None = None
    advantages: Any = None  # [B, T], where rewards are learned from


class Taken(NamedTuple):
    """The micro-batches of a step, or of an evaluation."""

    examples: Iterable[DistillBatch]
    observed: Mapping[str, Any] = MappingProxyType({})  # fields of `DistillMetrics`


class Source:
    """Micro-batches to train on, and held-out ones."""

    _batches: Any  # iterator without end, with a position
    _count: int  # micro-batches of a step
    _evaluation: Callable[[], Iterable[Any]] | None  # None if nothing is held out

    def take(self, number: int, params: Any) -> Taken:
        """The micro-batches of the step of that number, for these weights."""
        return Taken(
            [self._make_example(next(self._batches)) for _ in range(self._count)]
        )

    def holds_out(self) -> bool:
        """True if `held_out` returns micro-batches."""
        return self._evaluation is not None

    def held_out(self, params: Any) -> Taken | None:
        """Micro-batches that are never trained on; None if nothing is held out."""
        if self._evaluation is None:
            return None
        return Taken(map(self._make_example, self._evaluation()))

    def _make_example(self, batch: Any) -> DistillBatch:
        return DistillBatch(batch)

    def samples(self, count: int) -> list[dict[str, Any]]:
        """Completions, as `Job.samples` returns them."""
        del count
        return []

    def get_state(self) -> dict[str, Any]:
        """Return the position, as JSON-able values."""
        return self._batches.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from the position that `get_state` returned."""
        self._batches.set_state(state)


class TextRows(Source):
    """The data's rows."""

    def __init__(self, program: DistillProgram, documents: Documents):
        config = program.config
        rows = program.layout.own_rows(config.data.batch_size)
        self._batches, self._count = documents.batches(rows), config.run.accumulate
        self._evaluation = documents.held_out()


class File(Source):
    """The rows of a file that `jaxmem score` wrote, with the teacher's columns."""

    def __init__(self, reads: TeacherRows, config: DistillJobConfig):
        file = reads.file
        self._file, self._config, self._distill = file, config.data, config.distill
        self._rows = config.model.vocab_size if config.data.streaming else None
        self._batches = teacher_streams.examples(file, config.data)
        self._count = config.run.accumulate
        self._evaluation = reads.held_out()

    def _make_example(self, batch: teacher_files.TeacherBatch) -> DistillBatch:
        """A micro-batch; ids of a stream are checked now, all others at the start."""
        if self._rows is not None:
            part = self._file._replace(ids=batch.ids)
            teacher_files.check_ids(part, self._rows, self._config.source)
        rows, *columns = batch
        return DistillBatch(rows, of_file(self._distill, *columns))


class _ShownRollout(NamedTuple):
    """A rollout whose samples the report shows."""

    prompts: PromptIds
    completions: Completions
    rewards: np.ndarray | None
    logprobs: np.ndarray


_advantages = jax.jit(
    lambda rewards, where: losses.grpo_advantages(rewards, where=where)
)


class StudentSamples(Source):
    """Completions of prompts, sampled from the student's weights of a step."""

    def __init__(self, program: DistillProgram, frozen: Any, task: Task):
        self._program, self._config, self._frozen = program, program.config, frozen
        self._task, self._next = task, 0
        self._shown: _ShownRollout | None = None
        self._sample = SamplePrograms.of(program)

    def take(self, number: int, params: Any) -> Taken:
        distill, steps = self._config.distill, self._config.run.steps
        self._task.trainer_state = TrainerState(number - 1, steps)
        prompts = self._task.ask(self._next, distill.prompts)
        prompts = prompts.repeated(distill.completions)
        completions, samples, decoded = self._complete_prompts(params, prompts, number)
        length = float(completions.lengths.mean())
        observed: dict[str, Any] = {"response_length": length, "busy": decoded.busy}
        rewards = advantages = None
        if distill.reward_weight is not None:
            graded = self._task.grade(prompts, completions)
            observed |= rollout_metrics.of_grades(graded, distill.completions)
            rewards = graded.rewards
            if distill.reward_weight:
                advantages = self._compare_rewards(number, rewards)
        self._next += distill.prompts  # after the rewards, which may raise
        logprobs = np.asarray(samples.logprobs)
        self._shown = _ShownRollout(prompts, completions, rewards, logprobs)
        return Taken(self._batches(completions, advantages), observed)

    def _compare_rewards(self, number: int, rewards: np.ndarray) -> np.ndarray:
        """Advantages [N]; 0 for completions without a reward, NaN."""
        where = ~np.isnan(rewards)
        if not where.any():
            raise RewardError(
                f"step {number}: none of {len(where)} completions has a reward; "
                "correct task.reward, or set distill.reward_weight=0.0"
            )
        groups = (x.reshape(-1, self._config.distill.completions)
                  for x in (rewards, where))  # fmt: skip
        return np.asarray(_advantages(*groups)).ravel()

    def samples(self, count: int) -> list[dict[str, Any]]:
        return [] if self._shown is None else table(self._task, *self._shown, count)

    def held_out(self, params: Any) -> Taken | None:
        """See `Source`; the draws are the same each time."""
        prompts = self._task.held_out()
        if prompts is None:
            return None
        prompts = prompts.first(self._config.eval.prompts)
        examples, graded = [], []
        for part, live in prompts.parts(self._config.distill.samples):
            completions, *_ = self._complete_prompts(
                params, part, 0
            )  # no step is number 0
            kept = take(completions, np.arange(live))
            examples += self._batches(kept)
            if self._config.distill.reward_weight is not None:
                graded.append(self._task.grade(part.first(live), kept))
        return Taken(examples, rollout_metrics.of_held_out(graded) if graded else {})

    def _complete_prompts(
        self, params: Any, prompts: PromptIds, number: int
    ) -> tuple[Completions, Samples, SlotUse]:
        weights = params, self._frozen
        sample = Turns(self._program, self._sample, weights, (number, 0))
        samples = sample(prompts.ids, prompts.lengths, 0)
        return Completions.of_samples(prompts, samples), samples, sample.decoded

    def _batches(
        self, completions: Completions, advantages: np.ndarray | None = None
    ) -> list[DistillBatch]:
        quadratic = 1 / (6 * self._config.model.hidden)
        packed = completions.pack(
            self._config.distill.max_tokens, self._config.row_lengths, quadratic
        )
        examples = [DistillBatch(batch) for batch in completions.batches(packed)]
        if advantages is None:
            return examples
        return [
            example._replace(advantages=advantages[rows.sequence])
            for example, rows in zip(examples, packed.micro_batches, strict=True)
        ]

    def get_state(self) -> dict[str, Any]:
        return self._task.state(self._next)

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._next = self._task.position(state)
