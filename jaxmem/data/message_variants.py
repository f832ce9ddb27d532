"""The forms in which templates take one and the same message.

Content is a text or a list of parts, arguments of a tool's call are an object or JSON,
a message that only calls tools has null or an empty text, and reasoning has two names:
a template takes one form and mangles or drops the other.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxmem.data.chat import Message


class JsonArguments(dict[str, Any]):
    """Arguments of a call that were given as JSON.

    Attributes:
        source: the JSON.
    """

    source: str


Variant = tuple[Callable[[Message], Message], ...]

_PYTHONS = re.compile("[{\\[, ]'\ue000\\d+\ue001'|{'type': ")
_TWICE = re.compile('\\\\"\ue000\\d+\ue001\\\\"')


def variants(turns: Sequence[Message]) -> Iterator[Variant]:
    """Yield the forms that the messages can have, unchanged ones first."""
    axes: list[tuple[Callable[[Message], Message] | None, ...]] = []
    parts = any(isinstance(turn.get("content"), list) for turn in turns)
    axes.append((None, joined if parts else parted))
    if any(turn.get("tool_calls") for turn in turns):
        axes.append((None, as_json))
    if any(turn.get("content", "") is None for turn in turns):
        axes.append((None, emptied))
    if any("reasoning_content" in turn for turn in turns):
        axes.append((None, thinking))
    for chosen in itertools.product(*axes):
        yield tuple(change for change in chosen if change is not None)


def applied(variant: Variant, turns: Sequence[Message]) -> list[Message]:
    """The messages in the form of a variant."""
    changed = list(turns)
    for change in variant:
        changed = [change(turn) for turn in changed]
    return changed


def joined(turn: Message) -> Message:
    """A message whose parts are one text."""
    parts = turn.get("content")
    if not isinstance(parts, list):
        return turn
    return turn | {"content": "".join(part["text"] for part in parts)}


def parted(turn: Message) -> Message:
    """A message whose text is one part."""
    if not isinstance(turn.get("content"), str):
        return turn
    return turn | {"content": [{"type": "text", "text": turn["content"]}]}


def as_json(turn: Message) -> Message:
    """A message whose calls have their arguments as JSON."""
    if not turn.get("tool_calls"):
        return turn
    return turn | {"tool_calls": [_as_json(call) for call in turn["tool_calls"]]}


def _as_json(call: dict[str, Any]) -> dict[str, Any]:
    if "function" in call:
        return call | {"function": _as_json(call["function"])}
    arguments = call.get("arguments", {})
    if isinstance(arguments, JsonArguments):
        return call | {"arguments": arguments.source}
    return call | {"arguments": json.dumps(arguments, ensure_ascii=False)}


def thinking(turn: Message) -> Message:
    """A message whose reasoning has gpt-oss's name."""
    named = {"reasoning_content": "thinking"}
    return {named.get(key, key): value for key, value in turn.items()}


def emptied(turn: Message) -> Message:
    """A message with an empty text in the place of null."""
    return turn | {"content": ""} if turn.get("content", "") is None else turn


def mangled(text: str, variant: Variant) -> str | None:
    """A phrase for the way in which a template mangles a form; None if it takes it."""
    if _PYTHONS.search(text):
        return "as Python prints it"
    if as_json in variant and _TWICE.search(text):
        return "as JSON text within JSON"
    if emptied not in variant and re.search(r"\bNone\b", text):
        return "with the word None in place of missing content"
    return None
