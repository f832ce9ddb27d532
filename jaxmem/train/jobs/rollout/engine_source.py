"""Completions of an inference engine, sampled ahead within a bound on their age.

A step learns from its own groups, in order. With v updates done, the groups of step n
are begun only if

    n - 1 - v <= rollouts.max_staleness

so that at most that many updates lie between a token and the step that learns from it.
No group is dropped because it is slow: its step waits for it. The first process alone
talks to the engine; all processes get its completions.
"""

import dataclasses
import functools
import itertools
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmem.base import processes
from jaxmem.data.prompts import PromptRecord
from jaxmem.data.rewards import RolloutError
from jaxmem.train.jobs.config import GrpoJobConfig
from jaxmem.train.jobs.rollout.completing import Complete, TurnCompletion
from jaxmem.train.jobs.rollout.engines.group_sampler import Attempt, GroupSampler, Work
from jaxmem.train.jobs.rollout.engines.pool import EnginePool
from jaxmem.train.jobs.rollout.engines.protocol import (
    EngineAnswer,
    EngineError,
    SamplingRequest,
)
from jaxmem.train.jobs.rollout.engines.weight_folder import WeightFolder
from jaxmem.train.jobs.rollout.prompt_tasks import Dialogues
from jaxmem.train.jobs.rollout.prompts import PromptIds, Task
from jaxmem.train.jobs.rollout.samples import Sampled, sampled_of
from jaxmem.train.jobs.rollout.sources import AHEAD, Measure, RolloutSource, Weights
from jaxmem.train.jobs.rollout.transcripts import Transcript, TranscriptLimits
from jaxmem.train.jobs.rollout_metrics import Rollout

_LARGEST_RATIO = 0.1  # mean |ln ratio| of an engine with the same model, in nats
_SECONDS_TO_END = 5.0  # for units of work whose requests have been ended
_SETTINGS = "ahead_settings"  # key in the saved state, beside AHEAD
_FIRST_TOKENS, _MOST_ROWS = 8, 64  # that are compared before the first update


class EngineParts(NamedTuple):
    """The parts of an `EngineSource` beside configuration and task."""

    limits: TranscriptLimits
    open_folder: Callable[[], WeightFolder]  # in all processes, at the first step
    size: int  # bytes of the weights in a directory
    # writes weights into a directory that does not exist; all processes call it
    write: Callable[[Path, Weights], None]
    # makes the pool, in the first process
    connect: Callable[[], EnginePool]
    is_stopping: Callable[[], bool]  # returns True once the run is to end


class EngineSource(RolloutSource):
    """Completions that an engine samples with the weights of the run.

    Args:
        config: of the run.
        task: of the run.
        parts: the engine, and the way of weights to it.
    """

    def __init__(self, config: GrpoJobConfig, task: Task, parts: EngineParts):
        super().__init__(config, task)
        self._parts = parts
        self._starts: dict[Attempt, int] = {}  # number of the first prompt of each
        self._restored: dict[Attempt, list[list[Transcript] | None]] = {}
        self._version: int | None = None  # of the weights that the engine has
        self._folder: WeightFolder | None = None
        self._pool: EnginePool | None = None  # in the first process
        self._groups: GroupSampler | None = None  # likewise
        self._begun = 0  # number of the last step whose groups have been begun
        self._failure: Exception | None = None  # of the preparation of that step
        self._pushed: dict[str, Any] = {}  # seconds of that step's new weights
        self._observed: dict[str, Any] = {}
        self._is_verified = False

    def begin(self) -> None:
        """See `RolloutSource`; connect to the engine, which must be ready in time."""
        processes.by_first(self._connect, RolloutError)

    def _connect(self) -> None:
        self._pool = self._parts.connect()
        self._groups = GroupSampler(self.config.rollouts.concurrency)

    def sampled(self, step: int, attempt: int, weights: Weights) -> Sampled:
        if attempt == 0:
            self._begin_step(step, weights)
            self._observed = self._pushed
        key = Attempt(step, attempt)
        self._submit(key, version=step - 1)
        started = time.perf_counter()
        transcripts = self._shared(key)
        self._observe(transcripts, step, time.perf_counter() - started)
        limits = self._parts.limits
        return self._graded(sampled_of(transcripts, self._prompts(key), limits))

    def updated(self, step: int, weights: Weights) -> None:
        """See `RolloutSource`; the engine samples while the step is evaluated, saved.

        A run that is to end does not wait for the engine to load weights.
        """
        is_last = step == self.config.run.steps
        if is_last or processes.by_first(self._parts.is_stopping):
            return
        try:
            self._begin_step(step + 1, weights)
        except Exception as error:  # raised by the next step
            self._failure = error

    def _begin_step(self, step: int, weights: Weights) -> None:
        """Give the engine the weights before a step, and begin the groups it may."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        if step == self._begun:
            return
        self._pushed = self._push(step - 1, weights)
        last = min(step + self.config.rollouts.max_staleness, self.config.run.steps)
        for ahead in range(step, last + 1):
            self._submit(Attempt(ahead, 0), version=step - 1)
        self._begun = step

    def _push(self, version: int, weights: Weights) -> dict[str, Any]:
        """Give the engine the weights of a version, if it has others; the seconds."""
        if version == self._version:
            return {"push_seconds": 0.0}
        started = time.perf_counter()
        if self._folder is None:
            self._folder = self._parts.open_folder()
        directory = self._folder.directory(version)
        processes.by_first(lambda: self._make_room(version), RolloutError)
        writing = time.perf_counter()
        self._parts.write(directory, weights)
        phases = {"write": time.perf_counter() - writing}
        phases |= processes.by_first(
            lambda: self._load(directory, version), RolloutError
        )
        self._version = version
        seconds = time.perf_counter() - started
        return {"push_seconds": seconds, "push_seconds_by_phase": phases}

    def _make_room(self, version: int) -> None:
        """Make room for a version of the weights."""
        assert self._folder is not None
        # An engine may read the adapter of a request again while it samples.
        older = self.config.rollouts.max_staleness if self._has_adapter else 1
        self._folder.keep(version, self._parts.size, max(older, 1))

    def _load(self, directory: Path, version: int) -> dict[str, float]:
        assert self._pool is not None
        return {**self._pool.load_weights(directory, version, self._has_adapter)}

    @property
    def _has_adapter(self) -> bool:
        return bool(self.config.model.lora_rank)

    def _submit(self, attempt: Attempt, version: int) -> None:
        """Begin the groups of an attempt, unless they are begun already.

        Groups of an earlier process are taken over if they are not too old.
        """
        if attempt not in self._starts:
            self._starts[attempt] = self.next
            self.next += self.config.grpo.prompts
        if self._groups is None or attempt in self._groups:
            return
        oldest = attempt.step - 1 - self.config.rollouts.max_staleness
        known = [
            group if group and _version_of(group) >= oldest else None
            for group in self._restored.pop(attempt, [])
        ]
        works = self._works(self._prompts(attempt), self._starts[attempt], version)
        self._groups.submit(attempt, works, known)

    def _prompts(self, attempt: Attempt) -> PromptIds:
        grpo = self.config.grpo
        asked = self.task.ask(self._starts[attempt], grpo.prompts)
        return asked.repeated(grpo.group_size)

    def _works(self, prompts: PromptIds, start: int, version: int) -> list[Work]:
        """A unit of work for each group of the prompts, of which `start` is the first.

        Args:
            prompts: each `grpo.group_size` times.
            start: number of the first prompt in the run.
            version: of the weights, for engines that do not tell it.
        """
        group_size, works = self.config.grpo.group_size, []
        for i in range(0, len(prompts.lengths), group_size):
            request = SamplingRequest(
                prompt_ids=prompts.ids[i, : prompts.lengths[i]].tolist(),
                count=group_size,
                max_tokens=self.config.sampling.max_new_tokens,
                seed=seed_of(self.config.run.seed, start + i // group_size),
            )
            where, _ = self.task.described(prompts, i)
            works.append(functools.partial(self._sample, request, version, where))
        return works

    def _sample(
        self, request: SamplingRequest, version: int, where: str
    ) -> list[Transcript]:
        return [
            Transcript(
                prompt_ids=request.prompt_ids,
                completion_ids=answer.ids,
                logprobs=answer.logprobs,
                supports=answer.supports,
                routes=answer.routes,
                versions=answer.versions,
                where=where,
            )
            for answer in self._ask(request, version)
        ]

    def _ask(self, request: SamplingRequest, version: int) -> list[EngineAnswer]:
        """Answers whose versions are known."""
        assert self._pool is not None
        return [
            answer._replace(versions=answer.versions or [(version, len(answer.ids))])
            for answer in self._pool.generate(request)
        ]

    def _graded(self, sampled: Sampled) -> Sampled:
        """Completions with their rewards."""
        graded = self.task.grade(sampled.prompts, sampled.completions)
        return sampled._replace(graded=graded)

    def _shared(self, attempt: Attempt) -> list[Transcript]:
        """The completions of an attempt, in all processes."""
        groups = self._groups
        if jax.process_count() == 1:
            assert groups is not None
            return self._checked(groups.result(attempt, self._parts.is_stopping))

        def result() -> list[dict[str, Any]]:
            assert groups is not None
            return [
                x.to_json()
                for x in self._checked(groups.result(attempt, self._parts.is_stopping))
            ]

        shared = processes.by_first(result, RolloutError)
        return [Transcript.of_json(fields) for fields in shared]

    def _checked(self, transcripts: list[Transcript]) -> list[Transcript]:
        for transcript in transcripts:
            self._parts.limits.check(transcript)
        return transcripts

    def _observe(
        self, transcripts: list[Transcript], step: int, seconds: float
    ) -> None:
        """Add the numbers of an attempt to those of its step."""
        observed = self._observed
        observed["waiting_seconds"] = observed.get("waiting_seconds", 0.0) + seconds
        ages = np.concatenate([_ages(x, step - 1) for x in transcripts])
        observed["staleness_mean"] = float(ages.mean())
        observed["staleness_max"] = int(ages.max())
        spans = [len(x.versions or ()) for x in transcripts]
        observed["versions_per_completion"] = float(np.mean(spans))
        if self._groups is not None:
            traffic = self._groups.traffic()
            observed["engine_idle_seconds"] = traffic.idle_seconds
            observed["queued"] = self._groups.queued - len(transcripts)
            if traffic.busy_seconds:
                speed = traffic.tokens / traffic.busy_seconds
                observed["engine_tokens_per_second"] = speed

    def verify(self, rollout: Rollout, measure: Measure) -> str | None:
        """See `RolloutSource`; only the first rollout of a process is compared."""
        if self._is_verified:
            return None
        self._is_verified = True
        rows = np.arange(min(len(rollout.advantages), _MOST_ROWS))
        sampling, urls = self.config.sampling, ", ".join(self._urls)
        measured = measure(rows, sampling.temperature).drawn_from
        mean, largest = _first_differences(rollout, rows, measured)
        compared = (
            f"in the first {_FIRST_TOKENS} tokens of {len(rows)} completions, its "
            f"log-probabilities differ from the trainer's by {mean:.2g} nats on "
            f"average, and at most by {largest:.2g}"
        )
        # Tokens of older weights, which a resumed run may start with, prove nothing.
        if self._observed["staleness_max"]:
            return f"rollouts.urls: {urls}: {compared}; some are of older weights"
        if mean <= _LARGEST_RATIO:
            return f"rollouts.urls: {urls}: {compared}"
        at_one = measure(rows, 1.0)
        raw = at_one.drawn_from if at_one.whole is None else at_one.whole
        untempered, _ = _first_differences(rollout, rows, raw)
        remedy = (
            f"serve model.checkpoint={self.config.model.checkpoint!r} with its own "
            "tokenizer, in model.dtype, and start the server again if another run has "
            "given it weights"
        )
        if untempered <= _LARGEST_RATIO:
            remedy = (
                f"they are those at temperature 1 without truncation ({untempered:.2g} "
                "nats): start vLLM with --logprobs-mode processed_logprobs"
            )
        raise EngineError(
            f"rollouts.urls: {urls}: {compared}; at most {_LARGEST_RATIO} is possible "
            f"for the same weights. Nothing was trained; {remedy}"
        )

    @property
    def _urls(self) -> tuple[str, ...]:
        return self.config.rollouts.addresses

    def metrics(self) -> dict[str, Any]:
        return self._observed

    def finish(self, step: int, attempts: int) -> None:
        for attempt in [Attempt(step, i) for i in range(attempts)]:
            del self._starts[attempt]
            if self._groups is not None:
                self._groups.forget(attempt)

    def state(self) -> dict[str, Any]:
        """See `RolloutSource`; also the groups that no finished step has taken."""
        ahead = [
            {
                "step": attempt.step,
                "attempt": attempt.number,
                "start": start,
                "groups": self._saved_groups(attempt),
            }
            for attempt, start in sorted(self._starts.items())
        ]
        state = self.task.state(self.next)
        return state | {AHEAD: ahead, _SETTINGS: self._settings()} if ahead else state

    def _settings(self) -> dict[str, Any]:
        """The settings that saved groups are of, as JSON-able values."""
        grpo = self.config.grpo
        return {
            "prompts": grpo.prompts,
            "group_size": grpo.group_size,
            "sampling": json.loads(
                json.dumps(dataclasses.asdict(self.config.sampling))
            ),
        }

    def _saved_groups(self, attempt: Attempt) -> list[list[dict[str, Any]] | None]:
        """The finished groups of an attempt as JSON; None for those under way."""
        if self._groups is None:
            return []
        return [
            None if group is None else [x.to_json() for x in group]
            for group in self._groups.finished(attempt)
        ]

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `RolloutSource`; takes over the groups that `state` saved.

        A run that changes how groups are sampled samples them again.
        """
        super().restore(state)
        if state.get(_SETTINGS) != self._settings():
            return  # all groups are sampled again
        self.next = self.task.position(state)
        for saved in state[AHEAD]:
            attempt = Attempt(saved["step"], saved["attempt"])
            self._starts[attempt] = saved["start"]
            self._restored[attempt] = [
                None if group is None else [Transcript.of_json(x) for x in group]
                for group in saved["groups"]
            ]

    def close(self) -> None:
        if self._groups is not None:
            self._groups.close()
        if self._pool is not None:
            self._pool.close()
        if self._groups is not None:  # conversations close their environments
            self._groups.join(_SECONDS_TO_END)
        if self._folder is not None:
            self._folder.clear()


class DialogueEngineSource(EngineSource):
    """Conversations whose turns an engine samples, each at its own pace."""

    task: Dialogues

    def _works(self, prompts: PromptIds, start: int, version: int) -> list[Work]:
        """See `EngineSource`; a unit of work for each conversation."""
        group_size, works = self.config.grpo.group_size, []
        for i, item in enumerate(prompts.items):
            number, member = start + i // group_size, i % group_size
            complete = self._completion(number, member, version)
            works.append(functools.partial(self._hold, item, complete))
        return works

    def _hold(self, item: PromptRecord, complete: Complete) -> list[Transcript]:
        return [self.task.transcript(item, complete)]

    def _completion(self, number: int, member: int, version: int) -> Complete:
        """A function that samples the turns of one conversation, in their order."""
        turns = itertools.count()

        def complete(ids: list[int], max_tokens: int) -> TurnCompletion:
            seed = seed_of(self.config.run.seed, number, next(turns)) + member
            request = SamplingRequest(ids, 1, max_tokens, seed)
            (answer,) = self._ask(request, version)
            return TurnCompletion(*answer)

        return complete

    def _graded(self, sampled: Sampled) -> Sampled:
        return sampled  # its transcripts have rewards


def _first_differences(
    rollout: Rollout, rows: np.ndarray, logprobs: np.ndarray
) -> tuple[float, float]:
    """Mean and maximum |ln ratio| of the first sampled tokens of some rows."""
    mask = np.asarray(rollout.samples.mask)[rows]
    mask = mask & (np.cumsum(mask, axis=1) <= _FIRST_TOKENS)
    sampled = np.asarray(rollout.samples.logprobs)[rows]
    differences = np.abs(logprobs - sampled)[mask]
    return float(differences.mean()), float(differences.max())


def seed_of(seed: int, number: int, turn: int = 0) -> int:
    """The seed of a group of completions, by the run's seed and the prompt's number.

    It has 62 bits, because engines draw completion i with the seed plus i.
    """
    sequence = np.random.SeedSequence([seed, number, turn])
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(2))


def _version_of(group: list[Transcript]) -> int:
    """The oldest version of the weights that have sampled a group."""
    return min(version for x in group for version, _ in x.versions or [(-1, 1)])


def _ages(transcript: Transcript, current: int) -> np.ndarray:
    """Updates between each sampled token of a transcript and the current version."""
    versions, counts = zip(*(transcript.versions or ()), strict=True)
    of_tokens = np.repeat(np.array(versions), np.array(counts))
    return (current - of_tokens)[transcript.sampled]
