"""Functions of users that hold a whole conversation with a model.

    rollout(record, complete) -> {"completion_ids": ..., "logprobs": ..., "reward": ...}

A function gets a record of the data with its prompt, and calls `complete(ids)` as often
as it needs; it returns the fields of a `Transcript`. It may be async. Each call of it
is one conversation and has a thread, or a place in the run's event loop. Samplers
answer its requests at the pace of the conversation, or those of all conversations
together, in batches.
"""

import asyncio
import contextlib
import dataclasses
import inspect
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, NamedTuple

import jax
import numpy as np
import tokenizers

from jaxmem.base import guests, messages, processes, user_code
from jaxmem.data import event_loop
from jaxmem.data.environments import Episode
from jaxmem.data.prompts import PromptRecord
from jaxmem.data.records import DataError
from jaxmem.data.rewards import RewardError
from jaxmem.models.sampling import Samples
from jaxmem.train.jobs.rollout.completing import Complete, TurnCompletion, joined
from jaxmem.train.jobs.rollout.conversations import (
    ConversationLimits,
    Replies,
    Sample,
)
from jaxmem.train.jobs.rollout.transcripts import (
    FIELDS,
    Transcript,
    TranscriptLimits,
)

_SECONDS_TO_END = 5.0  # for functions whose conversations are cancelled


class Request(NamedTuple):
    """A request of a function for the completion of a turn."""

    ids: list[int]
    max_tokens: int
    completion: Future[TurnCompletion]

    def answer(self, completion: TurnCompletion) -> None:
        """Give the function its completion, unless it does not wait any more."""
        if self.completion.set_running_or_notify_cancel():
            self.completion.set_result(completion)


class FunctionSettings(NamedTuple):
    """Settings that every call of a rollout function shares."""

    tokenizer: tokenizers.Tokenizer
    replies: Replies
    conversation: ConversationLimits
    transcript: TranscriptLimits
    timeout: float | None  # seconds that a function may take between completions


class CompleterBase:
    """Completes turns of one conversation for a rollout function.

    Attributes:
        eos_ids: ids that end completions.
        max_tokens: maximum number of tokens of a completion.
    """

    def __init__(
        self,
        settings: FunctionSettings,
        item: PromptRecord,
        ask: Callable[[Request], None],
    ):
        self._settings, self._item, self._ask = settings, item, ask
        self.eos_ids = settings.transcript.ends.eos_ids
        self.max_tokens = settings.conversation.completion

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without those that a tokenizer puts around it."""
        return self._settings.tokenizer.encode(text, add_special_tokens=False).ids

    def reply(self, messages: Sequence[Any]) -> list[int]:
        """The ids that a chat template writes from a completion's end to the next one.

        Args:
            messages: replies to the completion, of tools or users.

        Raises:
            ValueError: the prompt is a string, which no template renders; or the text
                depends on the messages before it, or is too long.
        """
        prompt = self._item.prompt
        if isinstance(prompt, str):
            raise ValueError(
                "complete.reply needs a prompt of messages, and this one is a string; "
                "use complete.encode"
            )
        episode = Episode(self._item.where)
        episode.begin(prompt)
        episode.complete("")
        return self._settings.replies.ids(episode, list(messages))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens."""
        return self._settings.tokenizer.decode(_plain(ids), skip_special_tokens=True)

    def joined(self, *parts: TurnCompletion | Sequence[int]) -> dict[str, Any]:
        """The fields of a rollout, of completions and other ids in their order."""
        return joined(parts)

    def _start(
        self, ids: Sequence[int], max_tokens: int | None
    ) -> Future[TurnCompletion]:
        """Ask for a completion.

        Raises:
            ValueError: an argument has a value that no sampler can use.
        """
        limit = self.max_tokens
        count = limit if max_tokens is None else max_tokens
        if type(count) is not int or not 1 <= count <= limit:
            expected = f"an integer in [1, {limit}], of sampling.max_new_tokens"
            raise ValueError(messages.must_be("complete: max_tokens", expected, count))
        size, listed = self._settings.transcript.ends.size, _plain(ids)
        good = isinstance(listed, list) and all(
            type(i) is int and 0 <= i < size for i in listed
        )
        if not good or not listed:
            expected = f"a list of at least one id in [0, {size})"
            raise ValueError(messages.must_be("complete: ids", expected, listed))
        if len(listed) > (most := self._settings.conversation.width):
            raise ValueError(
                f"complete: ids has {len(listed)} ids; at most {most} are possible: "
                "task.max_prompt_tokens, and task.max_turns of sampling.max_new_tokens "
                "and task.max_reply_tokens before the last completion"
            )
        request = Request(listed, count, Future())
        self._ask(request)
        return request.completion


class Completer(CompleterBase):
    """Completes turns for a function that waits for them."""

    def __call__(
        self, ids: Sequence[int], max_tokens: int | None = None
    ) -> TurnCompletion:
        """Sample tokens after `ids`, all tokens of the conversation so far."""
        return self._start(ids, max_tokens).result()


class AsyncCompleter(CompleterBase):
    """Completes turns for an async function."""

    async def __call__(
        self, ids: Sequence[int], max_tokens: int | None = None
    ) -> TurnCompletion:
        """Sample tokens after `ids`, all tokens of the conversation so far."""
        return await asyncio.wrap_future(self._start(ids, max_tokens))


class _End(NamedTuple):
    """The end of a call: the value that it returned, or its error."""

    value: Any
    error: BaseException | None


class RolloutFunction:
    """A function that `task.rollout` names.

    Raises:
        UserCodeError: it cannot be imported.
    """

    def __init__(self, name: str, settings: FunctionSettings):
        self.name, self.settings = name, settings
        self.code = user_code.load(name, "task.rollout")
        kinds = self.code, type(self.code).__call__
        self.is_async = any(map(inspect.iscoroutinefunction, kinds))
        self._reward_names: tuple[str, ...] | None = None

    def failure(self, where: str, said: str) -> RewardError:
        """The error of the conversation of a record."""
        return RewardError(f"rollout {self.name} ({where}): {said}")

    def transcript(
        self,
        returned: Any,
        item: PromptRecord,
        limits: TranscriptLimits,
        version: int | None,
    ) -> Transcript:
        """The transcript that a call for a record returned.

        Args:
            returned: the value.
            item: the record.
            limits: of the transcript.
            version: of all tokens, unless the value has "versions"; None: unknown.

        Raises:
            RewardError: it is none, or no run with these limits can learn from it.
        """
        if not isinstance(returned, Mapping):
            expected = "a dict with completion_ids, logprobs and reward"
            said = f"the function returned {messages.short(returned)}, not {expected}"
            raise self.failure(item.where, said)
        try:
            transcript = Transcript(**self._fields(returned, item)).with_mask()
            limits.check(transcript)
            if transcript.versions is None and version is not None:
                spans = [(version, len(transcript.completion_ids))]
                transcript = dataclasses.replace(transcript, versions=spans)
        except DataError as error:
            said = str(error).removeprefix(f"{item.where}: ")
            raise self.failure(item.where, said) from error
        self._check_reward_names(transcript)
        return transcript

    def _fields(self, returned: Mapping[Any, Any], item: PromptRecord) -> Any:
        """The fields of a transcript that a function returned, and those it left out.

        Raises:
            DataError: a field is missing, or it is none of a transcript.
        """
        for key in returned:
            if key not in FIELDS:
                known = ", ".join(sorted(FIELDS - {"where"}))
                got = messages.short(key)
                raise DataError(f"the key {got} is not one of {known}")
        present = {k: x for k, x in returned.items() if x is not None}
        fields = {
            k: np.asarray(x) if k == "routes" else _plain(x) for k, x in present.items()
        }
        for key in ("completion_ids", "logprobs"):
            if key not in fields:
                raise DataError(f'no "{key}"')
        own = item.ids.tolist()
        if fields.setdefault("prompt_ids", own) != own:
            raise DataError(
                'prompt_ids must be those of the record, record["prompt_ids"]; other '
                "tokens before a completion belong to completion_ids, with mask 0"
            )
        if "reward" not in returned:
            if "turn_rewards" not in fields:
                raise DataError('no "reward", which is None for a rollout without one')
            fields["reward"] = _sum(fields["turn_rewards"])
        return fields | {"where": item.where}

    def _check_reward_names(self, transcript: Transcript) -> None:
        names = tuple(transcript.rewards or ())
        if self._reward_names is None:
            self._reward_names = names
        if set(names) != set(self._reward_names):
            raise self.failure(
                transcript.where,
                f"rewards has the names {list(names)}, but other rollouts of the "
                f"function have {list(self._reward_names)}; write None for a reward "
                "that a rollout does not have",
            )


class FunctionCall:
    """One call of a rollout function, a conversation about a record."""

    def __init__(self, function: RolloutFunction, item: PromptRecord):
        self._function, self._item = function, item
        self._events: queue.SimpleQueue[Request | _End] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_closed = False
        self._waiting: list[Future[TurnCompletion]] = []
        self._has_ended, self._is_late = threading.Event(), False
        self._versions: list[tuple[int, int]] = []  # of all completions
        self._end: _End | None = None
        self._running: event_loop.Awaited | None = None  # of an async function
        columns = {"prompt": item.prompt, "prompt_ids": item.ids.tolist()}
        record, settings = item.columns | columns, function.settings
        self._since = time.monotonic()
        if function.is_async:
            complete = AsyncCompleter(settings, item, self._ask)
            run = self._run_async(record, complete)
            self._running = event_loop.of_process().start(run)
        else:
            complete = Completer(settings, item, self._ask)
            arguments = record, complete
            threading.Thread(target=self._run, args=arguments, daemon=True).start()

    def _run(self, record: dict[str, Any], complete: Completer) -> None:
        try:
            self._events.put(_End(self._function.code(record, complete), None))
        except BaseException as error:  # it must not end a thread without an event
            self._events.put(_End(None, error))
        finally:
            self._has_ended.set()

    async def _run_async(
        self, record: dict[str, Any], complete: AsyncCompleter
    ) -> None:
        try:
            self._events.put(_End(await self._function.code(record, complete), None))
        except BaseException as error:
            self._events.put(_End(None, error))
        finally:
            self._has_ended.set()

    def _ask(self, request: Request) -> None:
        with self._lock:
            if self._is_closed:
                raise CancelledError("the run does not wait for this conversation")
            self._waiting.append(request.completion)
        self._events.put(request)

    def request(self) -> Request | None:
        """Wait for the next request of the function; None: it has returned.

        Raises:
            RewardError: the function has raised an error, or takes too long.
        """
        if self._end is not None:
            return None
        timeout, left = self._function.settings.timeout, None
        if timeout is not None:
            left = max(self._since + timeout - time.monotonic(), 0.0)
        try:
            event = self._events.get(timeout=left)
        except queue.Empty:
            self._is_late = True
            said = f"the function took longer than task.timeout={timeout:g} s"
            raise self._failure(f"{said} without a call of complete") from None
        if isinstance(event, Request):
            return event
        if event.error is not None:
            guests.raise_if_of_the_user(event.error)
            code = self._function.code
            said = user_code.described(event.error, code)
            raise self._failure(f"the function raised{said}") from event.error
        self._end = event
        return None

    def answer(self, request: Request, completion: TurnCompletion) -> None:
        """Give the function the completion that it has requested."""
        self._versions += completion.versions or []
        self._since = time.monotonic()
        request.answer(completion)

    def transcript(self, limits: TranscriptLimits) -> Transcript:
        """The transcript that the function has returned.

        Raises:
            RewardError: it is none, or no run with these limits can learn from it.
        """
        assert self._end is not None
        oldest = min((version for version, _ in self._versions), default=None)
        return self._function.transcript(self._end.value, self._item, limits, oldest)

    def _failure(self, said: str) -> RewardError:
        return self._function.failure(self._item.where, said)

    def cancel(self) -> None:
        """Cancel a coroutine that still runs, or what a function waits for."""
        with self._lock:
            self._is_closed = True
        if self._running is not None:  # once: it may await something at its end
            if self._end is None:
                self._running.cancel()
            return
        for completion in self._waiting:
            completion.cancel()

    def join(self, deadline: float) -> None:
        """Wait for the end of the function, which may have resources to release."""
        if not self._is_late:
            self._has_ended.wait(max(deadline - time.monotonic(), 0.0))


@contextlib.contextmanager
def _cancelled_at_end(calls: list[FunctionCall]) -> Iterator[list[FunctionCall]]:
    """A context at whose end calls that have not ended are cancelled."""
    try:
        yield calls
    finally:
        for call in calls:
            call.cancel()
        deadline = time.monotonic() + _SECONDS_TO_END
        for call in calls:
            call.join(deadline)


def converse(
    function: RolloutFunction, item: PromptRecord, complete: Complete
) -> Transcript:
    """Let a function hold one conversation, each of whose turns is completed at once.

    Errors of `complete` are not changed.
    """
    with _cancelled_at_end([FunctionCall(function, item)]) as (call,):
        while (request := call.request()) is not None:
            call.answer(request, complete(request.ids, request.max_tokens))
        return call.transcript(function.settings.transcript)


def converse_together(
    function: RolloutFunction,
    items: Sequence[PromptRecord],
    sample: Sample,
    rows: int,
    limits: TranscriptLimits,
) -> list[Transcript]:
    """Let a function hold conversations, whose turns are completed in batches.

    A batch has the next request of every conversation that has not ended. The first
    process alone calls the function; all get the same transcripts and failures.

    Args:
        function: of the user.
        items: a record for each conversation.
        sample: completes a batch.
        rows: rows of a batch; those after the records stay empty.
        limits: of the transcripts.
    """
    batch = _Batch(function, items, limits)
    with _cancelled_at_end(batch.calls):
        for turn in itertools.count():
            asked = processes.by_first(batch.requests, RewardError)
            if not any(asked):
                break
            tokens = np.zeros((rows, function.settings.conversation.width), np.int32)
            lengths = np.zeros(rows, np.int32)
            for i, ids in enumerate(asked):
                tokens[i, : len(ids)], lengths[i] = ids, len(ids)
            samples = sample(tokens, lengths, turn)
            if processes.is_first():
                batch.answer(samples)
        if jax.process_count() == 1:
            return batch.transcripts()

        def lines() -> list[dict[str, Any]]:
            return [transcript.to_json() for transcript in batch.transcripts()]

        shared = processes.by_first(lines, RewardError)
        return [Transcript.of_json(fields) for fields in shared]


class _Batch:
    """Conversations whose turns are completed together."""

    def __init__(
        self,
        function: RolloutFunction,
        items: Sequence[PromptRecord],
        limits: TranscriptLimits,
    ):
        self._function, self._items, self._limits = function, items, limits
        self.calls: list[FunctionCall] = []  # in the first process
        self._requests: list[Request | None] = []

    def requests(self) -> list[list[int]]:
        """The ids to complete in each conversation; none after its end.

        The first call begins the conversations.
        """
        if not self.calls:
            self.calls += [FunctionCall(self._function, item) for item in self._items]
        self._requests = [call.request() for call in self.calls]
        return [[] if request is None else request.ids for request in self._requests]

    def answer(self, samples: Samples) -> None:
        """Give each conversation its row of the samples."""
        for i, (call, request) in enumerate(
            zip(self.calls, self._requests, strict=True)
        ):
            if request is not None:
                call.answer(request, _completion(samples, i, request, self._limits))

    def transcripts(self) -> list[Transcript]:
        """The transcripts of all conversations, which have ended."""
        return [call.transcript(self._limits) for call in self.calls]


def _completion(
    samples: Samples, i: int, request: Request, limits: TranscriptLimits
) -> TurnCompletion:
    """Row `i` of samples, with the fields that transcripts of these limits have."""
    length = min(int(samples.lengths[i]), request.max_tokens)
    ids = np.asarray(samples.tokens)[i, :length].tolist()
    supports = routes = None
    if limits.support is not None and samples.support_ids is not None:
        of_tokens = np.asarray(samples.support_ids)[i, :length]
        supports = [row[row >= 0].tolist() for row in of_tokens]
    if limits.needs.routes is not None and samples.routes is not None:
        routes = np.asarray(samples.routes)[i, : len(request.ids) + length - 1]
    return TurnCompletion(
        ids=ids,
        logprobs=np.asarray(samples.logprobs)[i, :length].tolist(),
        ended=ids[-1] in limits.ends.eos_ids,
        supports=supports,
        routes=routes,
    )


def _plain(value: Any) -> Any:
    """The value with lists and Python's numbers for arrays, tuples and booleans."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(x) for x in value]
    if isinstance(value, Mapping):
        return {name: _plain(x) for name, x in value.items()}
    return int(value) if isinstance(value, bool) else value


def _sum(values: Any) -> float | None:
    """The sum of rewards by turn; None if any is None, or if they are no numbers."""
    is_list = isinstance(values, list)
    numbers = is_list and all(isinstance(x, int | float) for x in values)
    return float(sum(values)) if numbers else None
