"""Conversations to text: each field is found in it, or its missing text is said.

messages -> the template's own forms -> text, and the spans that an assistant wrote

A conversation is rendered twice: as it is, and with markers in the place of what is
said. The second rendering depends on the conversation's shape alone and is kept: where
values in the place of its markers give the first one, nothing was lost, and the spans
follow from it. Otherwise each field is looked for by a marker of its own.
"""

import bisect
import contextlib
import functools
import itertools
import json
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxmem.base import messages
from jaxmem.data import marks, variants
from jaxmem.data.chat import END, START, ChatTemplate, Message, Templates
from jaxmem.data.marks import FILLER, Field
from jaxmem.data.records import DataError
from jaxmem.data.variants import Variant

Span = tuple[int, int]  # first character, and the one after the last
_MOST_NOTES = 30  # lines
_MOST_SHAPES = 4096  # that are kept
_ENCODE = json.JSONEncoder(ensure_ascii=False, check_circular=False, default=str).encode


class Conversation(NamedTuple):
    """Messages, and what a template is given with them."""

    turns: Sequence[Message]
    counted: frozenset[int] = frozenset()  # numbers of the turns that the loss counts
    tools: Sequence[Any] | None = None
    options: Mapping[str, Any] | None = None  # variables of the template


class Rendered(NamedTuple):
    """A conversation as text, with the characters that the loss counts."""

    text: str
    counted: tuple[Span, ...]


class Notes(Counter[str]):
    """What is said once about many records, with its count and the first of them."""

    def __init__(self):
        super().__init__()
        self._first: dict[str, str] = {}

    def add(self, note: str, where: str, count: int = 1) -> None:
        """Count a note about a record."""
        self._first.setdefault(note, where)
        self[note] += count

    def lines(self) -> list[str]:
        """One line a note, of the first ones, and the number of the others."""
        shown = itertools.islice(self.items(), _MOST_NOTES)
        lines = [
            f"{note}: {count:,} (first {self._first[note]})" for note, count in shown
        ]
        if len(self) > _MOST_NOTES:
            lines.append(f"{len(self) - _MOST_NOTES:,} more notes of this kind")
        return lines


class _Shape(NamedTuple):
    """What the rendering of a shape with markers has shown."""

    variant: Variant  # forms of the messages that the template takes
    text: str  # with markers
    spans: dict[int, Span]  # of assistant turns, by number of the message
    ordered: bool  # whether each assistant turn has a span
    elsewhere: tuple[int, ...]  # numbers of fields that only a last turn has written
    unsure: tuple[int, ...]  # of fields that are written beside certain values
    refused: str | None  # why records of this shape are refused


class Lost(NamedTuple):
    """Text of a field that is missing in a rendering."""

    field: Field
    text: str


class _Text(NamedTuple):
    """A rendering, and what it lacks."""

    text: str
    moved: marks.Filled | None  # how it follows from the text of the shape, if it does
    lost: tuple[Lost, ...] = ()


class Renderer:
    """Renders conversations by one template, and checks that nothing is lost.

    Args:
        template: returns the template, at its first use; None: there is none.
        notes: what is said once about many records.
        ignored: keys of messages that are left out.
        stripped: what a counted turn becomes of which the template leaves out text: an
            error ("raise"), a turn that does not count ("mask"), or one of which the
            rest counts ("count").
    """

    def __init__(
        self,
        template: Templates | None,
        notes: Notes | None = None,
        ignored: Collection[str] = (),
        stripped: str = "raise",
    ):
        self._read, self.ignored, self._stripped = template, ignored, stripped
        self.notes = Notes() if notes is None else notes
        self._shapes: dict[str, _Shape] = {}

    @functools.cached_property
    def template(self) -> ChatTemplate:
        """The template; it raises a DataError where there is none."""
        if self._read is None:
            raise DataError(
                "messages are rendered by a checkpoint's chat template; set "
                "model.checkpoint"
            )
        return self._read()

    @property
    def has_rendered(self) -> bool:
        """Whether there was a conversation."""
        return bool(self._shapes)

    def counted(self, talk: Conversation, where: str) -> Rendered:
        """Render a conversation, and find the spans that its counted turns wrote.

        A turn starts where the template's generation prompt ends, and includes the
        special token that ends it. A template with `{% generation %}` defines turns
        itself.

        Raises:
            DataError: the template raises, or leaves out a field, or text of a turn
                that counts.
        """
        with _placed(where):
            shape, given, fields = self._shape(talk, False)
            made = self._text(shape, given, fields, False, where)
            counted = talk.counted - self._masked(made.lost, talk.counted, where)
            talk = talk._replace(counted=counted)
            spans = self._counted(talk, shape, given, made.moved)
            return Rendered(made.text, tuple(spans))

    def _masked(
        self, lost: Sequence[Lost], counted: frozenset[int], where: str
    ) -> frozenset[int]:
        """Counted turns that shall not count, because text of them is missing."""
        masked = set()
        for field, text in lost:
            if field.turn not in counted:
                said = "that the loss does not count"
            elif self._stripped == "raise":
                raise DataError(_lacks(field, text))
            else:
                said = f"that the loss would count (data.stripped={self._stripped!r})"
                masked.add(field.turn)
            note = f"the chat template leaves out text of {field.name!r} {said}, "
            note += "in characters"
            self.notes.add(note, where, marks.size(text))
        return frozenset(masked) if self._stripped == "mask" else frozenset()

    def _counted(
        self,
        talk: Conversation,
        shape: _Shape,
        given: Conversation,
        move: marks.Filled | None,
    ) -> Iterable[Span]:
        if shape.ordered and move is not None:
            return [
                (_moved(move, a), _moved(move, b))
                for i, (a, b) in sorted(shape.spans.items())
                if i in talk.counted
            ]
        text = self._render(given, False)
        if shape.ordered:
            exact = self._spans(given, text)
            return [exact[i] for i in sorted(talk.counted) if i in exact]
        if len(talk.counted) < sum(t["role"] == "assistant" for t in talk.turns):
            raise DataError(
                "the chat template marks another number of assistant turns than "
                "there are, and the loss is not to count all of them"
            )
        return _marked_spans(text)

    def prompt(self, talk: Conversation, where: str) -> str:
        """Render a conversation up to the answer."""
        with _placed(where):
            shape, given, fields = self._shape(talk, True)
            made = self._text(shape, given, fields, True, where)
            self._masked(made.lost, frozenset(), where)
            return made.text

    def end_of_turn(self) -> str | None:
        """The special token that ends an assistant's turn, if one does."""
        turns = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": FILLER},
        ]
        for talk in (turns, turns[1:]):
            try:
                text = _unmarked(self._render(Conversation(talk), False))
            except DataError:  # a template that wants other messages
                continue
            if FILLER in text:
                stop = text.rindex(FILLER) + len(FILLER)
                end = self.template.end.match(text, stop)
                return end[0].strip() if end and end[0].strip() else None
        return None

    def _render(self, talk: Conversation, asks: bool) -> str:
        return self.template.render(
            talk.turns,
            tools=talk.tools,
            options=talk.options,
            add_generation_prompt=asks,
        )

    def _text(
        self,
        shape: _Shape,
        talk: Conversation,
        fields: Sequence[Field],
        asks: bool,
        where: str,
    ) -> _Text:
        """The text, how it follows from that of the shape, and what is missing."""
        text = _unmarked(self._render(talk, asks))
        lost = [Lost(fields[i], fields[i].text) for i in shape.elsewhere]
        move = marks.fitting(shape.text, fields, text)
        others = () if move else marks.not_in_order(shape.text, fields, text)
        for number in (*shape.unsure, *others):
            field = fields[number]
            place = self._place(talk, number, asks, text)
            if place is None and field.text.strip() in text:
                continue
            if place is not None:
                if missing := marks.missing(field.text, place):
                    lost.append(Lost(field, missing))
                elif field.text.strip() not in place:  # not word for word
                    self.notes.add(_RESHAPED.format(field.name), where)
            elif self._writes_elsewhere(talk, number, field):
                lost.append(Lost(field, field.text))
            else:
                raise DataError(_dropped(field, self.template.of(talk.tools)))
        return _Text(text, move, tuple(lost))

    def _place(
        self, talk: Conversation, number: int, asks: bool, text: str
    ) -> str | None:
        """The part of a text that a field's value decides; None if it is not found."""
        one = marks.marked(talk.turns, talk.tools, only=number)
        given = talk._replace(turns=one.turns, tools=one.tools)
        try:
            other = _unmarked(self._render(given, asks))
        except DataError:  # a template that wants a certain value
            return None
        if number not in marks.found(other):
            return None
        marker = marks.marker(number)
        first, last = other.index(marker), other.rindex(marker) + len(marker)
        start = len(os.path.commonprefix([other[:first], text]))
        after = os.path.commonprefix([other[last:][::-1], text[start:][::-1]])
        return text[start : len(text) - len(after)]

    def _writes(self, talk: Conversation, number: int, asks: bool) -> bool:
        """Whether a marker in the place of a value is found."""
        one = marks.marked(talk.turns, talk.tools, only=number)
        given = talk._replace(turns=one.turns, tools=one.tools)
        try:
            return number in marks.found(self._render(given, asks))
        except DataError:  # a template that wants a certain value
            return False

    def _writes_elsewhere(self, talk: Conversation, number: int, field: Field) -> bool:
        """Whether the field is written where its message is the last one."""
        turns = talk.turns
        stops = [field.turn + 1] if field.turn >= 0 else range(1, len(turns) + 1)
        parts = (talk._replace(turns=turns[:stop]) for stop in stops)
        return any(self._writes(part, number, False) for part in parts)

    # ------------------------------------------------------------------- shapes

    def _shape(
        self, talk: Conversation, asks: bool
    ) -> tuple[_Shape, Conversation, Sequence[Field]]:
        """The shape; the conversation as the template takes it; its values."""
        one = marks.marked(talk.turns, talk.tools)
        if any(END in x.text or START in x.text for x in one.fields):
            raise DataError(
                "a message has U+FDD0 or U+FDD1, which Unicode keeps from being "
                "characters of a text; remove them"
            )
        key = _ENCODE([asks, one.turns, one.tools, talk.options])
        shape = self._shapes.get(key)
        if shape is None:
            shape = self._found(talk, asks)
            if len(self._shapes) < _MOST_SHAPES:
                self._shapes[key] = shape
        if shape.refused:
            raise DataError(shape.refused)
        if not shape.variant:
            return shape, talk, one.fields
        given = talk._replace(turns=variants.applied(shape.variant, talk.turns))
        return shape, given, marks.marked(given.turns, talk.tools).fields

    def _found(self, talk: Conversation, asks: bool) -> _Shape:
        """The form that the template takes best."""
        best: tuple[Any, ...] | None = None
        failed = None
        for variant in variants.variants(talk.turns):
            given = talk._replace(turns=variants.applied(variant, talk.turns))
            made = marks.marked(given.turns, talk.tools)
            marked = talk._replace(tools=made.tools, turns=made.turns)
            try:
                text = self._render(marked, asks)
            except DataError as error:
                failed = failed or str(error)
                continue
            how = variants.mangled(text, variant)
            missing = set(range(len(made.fields))) - marks.found(text)
            faults = (how is not None, len(missing))
            if best is None or faults < best[0]:
                best = faults, how, variant, text, given, marked
            if faults == (False, 0):
                break
        if best is None:
            return _Shape((), "", {}, True, (), (), failed)
        _, how, variant, text, given, marked = best
        if how is not None:
            problem = f"the chat template writes the messages {how}"
            return _Shape(variant, "", {}, True, (), (), problem)
        elsewhere, unsure, refused = self._missing(text, given, asks)
        spans = {} if asks or refused else self._spans(marked, text)
        assistants = sum(turn["role"] == "assistant" for turn in talk.turns)
        ordered = not self.template.of(talk.tools).marks or len(spans) == assistants
        return _Shape(
            variant, _unmarked(text), spans, ordered, elsewhere, unsure, refused
        )

    def _missing(
        self, text: str, given: Conversation, asks: bool
    ) -> tuple[tuple[int, ...], tuple[int, ...], str | None]:
        """Fields without a marker in a text: `elsewhere`, `unsure`, and an error."""
        turns, elsewhere, unsure = given.turns, [], []
        fields = marks.marked(turns, given.tools).fields
        for number in sorted(set(range(len(fields))) - marks.found(text)):
            field = fields[number]
            # The name of the function that has answered stands in its call as well.
            is_link = field.name == "name" and turns[field.turn]["role"] == "tool"
            if is_link:
                continue
            if self._writes(given, number, asks):
                unsure.append(number)
            elif self._writes_elsewhere(given, number, field):
                elsewhere.append(number)
            else:
                return (), (), _dropped(field, self.template.of(given.tools))
        return tuple(elsewhere), tuple(unsure), None

    # -------------------------------------------------------------------- spans

    def _spans(self, talk: Conversation, text: str) -> dict[int, Span]:
        """Spans of the assistant turns in a text with marks of generation."""
        assistants = [i for i, t in enumerate(talk.turns) if t["role"] == "assistant"]
        if self.template.of(talk.tools).marks:
            spans = _marked_spans(text)
            if len(spans) != len(assistants):
                return dict(enumerate(spans, start=-len(spans)))
            return dict(zip(assistants, spans, strict=True))
        found = {i: self._span(talk, i, text) for i in assistants}
        return {i: span for i, span in found.items() if span is not None}

    def _span(self, talk: Conversation, i: int, text: str) -> Span | None:
        """The span of the text that changes if the turn does."""
        before, after = talk.turns[:i], talk.turns[i + 1 :]
        content: Any = FILLER
        if isinstance(talk.turns[i].get("content"), list):
            content = [{"type": "text", "text": FILLER}]
        other = [*before, {"role": "assistant", "content": content}]
        try:
            changed = self._render(talk._replace(turns=[*other, *after]), False)
        except DataError:  # a template that wants the call before its answer
            changed = self._render(talk._replace(turns=other), False)
        if changed == text:  # the template omits the turn
            return None
        start = len(os.path.commonprefix([text, changed]))
        stop = len(text) - len(os.path.commonprefix([text[::-1], changed[::-1]]))
        start = self._after_prompt(talk._replace(turns=before), text, start)
        end = self.template.end.match(text, stop)
        return (start, end.end() if end else stop)

    def _after_prompt(self, before: Conversation, text: str, start: int) -> int:
        """The end of the generation prompt, if it is before the content."""
        try:
            prompt = self._render(before, True)
            asks = prompt != self._render(before, False)
        except DataError:  # some templates reject a truncated conversation
            return start
        if len(prompt) > start or not text.startswith(prompt):
            return start
        # A template without a generation prompt may still write a header.
        return len(prompt) if asks or not text[len(prompt) : start].strip() else start


_RESHAPED = "the chat template writes {!r} otherwise than it is given"


@contextlib.contextmanager
def _placed(where: str) -> Iterator[None]:
    """Name the record in a DataError that does not."""
    try:
        yield
    except DataError as error:
        said = str(error)
        if said.startswith(where):
            raise
        raise DataError(f"{where}: {said}") from error


def _name(field: Field) -> str:
    return f"messages[{field.turn}].{field.name}" if field.turn >= 0 else "tools"


def _dropped(field: Field, template: ChatTemplate) -> str:
    return (
        f"the chat template leaves out {_name(field)}; remove it, name it in "
        f"data.ignored, or set data.chat_template (now {template.where})"
    )


def _lacks(field: Field, text: str) -> str:
    what = "all" if text == field.text else messages.short(text.strip())
    return (
        f"the chat template leaves out {what} of {_name(field)} ({marks.size(text):,} "
        'characters), which the loss counts; give the message "weight": 0, set '
        'data.stripped="mask" (such turns do not count) or "count" (the rest counts), '
        "or data.chat_template"
    )


def _unmarked(text: str) -> str:
    return text.replace(START, "").replace(END, "")


def _moved(move: marks.Filled, place: int) -> int:
    """Where a place of the text with markers is in the filled one."""
    before = bisect.bisect_right(move.stops, place)
    return place + (move.moved[before - 1] if before else 0)


def _marked_spans(marked: str) -> list[Span]:
    """Spans between marks, as positions in the text without marks."""
    spans, start, removed = [], 0, 0
    for place, character in enumerate(marked):
        if character == START:
            start = place - removed
        elif character == END:
            spans.append((start, place - removed))
        removed += character in (START, END)
    return spans
