"""Markers that replace a conversation's texts, to find these in a rendered text.

Every text of a message becomes a marker; the rest is the conversation's shape, which
many conversations share. Markers are private-use characters, which no text has.
"""

import bisect
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxmem.data.chat import Message

FILLER = "\uf8ff"  # in the place of a whole turn
_MARKER = re.compile('"\ue000(\\d+)\ue001"|\ue000(\\d+)\ue001')
# Keys that tie messages together, or that describe them for others than the model.
LINKS = frozenset(("id", "tool_call_id", "type", "index"))
NOTES = frozenset(
    "uuid message_id parent_id timestamp created created_at model language lang "
    "metadata tokens finish_reason".split()
)
_KEPT = LINKS | NOTES | {"role"}


class Field(NamedTuple):
    """A value that a marker stands for."""

    turn: int  # index of its message; -1 for tools
    name: str  # of the field, such as "content" or "tool_calls"
    value: Any  # a string, number, boolean or None

    @property
    def text(self) -> str:
        """The value, as Jinja prints it."""
        return self.value if isinstance(self.value, str) else str(self.value)


class Marked(NamedTuple):
    """Messages and tools with markers, and the values that these stand for."""

    turns: list[Message]
    tools: list[Any] | None
    fields: list[Field]


def marked(
    turns: Sequence[Message], tools: Sequence[Any] | None, only: int | None = None
) -> Marked:
    """Replace values by markers; with `only`, the value of that number alone."""
    writer = _MarkerWriter(only)
    marked_turns = [writer.message(i, turn) for i, turn in enumerate(turns)]
    schemas = None if tools is None else [writer.tool(tool) for tool in tools]
    return Marked(marked_turns, schemas, writer.fields)


def marker(number: int) -> str:
    """The marker of a value."""
    return f"\ue000{number}\ue001"


class _MarkerWriter:
    """Numbers the values of a conversation while it replaces them by markers."""

    def __init__(self, only: int | None):
        self._only, self.fields = only, []
        self._links: dict[Any, str] = {}

    def _put(self, turn: int, name: str, value: Any) -> Any:
        number = len(self.fields)
        self.fields.append(Field(turn, name, value))
        return marker(number) if self._only in (None, number) else value

    def message(self, i: int, turn: Message) -> Message:
        marked_turn = {}
        for key, value in turn.items():
            if key in NOTES and self._only is None:
                continue
            if type(value) is str and key not in _KEPT:  # the usual case, made fast
                marked_turn[key] = self._put(i, key, value) if value else value
            else:
                marked_turn[key] = self._value(i, key, key, value)
        return marked_turn

    def _value(self, i: int, name: str, key: str, value: Any) -> Any:
        """The value of a key of a message, of a part or of a call, with markers."""
        if key in LINKS:
            return self._link(key, value)
        if key in ("role", *NOTES) or value is None or value in ("", [], {}):
            return value
        if isinstance(value, Mapping) and key == "arguments":
            return self._argument(i, name, value)
        if isinstance(value, Mapping):
            return {k: self._value(i, name, k, v) for k, v in value.items()}
        if isinstance(value, list):
            return [self._value(i, name, key + "[]", v) for v in value]
        return self._put(i, name, value)

    def _link(self, key: str, value: Any) -> Any:
        """A number as long as an id in its place, one for each id."""
        alone = self._only is not None
        if key in ("type", "index") or not isinstance(value, str) or alone:
            return value
        number = len(self._links)
        return self._links.setdefault(value, f"{number:0{len(value)}d}"[: len(value)])

    def _argument(self, i: int, name: str, value: Any) -> Any:
        """The arguments with markers for names and values, at every depth."""
        if isinstance(value, Mapping):
            return {
                self._put(i, name, k): self._argument(i, name, v)
                for k, v in value.items()
            }
        if isinstance(value, list):
            return [self._argument(i, name, v) for v in value]
        return self._put(i, name, value) if value != "" else value

    def tool(self, schema: Any) -> Any:
        """A schema with markers for its function's name and description."""
        if not isinstance(schema, Mapping):
            return schema
        marked_schema = dict(schema)
        if isinstance(schema.get("function"), Mapping):
            return marked_schema | {"function": self.tool(schema["function"])}
        for key in ("name", "description"):
            if schema.get(key):
                marked_schema[key] = self._put(-1, "tools", schema[key])
        return marked_schema


def numbers_in(text: str) -> set[int]:
    """The numbers of the markers in a text."""
    return {int(m[1] or m[2]) for m in _MARKER.finditer(text)}


class Filled(NamedTuple):
    """A text with values in place of markers, and the shifts of its characters."""

    text: str
    stops: list[int]  # ends of the markers in the text with markers
    shifts: list[int]  # of the characters after each marker

    def position(self, marked: int) -> int:
        """The position here of a character, from that in the text with markers."""
        before = bisect.bisect_right(self.stops, marked)
        return marked + (self.shifts[before - 1] if before else 0)


def filled(text: str, fields: Sequence[Field], strip: bool, quoted: bool) -> Filled:
    """Replace markers by their values.

    With `strip`, spaces around values are left out; with `quoted`, a marker in double
    quotes is a value as JSON.
    """
    pieces, stops, shifts = [], [], []
    last = shift = 0
    for match in _MARKER.finditer(text):
        start, stop = match.span()
        field = fields[int(match[1] or match[2])]
        value = field.text.strip() if strip else field.text
        if match[1] and quoted:
            literal = value if isinstance(field.value, str) else field.value
            value = json.dumps(literal, ensure_ascii=False)
        elif match[1]:
            start, stop = start + 1, stop - 1
        pieces += [text[last:start], value]
        shift += len(value) - (stop - start)
        last = stop
        stops.append(stop)
        shifts.append(shift)
    return Filled("".join([*pieces, text[last:]]), stops, shifts)


def fitting(text: str, fields: Sequence[Field], rendered: str) -> Filled | None:
    """The options of `filled` that give a rendering, as its result; None if none do."""
    for quoted in (True, False):
        for strip in (False, True):
            attempt = filled(text, fields, strip, quoted)
            if attempt.text == rendered:
                return attempt
    return None


def not_in_order(text: str, fields: Sequence[Field], rendered: str) -> list[int]:
    """Numbers of the fields whose values have no single position in a rendering.

    Args:
        text: rendered with markers; the values have their order.
        fields: by number of their markers.
        rendered: with values; each is looked for from its start and from its end, and
            both searches must agree.
    """
    numbers = [int(m[1] or m[2]) for m in _MARKER.finditer(text)]
    values = [fields[number].text.strip() for number in numbers]
    first, last = [], []
    offset = 0
    for value in values:
        first.append(rendered.find(value, offset))
        offset = first[-1] + len(value) if first[-1] >= 0 else offset
    offset = len(rendered)
    for value in reversed(values):
        last.append(rendered.rfind(value, 0, offset))
        offset = last[-1] if last[-1] >= 0 else offset
    offsets = zip(numbers, first, reversed(last), strict=True)
    return sorted({number for number, a, b in offsets if a < 0 or a != b})


def missing(value: str, written: str) -> str:
    """The part of a value that is absent from `written`, the template's form of it.

    Spaces and the case of letters do not count, and `written` may have other characters
    between those of the value.
    """
    letters = [(i, c) for i, c in enumerate(value) if not c.isspace()]
    rest = iter("".join(written.split()).casefold())
    if all(c in rest for _, x in letters for c in x.casefold()):
        return ""
    ours, theirs = "".join(x for _, x in letters), "".join(written.split())
    before = len(os.path.commonprefix([ours, theirs]))
    after = os.path.commonprefix([ours[before:][::-1], theirs[before:][::-1]])
    gone = letters[before : len(letters) - len(after)] or letters
    return value[gone[0][0] : gone[-1][0] + 1]


def size(text: str) -> int:
    """The number of characters of a text that are not spaces."""
    return sum(not c.isspace() for c in text)
