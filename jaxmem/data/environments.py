"""Environments, which answer a model between the turns of a conversation.

    reset(record) -> prompt;   step(said) -> (reply, reward, done);   close()

An environment is a class; one object of it is made for every conversation, and closed
at its end if it has `close`. The prompt is a string or a list of messages, and a reply
is of the same kind. If the class has `tools`, schemas of functions, the chat template
gets them. `said` is the conversation so far, the model's completion last: messages, or
strings in turn. Objects are called in threads, and may be async. The values of
Gymnasium's methods are accepted, too: `reset` may return (prompt, info), and `step`
(reply, reward, terminated, truncated, info).
"""

import contextlib
import dataclasses
import functools
import inspect
import math
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from jaxmem.base import guests, messages, user_code
from jaxmem.data import event_loop, rewards
from jaxmem.data.calculator import Calculator
from jaxmem.data.rewards import RewardError

SHIPPED: dict[str, Callable[..., Any]] = {"calculator": Calculator}
WORKERS = 64


class Turn(NamedTuple):
    """An environment's answer."""

    reply: Any  # a string or messages, as the prompt
    reward: float  # NaN: the conversation has none
    done: bool


@dataclasses.dataclass(eq=False)
class Episode:
    """A conversation with an environment's object."""

    where: str  # its record's name in errors
    environment: Any = None  # None: not constructed yet, or closed
    prompt: Any = None  # from `reset`; None: it failed
    said: list[Any] = dataclasses.field(default_factory=list)  # messages, or strings
    _is_closed: bool = False
    _lock: Any = dataclasses.field(default_factory=threading.Lock)

    @property
    def has_messages(self) -> bool:
        """True if the prompt is a list of messages."""
        return not isinstance(self.prompt, str)

    def release(self) -> Any:
        """Remove and return the object, to be closed; None if it is closed already."""
        with self._lock:
            self._is_closed = True
            environment, self.environment = self.environment, None
        return environment

    def receive(self, environment: Any) -> bool:
        """Keep the object; return False if the conversation has ended already."""
        with self._lock:
            if not self._is_closed:
                self.environment = environment
            return not self._is_closed

    def begin(self, prompt: Any) -> None:
        """Start with a prompt."""
        self.prompt = prompt
        self.said = [prompt] if isinstance(prompt, str) else list(prompt)

    def complete(self, text: str) -> None:
        """Add the model's completion."""
        message = {"role": "assistant", "content": text}
        self.said.append(message if self.has_messages else text)

    def hear(self, reply: Any) -> None:
        """Add the environment's reply."""
        self.said += reply if self.has_messages else [reply]


class Environments:
    """Makes environments, calls and closes them; its methods may run in threads.

    Args:
        name: of a shipped class, or "file.py:Class", or "package.module:Class".
        timeout: maximum seconds of each call, or None.
        on_error: "raise"; or a conversation whose environment fails ends: "end", with
            the rewards that it has; "mask", with the reward NaN, so that nothing is
            learned from it.
        workers: maximum number of calls at a time.

    Attributes:
        name: as it was passed.
        tools: schemas of functions that the class has; None: it has none.

    Raises:
        UserCodeError: the class cannot be imported.
        RewardError: it lacks `reset` or `step`.
    """

    def __init__(
        self,
        name: str,
        timeout: float | None = None,
        on_error: Literal["raise", "end", "mask"] = "raise",
        workers: int = WORKERS,
    ):
        self.name, self._timeout, self._on_error = name, timeout, on_error
        self._workers = workers
        self._failures = Counter[tuple[str, type]]()  # by consequence and exception
        self._lock = threading.Lock()  # of the counts
        self._callers = threading.BoundedSemaphore(workers)
        self._class = user_code.load(
            name, "task.environment", SHIPPED, "a class", inspect.isclass
        )
        for method in ("reset", "step"):
            if not callable(getattr(self._class, method, None)):
                raise RewardError(f"task.environment: {name} has no method {method!r}")
        self.tools: list[dict[str, Any]] | None = getattr(self._class, "tools", None)
        listed = self.tools is None or isinstance(self.tools, list)
        if not listed or not all(isinstance(t, dict) for t in self.tools or ()):
            raise RewardError(
                f"task.environment: {name}.tools must be a list of schemas, got "
                f"{messages.short(self.tools)}"
            )

    def prompts(
        self, records: Sequence[dict[str, Any]], where: Sequence[str]
    ) -> list[Any]:
        """The prompts of records; at most `workers` environments are open at a time.

        Raises:
            RewardError: an environment fails, or its prompt is none.
        """
        prompts = []
        for start in range(0, len(records), self._workers):
            part = slice(start, start + self._workers)
            with self._opened(records[part], where[part]) as outcomes:
                for _, failure in outcomes:
                    if failure is not None:
                        raise failure from failure.__cause__
                prompts += [conversation.prompt for conversation, _ in outcomes]
        return prompts

    @contextlib.contextmanager
    def opened(
        self, records: Sequence[dict[str, Any]], where: Sequence[str]
    ) -> Iterator[list[Episode]]:
        """Make an environment for each record and reset it; close all at the end.

        Where `on_error` is "mask", a conversation whose environment fails here has the
        prompt None, and its next turn is the last.

        Raises:
            RewardError: an environment fails, or its prompt is none.
        """
        with self._opened(records, where) as outcomes:
            for _, failure in outcomes:
                if failure is not None:
                    if self._on_error != "mask":
                        raise failure from failure.__cause__
                    self.fail(failure, failure.__cause__)
            yield [conversation for conversation, _ in outcomes]

    @contextlib.contextmanager
    def _opened(
        self, records: Sequence[dict[str, Any]], where: Sequence[str]
    ) -> Iterator[list[tuple[Episode, RewardError | None]]]:
        """A context with conversations, each with the failure of its beginning."""
        conversations = [Episode(name) for name in where]

        def begin(conversation: Episode, record: dict[str, Any]) -> Any:
            environment = self._class()
            if not conversation.receive(environment):  # it took too long
                return self._close(environment)
            return self._await_value(environment.reset(dict(record)))

        try:
            outcomes = self._call_together(
                [
                    functools.partial(begin, *each)
                    for each in zip(conversations, records, strict=True)
                ]
            )
            failures = [
                self._begin(conversation, *outcome)
                for conversation, outcome in zip(conversations, outcomes, strict=True)
            ]
            yield list(zip(conversations, failures, strict=True))
        finally:
            self.close(conversations)

    def _begin(
        self, conversation: Episode, returned: Any, error: BaseException | None
    ) -> RewardError | None:
        """Start a conversation with the value of `reset`; return a failure, if any."""
        is_pair = isinstance(returned, tuple) and len(returned) == 2
        if is_pair and isinstance(returned[1], dict):  # as Gymnasium has it
            returned = returned[0]
        error = error or self._find_problem(returned)
        if error is None:
            conversation.begin(returned)
            return None
        failure = self._to_failure(conversation.where, "reset", error)
        failure.__cause__ = error
        return failure

    def _find_problem(self, prompt: Any) -> "_Nonsense | None":
        """The error of a value that is no prompt; None for a prompt."""
        is_text = isinstance(prompt, str)
        if not (_is_reply(prompt, is_text) and prompt):  # an array has no truth value
            expected = "which is not a string or a list of messages"
            return _Nonsense(f"returned {messages.short(prompt)}, {expected}")
        if self.tools and is_text:
            return _Nonsense("returned a string; with tools it must be messages")
        return None

    def step(self, conversations: Sequence[Episode]) -> list[Turn]:
        """Let the environments answer the model's last completions.

        Raises:
            RewardError: an environment fails, and `on_error` is "raise".
        """
        begun = [c for c in conversations if c.prompt is not None]
        calls = [functools.partial(self._step, c) for c in begun]
        answers = iter(self._call_together(calls))
        return [
            _last_turn(c, math.nan)
            if c.prompt is None
            else self._turn(c, *next(answers))
            for c in conversations
        ]

    def _turn(
        self, conversation: Episode, answer: Any, error: BaseException | None
    ) -> Turn:
        turn = error or _read_turn(answer, conversation)
        if isinstance(turn, Turn):
            return turn
        failure = self._to_failure(conversation.where, "step", turn)
        return _last_turn(conversation, self.fail(failure, turn))

    def fail(
        self,
        failure: RewardError,
        cause: BaseException | None = None,
        reward: float = 0.0,
    ) -> float:
        """Count a failure that ends a conversation.

        Of each type of exception the first, the tenth, the hundredth, ... is a warning.

        Returns:
            The reward of the last turn: the argument, or NaN.

        Raises:
            RewardError: the failure, where `on_error` is "raise".
        """
        if self._on_error == "raise":
            raise failure from cause
        masks = self._on_error == "mask"
        self._count_failure(
            "left out because of" if masks else "ended by", failure, cause
        )
        return math.nan if masks else reward

    def _count_failure(
        self, outcome: str, failure: RewardError, cause: BaseException | None
    ) -> None:
        kind = outcome, type(failure if cause is None else cause)
        with self._lock:
            self._failures[kind] += 1
            count = str(self._failures[kind])
        if count.rstrip("0") == "1":
            warnings.warn(
                f"{failure}; conversations {outcome} failures of this kind so far: "
                f"{count}",
                stacklevel=1,
            )

    def close(self, conversations: Sequence[Episode]) -> None:
        """Close the environments that are open; a failure of that is a warning."""
        released = [(c, c.release()) for c in conversations]
        opened = [
            (c, environment) for c, environment in released if environment is not None
        ]
        calls = [
            functools.partial(self._close, environment) for _, environment in opened
        ]
        for (c, _), (_, error) in zip(opened, self._call_together(calls), strict=True):
            if error is not None:
                failure = self._to_failure(c.where, "close", error)
                self._count_failure("possibly left open by", failure, error)

    def _close(self, environment: Any) -> None:
        if callable(close := getattr(environment, "close", None)):
            self._await_value(close())

    def _step(self, conversation: Episode) -> Any:
        return self._await_value(conversation.environment.step(list(conversation.said)))

    def _await_value(self, returned: Any) -> Any:
        """The value that a method returned, or that of its coroutine."""
        if inspect.iscoroutine(returned):
            return event_loop.of_process().run(returned, self._timeout)
        return returned

    def _call_together(
        self, calls: Sequence[Callable[[], Any]]
    ) -> list[tuple[Any, BaseException | None]]:
        late = _Nonsense(f"took longer than task.timeout={self._timeout or 0:g} s")
        with self._callers:  # conversations in threads of their own make one call each
            outcomes = guests.together(calls, self._timeout, self._workers)
        return [
            (value, late if isinstance(error, guests.Late) else error)
            for value, error in outcomes
        ]

    def _to_failure(self, where: str, method: str, error: BaseException) -> RewardError:
        call = f"environment {self.name} ({where}): {method}"
        if isinstance(error, _Nonsense):
            return RewardError(f"{call} {error}")
        return RewardError(f"{call} raised{user_code.described(error, self._class)}")


class _Nonsense(ValueError):
    """A value of a wrong kind; its message continues after the method's name."""


def _last_turn(conversation: Episode, reward: float) -> Turn:
    """An answer without a reply, which ends the conversation."""
    return Turn([] if conversation.has_messages else "", reward, True)


def _read_turn(answer: Any, conversation: Episode) -> Turn | _Nonsense:
    """The turn that `step` returned, or the error of its value."""
    if not isinstance(answer, tuple) or len(answer) not in (3, 5):
        return _Nonsense(
            f"returned {messages.short(answer)}, not a tuple (reply, reward, done)"
        )
    reply, reward, *ends = answer[:4]  # the fifth one is Gymnasium's info
    kind = "messages" if conversation.has_messages else "a string"
    if not _is_reply(reply, not conversation.has_messages):
        return _Nonsense(
            f"replied {messages.short(reply)}, which must be {kind}, as the prompt is"
        )
    try:
        value = rewards.checked(reward)
    except ValueError as error:
        return _Nonsense(f"gave the reward {error}")
    names = ("done",) if len(ends) == 1 else ("terminated", "truncated")
    done = False
    for name, end in zip(names, ends, strict=True):
        try:
            done |= bool(end)
        except Exception:  # such as of an array
            said = messages.must_be(name, "True or False", end)
            return _Nonsense(f"returned a tuple whose {said}")
    if not (reply or done):
        return _Nonsense("replied nothing, although the conversation goes on")
    return Turn(reply, value, done)


def _is_reply(value: Any, as_text: bool) -> bool:
    """True if a value is a string, or a list of messages with a role and content."""
    if as_text:
        return isinstance(value, str)
    return isinstance(value, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and "content" in m
        for m in value
    )
