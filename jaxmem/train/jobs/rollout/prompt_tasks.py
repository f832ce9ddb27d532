"""Tasks of a rollout: sums; or a file's prompts with rewards, or conversations."""

import abc
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import tokenizers

from jaxmem import checkpoints
from jaxmem.base import processes
from jaxmem.data import (
    completion_ends,
    mixing,
    rewards,
    source_files,
    tasks,
    vocabulary,
)
from jaxmem.data.completion_ends import Ends
from jaxmem.data.environments import Environments
from jaxmem.data.prompts import PromptRecord, Reader, fingerprint, load_prompts
from jaxmem.data.record_reader import RecordReader
from jaxmem.data.records import DataError
from jaxmem.data.tasks import TaskConfig
from jaxmem.head.maths.random_streams import Stream
from jaxmem.models.sampling import SamplingConfig
from jaxmem.train.jobs import passes
from jaxmem.train.jobs.reading import DataSize, Reading, TokenRecord
from jaxmem.train.jobs.rollout import rollout_functions
from jaxmem.train.jobs.rollout.completing import Complete
from jaxmem.train.jobs.rollout.conversations import (
    ConversationLimits,
    Partners,
    Played,
    Replies,
    Sample,
    converse,
    play,
)
from jaxmem.train.jobs.rollout.packed import Completions
from jaxmem.train.jobs.rollout.prompts import FilePrompts, Graded, PromptIds, Task
from jaxmem.train.jobs.rollout.recorded import RecordedRollouts
from jaxmem.train.jobs.rollout.samples import Sampled, SlotUse, sampled_of
from jaxmem.train.jobs.rollout.transcripts import (
    Transcript,
    TranscriptLimits,
    TranscriptNeeds,
)
from jaxmem.train.settings import RunConfig


class ArithmeticTask(Task):
    """Problems that are generated, spelled in the model's ids."""

    def __init__(self, config: TaskConfig, checkpoint: str | None):
        self._config, self._spelling = config, vocabulary.spelling(checkpoint)

    def ask(self, start: int, count: int) -> PromptIds:
        problems = tasks.problems(self._config, start, count)
        return PromptIds(
            self._spelling.write(problems.prompts), problems.prompt_lengths, problems
        )

    def grade(self, prompts: PromptIds, completions: Completions) -> Graded:
        words = self._spelling.read(completions.sampled)
        scores = tasks.score(self._config, prompts.items, words, completions.lengths)
        return Graded(scores.rewards, scores.exact)

    def question(self, prompts: PromptIds, i: int) -> str:
        return tasks.text(prompts.items.prompts[i])

    def text(self, ids: np.ndarray) -> str:
        return tasks.text(self._spelling.read(ids))

    def described(self, prompts: PromptIds, i: int) -> tuple[str, str]:
        answer = tasks.text(prompts.items.answers[i])
        return f"problem {i}", f"answer {answer}"

    def statistics(self) -> str:
        return "every rollout draws new problems, from task.seed"


class OwnPrompts(FilePrompts):
    """Prompts of a file, and reward functions."""

    def __init__(
        self,
        config: TaskConfig,
        sampling: SamplingConfig,
        tokenizer: tokenizers.Tokenizer,
        reader: RecordReader,
    ):
        super().__init__(config, tokenizer)
        self._max_new_tokens = sampling.max_new_tokens
        self._score = rewards.Scorer(
            config.rewards,
            config.reward_weights,
            config.timeout,
            config.reward_errors,
            config.unrewarded,
        )
        self._set_prompts(load_prompts(config, (tokenizer, reader)))

    def _set_prompts(
        self, loaded: tuple[list[PromptRecord], list[PromptRecord]]
    ) -> None:
        self._train, self._held_out = loaded
        self.size, config = len(self._train), self._config
        self.sources = [prompt.source for prompt in self._train]
        self._order = mixing.order(
            self.sources, config.weights, config.seed, Stream.PROMPTS, config.shuffle
        )

    def check(self) -> None:
        """See `Task`: columns that functions require, and names that are not free."""
        first = self._train[0]
        if taken := [name for name in rewards.ARGUMENTS if name in first.columns]:
            raise DataError(
                f"{first.where}: the column {taken[0]!r} has the name of an argument "
                "that reward functions get from the run; rename the column, or name "
                "it in task.ignored"
            )
        source = self._config.source
        entries = [source] if isinstance(source, str) else source
        columns: dict[str, list[Any]] = {}
        for prompt in (*self._train, *self._held_out):
            columns.setdefault(entries[prompt.source], []).append(prompt.columns)
        self._score.check(columns)

    def lines(self) -> list[str]:
        return self._score.lines()

    def ask(self, start: int, count: int) -> PromptIds:
        """See `Task`; an epoch has an order of its own, unless task.shuffle=False."""
        numbers = (self._order[n] for n in range(start, start + count))
        return self._pad_prompts([self._train[i] for i in numbers])

    def held_out(self) -> PromptIds | None:
        return self._pad_prompts(self._held_out) if self._held_out else None

    def grade(self, prompts: PromptIds, completions: Completions) -> Graded:
        arguments = self._reward_arguments(prompts.items, completions)

        def scored() -> tuple[list[float], dict[str, list[float]], list[bool] | None]:
            scores = self._score(arguments)
            parts = {name: values.tolist() for name, values in scores.parts.items()}
            flags = scores.unparsed
            return (
                scores.total.tolist(),
                parts,
                None if flags is None else flags.tolist(),
            )

        # One process calls the functions, which may be random, and all get the rewards.
        total, lists, flags = processes.by_first(scored, rewards.RewardError)
        parts = {name: np.array(values, np.float32) for name, values in lists.items()}
        table = np.stack(list(parts.values()))
        first = table[(~np.isnan(table)).argmax(axis=0), np.arange(table.shape[1])]
        values = np.array(total, np.float32)
        right = np.where(np.isnan(values), values, first >= 1).astype(np.float32)
        unparsed = None if flags is None else np.array(flags, bool)
        return Graded(values, right, parts if len(parts) > 1 else None, unparsed)

    def _reward_arguments(
        self, items: list[PromptRecord], completions: Completions
    ) -> rewards.RewardArguments:
        ids = [
            [int(i) for i in row[:length]]
            for row, length in zip(
                completions.sampled, completions.lengths, strict=True
            )
        ]
        texts = self._tokenizer.decode_batch(ids, skip_special_tokens=True)
        columns = {name: [item.columns[name] for item in items]
                   for name in items[0].columns}  # fmt: skip
        columns["completion_ids"] = ids
        columns["max_new_tokens"] = [self._max_new_tokens] * len(items)
        return rewards.RewardArguments(
            [item.where for item in items],
            [item.prompt for item in items],
            [
                rewards.in_form_of(item.prompt, text)
                for item, text in zip(items, texts, strict=True)
            ],
            columns,
            self.trainer_state,
        )

    def fingerprint(self) -> str | None:
        return fingerprint(self._train)

    def described(self, prompts: PromptIds, i: int) -> tuple[str, str]:
        item = prompts.items[i]
        return item.where, f"columns {', '.join(item.columns)}"

    def statistics(self) -> str:
        lengths = [len(item.ids) for item in self._train]
        return (
            f"{self.size:,} prompts to train on, {len(self._held_out):,} held out; "
            f"{min(lengths):,} to {max(lengths):,} tokens, of at most "
            f"task.max_prompt_tokens={self._config.max_prompt_tokens}"
        )


class Dialogues(OwnPrompts):
    """Records of a file, whose completions have turns and come with their rewards."""

    def __init__(
        self,
        config: TaskConfig,
        limits: TranscriptLimits,
        read: Reader,
        completion: int,
    ):
        FilePrompts.__init__(self, config, read[0])
        slots, turns = limits.completion_tokens, limits.turns
        width = config.prompt_length + slots - completion
        self._limits = limits
        self._bounds = ConversationLimits(turns, completion, slots, width)

    def lines(self) -> list[str]:
        return []

    @abc.abstractmethod
    def sampled(self, prompts: PromptIds, sample: Sample) -> Sampled:
        """Hold conversations about all prompts, whose turns `sample` completes."""

    @abc.abstractmethod
    def held_out_grades(self, prompts: PromptIds, sample: Sample, count: int) -> Graded:
        """Hold conversations about the first `count` prompts; their rewards."""

    @abc.abstractmethod
    def transcript(self, item: PromptRecord, complete: Complete) -> Transcript:
        """Hold one conversation, in any thread and in this process alone.

        `complete` is called turn by turn; its errors are not changed.

        Raises:
            RewardError: the other side of the conversation fails.
        """


class Conversations(Dialogues):
    """Records of a file, and environments that answer completions and reward them."""

    def __init__(
        self,
        config: TaskConfig,
        limits: TranscriptLimits,
        read: Reader,
        completion: int,
    ):
        assert config.environment is not None
        super().__init__(config, limits, read, completion)
        self._environments = Environments(
            config.environment,
            config.timeout,
            config.environment_errors,
            config.workers,
        )
        tools, eos_ids = self._environments.tools, limits.ends.eos_ids
        self._replies = Replies(config, read[0], read[1].template, eos_ids, tools)
        self._set_prompts(load_prompts(config, read, self._environments))

    def check(self) -> None:
        """See `Task`: environments take any columns."""

    def play(
        self, prompts: PromptIds, sample: Sample, count: int | None = None
    ) -> tuple[Played, Graded]:
        """Complete the first `count` prompts over several turns; None: all of them.

        A sum of rewards of 1 or more is right.
        """
        items = prompts.items[:count]
        partners = Partners(self._environments, self._replies, items)
        played = play(partners, prompts[:2], sample, self._bounds)
        values = played.by_turn.returns[:, 0]
        right = np.where(np.isnan(values), values, values >= 1).astype(np.float32)
        return played, Graded(values, right)

    def sampled(self, prompts: PromptIds, sample: Sample) -> Sampled:
        played, graded = self.play(prompts, sample)
        mask = np.asarray(played.samples.mask)
        compares_turns = self._limits.needs.turn_rewards
        return Sampled(
            prompts=prompts,
            completions=Completions.of_samples(prompts, played.samples, mask),
            samples=played.samples._replace(routes=None),
            graded=graded,
            truncated=played.truncated,
            turns=played.turns,
            decoded=SlotUse(0, 0),
            by_turn=played.by_turn if compares_turns else None,
            conversation=played.by_turn,
        )

    def held_out_grades(self, prompts: PromptIds, sample: Sample, count: int) -> Graded:
        return self.play(prompts, sample, count)[1]

    def transcript(self, item: PromptRecord, complete: Complete) -> Transcript:
        partners = Partners(self._environments, self._replies, [item])
        return converse(partners, item, complete, self._bounds)


class FunctionRollouts(Dialogues):
    """Records of a file, and a user's function that holds conversations about them."""

    def __init__(
        self,
        config: TaskConfig,
        limits: TranscriptLimits,
        read: Reader,
        completion: int,
    ):
        assert config.rollout is not None
        super().__init__(config, limits, read, completion)
        replies = Replies(config, read[0], read[1].template, limits.ends.eos_ids)
        settings = rollout_functions.FunctionSettings(
            read[0], replies, self._bounds, limits, config.timeout
        )
        self._function = rollout_functions.RolloutFunction(config.rollout, settings)
        self._set_prompts(load_prompts(config, read))

    def check(self) -> None:
        """See `Task`: columns have other names than what a record gets from the run."""
        first = self._train[0]
        names = ("prompt", "prompt_ids")
        if taken := [name for name in names if name in first.columns]:
            raise DataError(
                f"{first.where}: the column {taken[0]!r} has the name of a field that "
                "task.rollout gets from the run; rename the column, or name it in "
                "task.ignored"
            )

    def sampled(self, prompts: PromptIds, sample: Sample) -> Sampled:
        limits = self._limits
        transcripts = rollout_functions.converse_together(
            self._function, prompts.items, sample, len(prompts.lengths), limits
        )
        return sampled_of(transcripts, prompts, limits)

    def held_out_grades(self, prompts: PromptIds, sample: Sample, count: int) -> Graded:
        # Samplers of evaluations record no routes.
        limits = dataclasses.replace(self._limits, needs=TranscriptNeeds())
        transcripts = rollout_functions.converse_together(
            self._function, prompts.items[:count], sample, len(prompts.lengths), limits
        )
        return sampled_of(transcripts, prompts.first(count), limits).graded

    def transcript(self, item: PromptRecord, complete: Complete) -> Transcript:
        return rollout_functions.converse(self._function, item, complete)


# Fields that older saved settings lack.
_LATER = (
    "environment", "max_reply_tokens", "environment_errors", "recorded", "rollout",
)  # fmt: skip


class Groups(NamedTuple):
    """Completions of a prompt, and what their transcripts need."""

    size: int = 1
    needs: TranscriptNeeds = TranscriptNeeds()


_ONE = Groups()


class TaskPrompts(Reading):
    """Prompts of a task: sums, or a file's, which a checkpoint's tokenizer reads."""

    def __init__(
        self,
        task: TaskConfig,
        sampling: SamplingConfig,
        checkpoint: str | None,
        prompts: int,
        groups: Groups = _ONE,
    ):
        self._config, self._sampling = task, sampling
        self._checkpoint, self._prompts = checkpoint, prompts
        self._groups = groups
        length = task.conversation_length(sampling.max_new_tokens)
        self.longest = task.prompt_length + length
        self.chat_template = task.chat_template
        self._reader: RecordReader | None = None  # of prompts, once they are read

    @functools.cached_property
    def task(self) -> Task:
        """The task that `TaskConfig` describes, with its files read."""
        task, checkpoint = self._config, self._checkpoint
        if task.is_arithmetic:
            return ArithmeticTask(task, checkpoint)
        assert checkpoint is not None, "the job's config says so"
        tokenizer = vocabulary.of_checkpoint(checkpoint)
        if task.recorded:
            size = self._groups.size
            return RecordedRollouts(task, tokenizer, size, self.transcript_limits)
        reader = RecordReader.for_job(
            task, checkpoint, tokenizer, self.today, section="task"
        )
        self._reader = reader
        if not task.is_dialogue:
            return OwnPrompts(task, self._sampling, tokenizer, reader)
        kind = Conversations if task.rollout is None else FunctionRollouts
        completion = self._sampling.max_new_tokens
        return kind(task, self.transcript_limits, (tokenizer, reader), completion)

    @functools.cached_property
    def transcript_limits(self) -> TranscriptLimits:
        """Ids and sizes that transcripts of this task may have."""
        ends = ends_of(self._config, self._checkpoint)
        needs = self._groups.needs
        return TranscriptLimits.of(self._config, self._sampling, ends, needs)

    def fixed(self) -> dict[str, dict[str, Any]]:
        """See `Reading`; `timeout` may end a run, and changes no value of its steps."""
        fields = self._config.fixed()
        del fields["timeout"]
        for name in _LATER:  # runs that are older than these fields can be resumed
            if fields[name] == getattr(TaskConfig, name):
                del fields[name]
        if self._config.turns == self._config.default_turns:
            del fields["max_turns"]
        if self._config.is_arithmetic:  # as in runs that are older than prompt files
            names = "digits", "answer", "reward", "seed"
            fields = {name: fields[name] for name in names}
        return {"task": fields}

    def sources(self) -> list[passes.SourceSize] | None:
        if self._config.weights is None:
            return None
        return passes.of_items(self._config, self.task.sources)

    @property
    def size(self) -> DataSize | None:
        if self.task.size is None:
            return None
        return DataSize(self.task.size, "prompts", per_step=self._prompts)

    def seen(self, run: RunConfig) -> str | None:
        return None if self.task.size is None else super().seen(run)

    def epochs(self, count: int) -> list[float]:
        if (size := self.task.size) is None:
            raise ValueError(
                "run.epochs needs a task.source of prompts, because sums never end"
            )
        return [size / self._prompts] * count

    def text(self, ids: np.ndarray) -> str:
        return self.task.text(ids)

    def lines(self) -> list[str]:
        read = [] if self._reader is None else self._reader.lines()
        if isinstance(self.task, RecordedRollouts):
            read = self.task.notes.lines()
        if not self._config.is_arithmetic:
            read = [*source_files.lines(self._config, "task"), *read]
        return [*read, *mixing.lines(self._config, "task"), *self.task.lines()]

    def end_of_turn(self) -> str | None:
        return None if self._reader is None else self._reader.end_of_turn()

    def records(self, count: int) -> Iterator[TokenRecord | str]:
        task = self.task
        prompts = task.ask(0, count if task.size is None else min(count, task.size))
        for i, (ids, length) in enumerate(
            zip(prompts.ids, prompts.lengths, strict=True)
        ):
            name, about = task.described(prompts, i)
            yield TokenRecord(name, ids[:length], about=about)
        yield task.statistics()
        yield from self.lines()


def ends_of(task: TaskConfig, checkpoint: str | None) -> Ends:
    """The ends of a task's completions, and the size of the model's vocabulary.

    A checkpoint may have more rows than its tokenizer has tokens; a model can sample
    them all.
    """
    if not task.is_arithmetic:
        assert checkpoint is not None, "the job's config says so"
        ends = completion_ends.of_checkpoint(checkpoint, task.stop, task.chat_template)
    else:
        spelled = vocabulary.spelling(checkpoint)
        eos, pad = (int(spelled.ids[i]) for i in (tasks.EOS_ID, tasks.PAD_ID))
        ends = Ends(spelled.size, (eos,), pad)
    if checkpoint is None:
        return ends
    rows = checkpoints.read_config(checkpoint).model.vocab_size or 0
    return ends._replace(size=max(ends.size, rows))
