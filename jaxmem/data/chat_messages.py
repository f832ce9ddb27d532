"""Messages of a record in one form: OpenAI's, with arguments of calls as objects."""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from jaxmem.base import json_files, messages
from jaxmem.data.chat import Message
from jaxmem.data.records import DataError
from jaxmem.data.variants import JsonArguments

# What ShareGPT calls the roles.
_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "chatgpt": "assistant", "bard": "assistant", "bing": "assistant",
    "model": "assistant", "system": "system", "tool": "tool", "observation": "tool",
    "function_response": "tool", "function_call": "assistant",
}  # fmt: skip
_FLAGS = ("weight", "train", "loss")  # whether the loss counts an assistant's turn
# Spellings of one key; the first is the one that most templates read.
_REASONING = ("reasoning_content", "thinking", "reasoning")
# Keys without which a message is its role and its content.
_MORE = frozenset((*_FLAGS, *_REASONING, "function_call", "tool_calls"))


class Talk(NamedTuple):
    """Messages, and which of them the loss may count."""

    turns: list[Message]
    muted: frozenset[int]  # numbers of the assistant turns that it may not

    def after(self, before: list[Message]) -> "Talk":
        """The messages with others before them."""
        muted = frozenset(len(before) + i for i in self.muted)
        return Talk([*before, *self.turns], muted)


def talk_of(where: str, key: str, value: Any, ignored: Collection[str] = ()) -> Talk:
    """The messages of a field, without the keys that are ignored.

    They are a list of objects with "role" and "content", or, as ShareGPT has them, with
    "from" and "value"; or one of these.

    Raises:
        DataError: a message has another form, or asks for what is not implemented.
    """
    listed = [value] if isinstance(value, dict) else value
    if not isinstance(listed, list) or not listed:
        place = f'{where}: "{key}"'
        raise DataError(messages.must_be(place, "a list of messages", value))
    turns, muted = [], set()
    for i, given in enumerate(listed):
        place = f'{where}: "{key}"[{i}]'
        turn, counts = _turn(place, given, ignored)
        turns.append(turn)
        if not counts:
            muted.add(i)
    return Talk(turns, frozenset(muted))


def _turn(place: str, given: Any, ignored: Collection[str]) -> tuple[Message, bool]:
    items = given.items() if isinstance(given, dict) else ()
    turn = {k: v for k, v in items if v is not None and k not in ignored}
    if "role" not in turn and "from" in turn:
        turn = _of_sharegpt(place, turn)
    if not isinstance(turn.get("role"), str):
        wanted = 'an object with "role" and "content"'
        raise DataError(messages.must_be(place, wanted, given))
    if _MORE.isdisjoint(turn) and isinstance(turn.get("content"), str):
        return turn, True
    counts = _counts(place, turn)
    _name_reasoning(place, turn)
    if "function_call" in turn:  # as OpenAI had it before there were several
        turn["tool_calls"] = [{"function": turn.pop("function_call")}]
    if "tool_calls" in turn:
        calls = turn["tool_calls"]
        if not isinstance(calls, list):
            raise DataError(messages.must_be(f"{place}.tool_calls", "a list", calls))
        turn["tool_calls"] = [
            _call(f"{place}.tool_calls[{i}]", call) for i, call in enumerate(calls)
        ]
        turn.setdefault("content", None)
    if "content" not in turn and _REASONING[0] not in turn:
        raise DataError(f'{place} has no "content", and no "tool_calls"')
    if "content" in turn:
        turn["content"] = _content(place, turn["content"])
    return turn, counts


def _name_reasoning(place: str, turn: Message) -> None:
    """Give reasoning its first spelling; variants try the others."""
    named = [key for key in _REASONING if key in turn]
    if len(named) > 1 and any(turn[key] != turn[named[0]] for key in named):
        raise DataError(
            f"{place} has {' and '.join(named)}, which are names of one thing; keep one"
        )
    if named:
        turn[_REASONING[0]] = turn.pop(named[0])
    for key in named[1:]:
        turn.pop(key, None)


def _of_sharegpt(place: str, turn: Message) -> Message:
    named = turn.pop("from")
    role = _ROLES.get(named) if isinstance(named, str) else None
    if role is None:
        wanted = f"one of {', '.join(_ROLES)}"
        raise DataError(messages.must_be(f"{place}.from", wanted, named))
    made: Message = {"role": role, **turn}
    value = made.pop("value", None)
    if named != "function_call":
        return made if value is None else made | {"content": value}
    calls = _parsed(f"{place}.value", value)
    listed = calls if isinstance(calls, list) else [calls]
    return made | {"tool_calls": [{"type": "function", "function": c} for c in listed]}


def _counts(place: str, turn: Message) -> bool:
    """Take out what says whether the loss counts a turn, and return it."""
    counts = True
    for flag in _FLAGS:
        if flag not in turn:
            continue
        value = turn.pop(flag)
        if value not in (0, 1):
            wanted = "0 or 1: other weights of messages are not implemented"
            raise DataError(messages.must_be(f"{place}.{flag}", wanted, value))
        if value and turn["role"] != "assistant":
            raise DataError(
                f"{place}.{flag} must be 0, or left out: the loss counts assistant "
                f"turns alone, and this one is of {messages.short(turn['role'])}"
            )
        counts = counts and bool(value)
    return counts


def _content(place: str, content: Any) -> Any:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        wanted = "a text or a list of parts"
        raise DataError(messages.must_be(f"{place}.content", wanted, content))
    return [_part(f"{place}.content[{i}]", part) for i, part in enumerate(content)]


def _part(place: str, part: Any) -> Any:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text" or not isinstance(part.get("text"), str):
        got = kind if isinstance(kind, str) else part
        wanted = 'a part with the type "text" and a "text"'
        raise DataError(messages.must_be(place, wanted, got))
    kept = {k: v for k, v in part.items() if v is not None}
    if others := sorted(kept.keys() - {"type", "text"}):
        raise DataError(f"{place} has the keys {messages.listing(others)}, which are "
                        "not read; remove them")  # fmt: skip
    return kept


def _call(place: str, call: Any) -> dict[str, Any]:
    """A call whose arguments, if any, are an object."""
    if not isinstance(call, dict):
        raise DataError(messages.must_be(place, "an object", call))
    made = {k: v for k, v in call.items() if v is not None}
    if "function" in made:
        return made | {"function": _call(f"{place}.function", made["function"])}
    if not isinstance(made.get("name"), str):
        raise DataError(
            f'{place} must have the "name" of a function, got {messages.short(call)}'
        )
    return made | {"arguments": _arguments(place, made.get("arguments", {}))}


def _arguments(place: str, given: Any) -> dict[str, Any]:
    source = "{}" if given == "" else given
    value = _parsed(f"{place}.arguments", source)
    if not isinstance(value, Mapping):
        wanted = "an object, or one as JSON"
        raise DataError(messages.must_be(f"{place}.arguments", wanted, given))
    if not isinstance(source, str):
        return dict(value)
    decoded = JsonArguments(value)
    decoded.source = source
    return decoded


def tools_of(where: str, value: Any) -> list[Any] | None:
    """The schemas of a record's tools: a list, or one as JSON."""
    listed = _parsed(f"{where}: tools", value or [])
    if listed is None:
        return None
    if not isinstance(listed, list) or not all(isinstance(t, dict) for t in listed):
        raise DataError(messages.must_be(f"{where}: tools", "a list of schemas", value))
    return listed or None


def _parsed(place: str, text: Any) -> Any:
    """A value, or what a text holds as JSON."""
    if not isinstance(text, str):
        return text
    try:
        return json_files.parse(text)
    except json_files.JsonError as error:
        raise DataError(f"{place}: {error}") from error
