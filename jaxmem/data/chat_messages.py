"""Messages of a record in one form: OpenAI's, with arguments of calls as objects."""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from jaxmem.base import json_files, messages
from jaxmem.data.chat import Message
from jaxmem.data.message_variants import JsonArguments
from jaxmem.data.records import DataError

# ShareGPT's names of the roles.
_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "chatgpt": "assistant", "bard": "assistant", "bing": "assistant",
    "model": "assistant", "system": "system", "tool": "tool", "observation": "tool",
    "function_response": "tool", "function_call": "assistant",
}  # fmt: skip
# Roles of messages that are known, of which some templates take a part alone.
ROLES = (
    "system", "developer", "user", "assistant", "tool", "function", "ipython",
    "environment", "observation",
)  # fmt: skip
# Names of the assistant elsewhere; the loss would not count its messages.
_ASSISTANTS = frozenset("model bot ai chatbot gpt chatgpt bard bing assistant".split())
_FLAGS = ("weight", "train", "loss")  # 0: the loss does not count the turn
# Spellings of one key; the first is the one that most templates read.
_REASONING = ("reasoning_content", "thinking", "reasoning")
# Keys without which a message is its role and its content.
_MORE = frozenset((*_FLAGS, *_REASONING, "function_call", "tool_calls"))


class Talk(NamedTuple):
    """Messages, with the assistant turns that the loss must not count."""

    turns: list[Message]
    muted: frozenset[int]  # indices of these turns

    def after(self, before: list[Message]) -> "Talk":
        """The messages with those of `before` in front of them."""
        muted = frozenset(len(before) + i for i in self.muted)
        return Talk([*before, *self.turns], muted)


def talk_of(where: str, key: str, value: Any, ignored: Collection[str] = ()) -> Talk:
    """The messages of a field, without the keys that are ignored.

    The field holds one object, or a list of objects, with "role" and "content", or, as
    ShareGPT has them, with "from" and "value".

    Raises:
        DataError: a message has another form, or asks for what is not implemented.
    """
    listed = [value] if isinstance(value, dict) else value
    if not isinstance(listed, list) or not listed:
        field = f'{where}: "{key}"'
        raise DataError(messages.must_be(field, "a list of messages", value))
    turns, muted = [], set()
    for i, raw in enumerate(listed):
        turn, counts = _read_turn(f'{where}: "{key}"[{i}]', raw, ignored)
        turns.append(turn)
        if not counts:
            muted.add(i)
    return Talk(turns, frozenset(muted))


def _read_turn(where: str, raw: Any, ignored: Collection[str]) -> tuple[Message, bool]:
    """A message in the one form, and True if the loss may count it."""
    items = raw.items() if isinstance(raw, dict) else ()
    turn = {k: v for k, v in items if v is not None and k not in ignored}
    if "role" not in turn and "from" in turn:
        turn = _from_sharegpt(where, turn)
    if not isinstance(turn.get("role"), str):
        expected = 'an object with "role" and "content"'
        raise DataError(messages.must_be(where, expected, raw))
    role = turn["role"]
    if role != "assistant" and role.lower() in _ASSISTANTS:
        expected = "'assistant' for what the model writes"
        raise DataError(
            f"{messages.must_be(f'{where}.role', expected, role)}; the known roles are "
            f"{', '.join(ROLES)}"
        )
    if _MORE.isdisjoint(turn) and isinstance(turn.get("content"), str):
        return turn, True
    counts = _pop_flags(where, turn)
    _name_reasoning(where, turn)
    if "function_call" in turn:  # as OpenAI had it before there were several
        turn["tool_calls"] = [{"function": turn.pop("function_call")}]
    if "tool_calls" in turn:
        calls = turn["tool_calls"]
        if not isinstance(calls, list):
            raise DataError(messages.must_be(f"{where}.tool_calls", "a list", calls))
        turn["tool_calls"] = [
            _read_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(calls)
        ]
        turn.setdefault("content", None)
    if "content" not in turn and _REASONING[0] not in turn:
        raise DataError(f'{where} must have "content" or "tool_calls" and has neither')
    if "content" in turn:
        turn["content"] = _read_content(where, turn["content"])
    return turn, counts


def _name_reasoning(where: str, turn: Message) -> None:
    """Give reasoning its first spelling; variants try the others."""
    named = [key for key in _REASONING if key in turn]
    if len(named) > 1 and any(turn[key] != turn[named[0]] for key in named):
        raise DataError(
            f"{where} has {' and '.join(named)}, which are names of the same field; "
            "keep one"
        )
    if named:
        turn[_REASONING[0]] = turn.pop(named[0])
    for key in named[1:]:
        turn.pop(key, None)


def _from_sharegpt(where: str, turn: Message) -> Message:
    named = turn.pop("from")
    role = _ROLES.get(named) if isinstance(named, str) else None
    if role is None:
        expected = f"one of {', '.join(_ROLES)}"
        raise DataError(messages.must_be(f"{where}.from", expected, named))
    message: Message = {"role": role, **turn}
    value = message.pop("value", None)
    if named != "function_call":
        return message if value is None else message | {"content": value}
    calls = _parse_json(f"{where}.value", value)
    listed = calls if isinstance(calls, list) else [calls]
    return message | {
        "tool_calls": [{"type": "function", "function": c} for c in listed]
    }


def _pop_flags(where: str, turn: Message) -> bool:
    """Remove the flags of a turn; return True if the loss may count the turn."""
    counts = True
    for flag in _FLAGS:
        if flag not in turn:
            continue
        value = turn.pop(flag)
        if value not in (0, 1):
            expected = "0 or 1: other weights of messages are not implemented"
            raise DataError(messages.must_be(f"{where}.{flag}", expected, value))
        if value and turn["role"] != "assistant":
            raise DataError(
                f"{where}.{flag} must be 0, or left out: the loss counts only "
                "assistant turns, and the role of this message is "
                f"{messages.short(turn['role'])}"
            )
        counts = counts and bool(value)
    return counts


def _read_content(where: str, content: Any) -> Any:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        expected = "a text or a list of parts"
        raise DataError(messages.must_be(f"{where}.content", expected, content))
    return [_read_part(f"{where}.content[{i}]", part) for i, part in enumerate(content)]


def _read_part(where: str, part: Any) -> Any:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text" or not isinstance(part.get("text"), str):
        got = kind if isinstance(kind, str) else part
        expected = 'a part with the type "text" and a "text"'
        raise DataError(messages.must_be(where, expected, got))
    kept = {k: v for k, v in part.items() if v is not None}
    if others := sorted(kept.keys() - {"type", "text"}):
        raise DataError(f"{where} has the keys {messages.listing(others)}, which "
                        "jaxmem does not read; remove them")  # fmt: skip
    return kept


def _read_call(where: str, call: Any) -> dict[str, Any]:
    """The call, with its arguments as an object; {} if it has none."""
    if not isinstance(call, dict):
        raise DataError(messages.must_be(where, "an object", call))
    kept = {k: v for k, v in call.items() if v is not None}
    if "function" in kept:
        return kept | {"function": _read_call(f"{where}.function", kept["function"])}
    if not isinstance(kept.get("name"), str):
        raise DataError(
            f'{where} must have the "name" of a function, got {messages.short(call)}'
        )
    return kept | {"arguments": _read_arguments(where, kept.get("arguments", {}))}


def _read_arguments(where: str, raw: Any) -> dict[str, Any]:
    source = "{}" if raw == "" else raw
    value = _parse_json(f"{where}.arguments", source)
    if not isinstance(value, Mapping):
        expected = "an object, or an object as JSON text"
        raise DataError(messages.must_be(f"{where}.arguments", expected, raw))
    if not isinstance(source, str):
        return dict(value)
    decoded = JsonArguments(value)
    decoded.source = source
    return decoded


def tools_of(where: str, value: Any) -> list[Any] | None:
    """The schemas of a record's tools: a list, or one as JSON."""
    listed = _parse_json(f"{where}: tools", value or [])
    if listed is None:
        return None
    if not isinstance(listed, list) or not all(isinstance(t, dict) for t in listed):
        raise DataError(messages.must_be(f"{where}: tools", "a list of schemas", value))
    return listed or None


def _parse_json(where: str, text: Any) -> Any:
    """The value of a text of JSON; another value as it is."""
    if not isinstance(text, str):
        return text
    try:
        return json_files.parse(text)
    except json_files.JsonError as error:
        raise DataError(f"{where}: {error}") from error
