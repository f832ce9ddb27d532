"""Environments: what answers a model between the turns of a conversation.

    reset(record) -> prompt;   step(said) -> (reply, reward, done)

An environment is a class; one object of it is made for every conversation. The prompt
is a string or a list of messages, and a reply is of the same kind. If the class has
`tools`, schemas of functions, the chat template gets them. `said` is all that
was said, the model's completion last: messages, or strings in turn. Objects are called
in threads, all conversations of a turn at once.
"""

import dataclasses
import functools
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jaxmem.base import messages
from jaxmem.data import guests, rewards
from jaxmem.data.calculator import Calculator
from jaxmem.data.rewards import RewardError

SHIPPED: dict[str, Callable[..., Any]] = {"calculator": Calculator}


class Turn(NamedTuple):
    """What an environment answered."""

    reply: Any  # a string or messages, as the prompt
    reward: float
    done: bool


@dataclasses.dataclass(eq=False)
class Conversation:
    """An environment's object, and what was said."""

    where: str  # place of its record in the data, for errors
    environment: Any
    prompt: Any  # that `reset` returned
    said: list[Any]  # messages, or strings in turn

    @property
    def has_messages(self) -> bool:
        """Whether the prompt is a list of messages."""
        return not isinstance(self.prompt, str)

    def complete(self, text: str) -> None:
        """Add what the model said."""
        message = {"role": "assistant", "content": text}
        self.said.append(message if self.has_messages else text)

    def hear(self, reply: Any) -> None:
        """Add what the environment said."""
        self.said += reply if self.has_messages else [reply]


class Environments:
    """Makes environments and calls them.

    Args:
        name: of a shipped class, or "file.py:Class", or "package.module:Class".
        timeout: maximum seconds of the calls of a turn together, or None.
        on_error: "raise"; or "end": a conversation whose environment fails ends with
            the rewards that it has.

    Attributes:
        name: as it was passed.
        tools: schemas of functions that the class has; None: it has none.

    Raises:
        RewardError: the class cannot be imported, or lacks `reset` or `step`.
    """

    def __init__(
        self,
        name: str,
        timeout: float | None = None,
        on_error: Literal["raise", "end"] = "raise",
    ):
        self.name, self._timeout, self._on_error = name, timeout, on_error
        self._ended = Counter[type]()  # conversations, by what was raised
        self._class = rewards.load(name, "task.environment", SHIPPED)
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

    def open(
        self, records: Sequence[dict[str, Any]], where: Sequence[str]
    ) -> list[Conversation]:
        """Make one environment a record, and reset it.

        Raises:
            RewardError: an environment fails, or its prompt is none.
        """

        def begin(record: dict[str, Any]) -> tuple[Any, Any]:
            environment = self._class()
            return environment, environment.reset(dict(record))

        outcomes = self._together([functools.partial(begin, r) for r in records])
        conversations = []
        for place, (value, error) in zip(where, outcomes, strict=True):
            if error is not None:
                raise self._failure(place, "reset", error) from error
            environment, prompt = value
            if (problem := self._problem(prompt)) is not None:
                raise self._failure(place, "reset", problem)
            said = [prompt] if isinstance(prompt, str) else list(prompt)
            conversations.append(Conversation(place, environment, prompt, said))
        return conversations

    def _problem(self, prompt: Any) -> "_Nonsense | None":
        """Why this is no prompt."""
        is_text = isinstance(prompt, str)
        if not (_is_said(prompt, is_text) and prompt):  # an array has no truth value
            wanted = "neither a string nor a list of messages"
            return _Nonsense(f"returned {messages.short(prompt)}, {wanted}")
        if self.tools and is_text:
            return _Nonsense("returned a string; with tools it must be messages")
        return None

    def step(self, conversations: Sequence[Conversation]) -> list[Turn]:
        """Let the environments answer what the model said last.

        Raises:
            RewardError: an environment fails, and `on_error` is "raise".
        """
        calls = [
            functools.partial(c.environment.step, list(c.said)) for c in conversations
        ]
        turns = []
        for c, (answer, error) in zip(
            conversations, self._together(calls), strict=True
        ):
            turn = answer if error else _turn(answer, c)
            if isinstance(turn, Turn):
                turns.append(turn)
                continue
            self.fail(self._failure(c.where, "step", error or turn), error or turn)
            turns.append(Turn([] if c.has_messages else "", 0.0, True))
        return turns

    def fail(self, failure: RewardError, cause: BaseException | None = None) -> None:
        """Raise a failure, or, where failures end conversations, count it.

        Of each type of exception the first, the tenth, the hundredth, ... is a warning.
        """
        if self._on_error == "raise":
            raise failure from cause
        kind = type(failure if cause is None else cause)
        self._ended[kind] += 1
        if (count := str(self._ended[kind])).rstrip("0") == "1":
            warnings.warn(
                f"{failure}; conversations ended by such failures so far: {count}",
                stacklevel=1,
            )

    def _together(
        self, calls: Sequence[Callable[[], Any]]
    ) -> list[tuple[Any, BaseException | None]]:
        late = _Nonsense(f"took longer than task.timeout={self._timeout or 0:g} s")
        return [
            (value, late if isinstance(error, guests.Late) else error)
            for value, error in guests.together(calls, self._timeout)
        ]

    def _failure(self, where: str, method: str, error: BaseException) -> RewardError:
        place = f"environment {self.name} ({where}): {method}"
        if isinstance(error, _Nonsense):
            return RewardError(f"{place} {error}")
        file_name = Path(self.name.rpartition(":")[0]).name
        return RewardError(f"{place} raised{rewards.described(error, file_name)}")


class _Nonsense(ValueError):
    """An answer that is none; the message goes on after the method's name."""


def _turn(answer: Any, conversation: Conversation) -> Turn | _Nonsense:
    """What `step` returned, if it can be used."""
    if not isinstance(answer, tuple) or len(answer) != 3:
        return _Nonsense(
            f"returned {messages.short(answer)}, not a tuple (reply, reward, done)"
        )
    reply, reward, done = answer
    kind = "messages" if conversation.has_messages else "a string"
    if not _is_said(reply, not conversation.has_messages):
        return _Nonsense(
            f"replied {messages.short(reply)}, which must be {kind}, as the prompt is"
        )
    try:
        value = rewards.checked(reward)
    except ValueError as error:
        return _Nonsense(f"gave the reward {error}")
    try:
        ends = bool(done)
    except Exception:  # such as of an array
        said = messages.must_be("done", "True or False", done)
        return _Nonsense(f"returned a tuple whose {said}")
    if not (reply or ends):
        return _Nonsense("replied nothing, and the conversation goes on")
    return Turn(reply, value, ends)


def _is_said(value: Any, as_text: bool) -> bool:
    """Whether it is a string, or a list of messages with a role and content."""
    if as_text:
        return isinstance(value, str)
    return isinstance(value, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and "content" in m
        for m in value
    )
