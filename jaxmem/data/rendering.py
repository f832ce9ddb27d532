"""Conversations to text, checked to hold the text of every field.

messages -> the template's own forms -> text, and the spans that an assistant wrote

A conversation is rendered twice: as it is, and with markers in place of its texts. The
second rendering depends on the conversation's shape alone and is kept: if values in
place of its markers give the first one, nothing was lost, and the spans follow from it.
Otherwise each field is looked for by a marker of its own.
"""

import contextlib
import functools
import itertools
import json
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxmem.base import messages
from jaxmem.data import markers
from jaxmem.data.chat import END, START, ChatTemplate, Message, Templates
from jaxmem.data.markers import FILLER, Field
from jaxmem.data.message_variants import Variant, applied, mangled, variants
from jaxmem.data.records import DataError

Span = tuple[int, int]  # first character, and the one after the last
_MOST_NOTES = 30  # lines
_MOST_SHAPES = 4096  # that are kept
_ENCODE = json.JSONEncoder(ensure_ascii=False, check_circular=False, default=str).encode


class Conversation(NamedTuple):
    """Messages, and the tools and variables for their template."""

    turns: Sequence[Message]
    counted: frozenset[int] = frozenset()  # indices of the turns that the loss counts
    tools: Sequence[Any] | None = None
    options: Mapping[str, Any] | None = None  # variables of the template


class Rendered(NamedTuple):
    """A conversation as text, with the characters that the loss counts."""

    text: str
    counted: tuple[Span, ...]


class Notes(Counter[str]):
    """Notes about records, each printed once with a count and the first record."""

    def __init__(self):
        super().__init__()
        self._first: dict[str, str] = {}

    def add(self, note: str, where: str, count: int = 1) -> None:
        """Count a note about a record."""
        self._first.setdefault(note, where)
        self[note] += count

    def lines(self) -> list[str]:
        """One line for each of the first notes, and one that counts the others."""
        shown = itertools.islice(self.items(), _MOST_NOTES)
        lines = [
            f"{note}: {count:,} (first {self._first[note]})" for note, count in shown
        ]
        if len(self) > _MOST_NOTES:
            lines.append(f"{len(self) - _MOST_NOTES:,} more notes of this kind")
        return lines


class _Missing(NamedTuple):
    """Fields that have no marker in the rendering of a shape, by number."""

    elsewhere: tuple[int, ...] = ()  # written only if their turn is the last one
    unsure: tuple[int, ...] = ()  # written only beside certain values
    refused: str | None = None  # the error, if the template writes a field nowhere


class _Shape(NamedTuple):
    """The rendering of a shape with markers, and the facts that follow from it."""

    variant: Variant  # forms of the messages that the template takes
    text: str = ""  # with markers
    spans: Mapping[int, Span] = {}  # of assistant turns, by index of the message
    ordered: bool = True  # True if each assistant turn has a span
    missing: _Missing = _Missing()


class _Shaped(NamedTuple):
    """A conversation in the form that its template takes, and its shape."""

    shape: _Shape
    talk: Conversation
    fields: Sequence[Field]  # by number of their markers


class _Trial(NamedTuple):
    """The rendering with markers of one form of a conversation."""

    variant: Variant
    talk: Conversation  # in this form
    marked: Conversation  # with markers
    text: str
    mangled: str | None  # see `message_variants.mangled`
    missing: int  # fields whose marker the text lacks

    @property
    def faults(self) -> tuple[bool, int]:
        """The order of preference among trials: smaller is better."""
        return self.mangled is not None, self.missing


class Lost(NamedTuple):
    """Text of a field that is missing in a rendering."""

    field: Field
    text: str


class _Text(NamedTuple):
    """A rendering, and the texts that it lacks."""

    text: str
    filled: markers.Filled | None  # the shape's text with values, if it is this text
    lost: tuple[Lost, ...] = ()


class Renderer:
    """Renders conversations by one template, and checks that nothing is lost.

    Args:
        template: returns the template, at its first use; None: there is none.
        notes: collects notes about records.
        ignored: keys of messages that are left out.
        stripped: treatment of a counted turn of which the template leaves out text: an
            error ("raise"), a turn that does not count ("mask"), or one of which the
            rest counts ("count").
        section: section of the keys that messages name; None: a command reads, which
            has no such keys.
    """

    def __init__(
        self,
        template: Templates | None,
        notes: Notes | None = None,
        ignored: Collection[str] = (),
        stripped: str = "raise",
        section: str | None = "data",
    ):
        self._read, self.ignored, self._stripped = template, ignored, stripped
        self._section = section
        self.notes = Notes() if notes is None else notes
        self._shapes: dict[str, _Shape] = {}

    @functools.cached_property
    def template(self) -> ChatTemplate:
        """The template; it raises a DataError where there is none."""
        if self._read is None:
            raise DataError(
                "messages need the chat template of a checkpoint; set model.checkpoint"
            )
        return self._read()

    def ignoring(self, what: str = "it", joint: str = ", or ") -> str:
        """Words on the key that leaves a column or field out; empty without one."""
        if self._section is None:
            return ""
        return f"{joint}name {what} in {self._section}.ignored"

    @property
    def has_rendered(self) -> bool:
        """True if a conversation was rendered."""
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
        with _errors_name(where):
            shaped = self._to_shape(talk, False)
            rendering = self._render_checked(shaped, False, where)
            masked = self._turns_to_mask(rendering.lost, talk.counted, where)
            counted = talk.counted - masked
            spans = tuple(self._counted_spans(shaped, counted, rendering.filled))
            self._note_endless(talk, rendering.text, spans, where)
            return Rendered(rendering.text, spans)

    def _note_endless(
        self, talk: Conversation, text: str, spans: Sequence[Span], where: str
    ) -> None:
        """Add a note if no special token ends any of the spans that count."""
        template = self.template.of(talk.tools)
        ends = (text[a:b].rstrip().endswith(template.special) for a, b in spans)
        if spans and not any(ends):
            inside = ", within {% generation %}" if template.marks else ""
            self.notes.add(_ENDLESS.format(template.where + inside), where)

    def _turns_to_mask(
        self, lost: Sequence[Lost], counted: frozenset[int], where: str
    ) -> frozenset[int]:
        """Counted turns that must not count, because text of them is missing."""
        masked = set()
        for field, text in lost:
            if field.turn not in counted:
                said = "that the loss does not count"
            elif self._stripped == "raise":
                raise DataError(self._stripped_message(field, text))
            else:
                option = self._stripped_option
                said = f"that the loss would count ({option}={self._stripped!r})"
                masked.add(field.turn)
            note = f"the chat template leaves out text of {field.name!r} {said}, "
            note += "in characters"
            self.notes.add(note, where, markers.size(text))
        return frozenset(masked) if self._stripped == "mask" else frozenset()

    def _counted_spans(
        self, shaped: _Shaped, counted: frozenset[int], filled: markers.Filled | None
    ) -> Iterable[Span]:
        """Spans of the counted turns in the text without marks."""
        shape, talk = shaped.shape, shaped.talk
        if shape.ordered and filled is not None:
            return [
                (filled.position(start), filled.position(stop))
                for i, (start, stop) in sorted(shape.spans.items())
                if i in counted
            ]
        text = self._render(talk, False)
        if shape.ordered:
            exact = self._assistant_spans(talk, text)
            return [exact[i] for i in sorted(counted) if i in exact]
        if len(counted) < sum(t["role"] == "assistant" for t in talk.turns):
            raise DataError(
                "the number of assistant turns that the chat template marks differs "
                "from the conversation's, and some turns must not count towards the "
                "loss"
            )
        return _marked_spans(text)

    def prompt(self, talk: Conversation, where: str) -> str:
        """Render a conversation up to the answer."""
        with _errors_name(where):
            shaped = self._to_shape(talk, True)
            rendering = self._render_checked(shaped, True, where)
            self._turns_to_mask(rendering.lost, frozenset(), where)  # notes alone
            return rendering.text

    def end_of_turn(self) -> str | None:
        """The special token that ends an assistant's turn, if one does."""
        turns = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": FILLER},
        ]
        for talk in (turns, turns[1:]):
            try:
                text = _remove_marks(self._render(Conversation(talk), False))
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

    def _render_checked(self, shaped: _Shaped, asks: bool, where: str) -> _Text:
        """Render a conversation, and find the texts of fields that are missing.

        Raises:
            DataError: the template leaves out a field, whatever its value.
        """
        shape, talk, fields = shaped.shape, shaped.talk, shaped.fields
        text = _remove_marks(self._render(talk, asks))
        lost = [Lost(fields[i], fields[i].text) for i in shape.missing.elsewhere]
        filled = markers.fitting(shape.text, fields, text)
        others = () if filled else markers.not_in_order(shape.text, fields, text)
        for number in (*shape.missing.unsure, *others):
            field = fields[number]
            written = self._written_part(talk, number, asks, text)
            if written is None and field.text.strip() in text:
                continue
            if written is not None:
                if missing := markers.missing(field.text, written):
                    lost.append(Lost(field, missing))
                elif field.text.strip() not in written:  # not word for word
                    self.notes.add(_RESHAPED.format(field.name), where)
            elif self._writes_elsewhere(talk, number, field):
                lost.append(Lost(field, field.text))
            else:
                template = self.template.of(talk.tools)
                raise DataError(self._dropped_message(field, template))
        return _Text(text, filled, tuple(lost))

    def _written_part(
        self, talk: Conversation, number: int, asks: bool, text: str
    ) -> str | None:
        """The part of a text that depends on a field's value; None without any."""
        marked = _mark_one(talk, number)
        try:
            other = _remove_marks(self._render(marked, asks))
        except DataError:  # a template that wants a certain value
            return None
        if number not in markers.numbers_in(other):
            return None
        marker = markers.marker(number)
        first, last = other.index(marker), other.rindex(marker) + len(marker)
        start = len(os.path.commonprefix([other[:first], text]))
        after = os.path.commonprefix([other[last:][::-1], text[start:][::-1]])
        return text[start : len(text) - len(after)]

    def _writes_marker(self, talk: Conversation, number: int, asks: bool) -> bool:
        """True if the template writes a marker in place of a field's value."""
        marked = _mark_one(talk, number)
        try:
            return number in markers.numbers_in(self._render(marked, asks))
        except DataError:  # a template that wants a certain value
            return False

    def _writes_elsewhere(self, talk: Conversation, number: int, field: Field) -> bool:
        """True if the field is written when its message is the last one."""
        turns = talk.turns
        stops = [field.turn + 1] if field.turn >= 0 else range(1, len(turns) + 1)
        parts = (talk._replace(turns=turns[:stop]) for stop in stops)
        return any(self._writes_marker(part, number, False) for part in parts)

    # ------------------------------------------------------------------- shapes

    def _to_shape(self, talk: Conversation, asks: bool) -> _Shaped:
        """The conversation in the form that the template takes, with its shape.

        Raises:
            DataError: the template does not take conversations of this shape.
        """
        marked = markers.marked(talk.turns, talk.tools)
        if any(END in x.text or START in x.text for x in marked.fields):
            raise DataError(
                "a message has U+FDD0 or U+FDD1, which Unicode reserves as "
                "noncharacters; remove them"
            )
        key = _ENCODE([asks, marked.turns, marked.tools, talk.options])
        shape = self._shapes.get(key)
        if shape is None:
            shape = self._find_shape(talk, asks)
            if len(self._shapes) < _MOST_SHAPES:
                self._shapes[key] = shape
        if shape.missing.refused:
            raise DataError(shape.missing.refused)
        if not shape.variant:
            return _Shaped(shape, talk, marked.fields)
        talk = talk._replace(turns=applied(shape.variant, talk.turns))
        fields = markers.marked(talk.turns, talk.tools).fields
        return _Shaped(shape, talk, fields)

    def _find_shape(self, talk: Conversation, asks: bool) -> _Shape:
        """The shape of a conversation in the form that loses the fewest fields."""
        best: _Trial | None = None
        failed = None
        for variant in variants(talk.turns):
            changed = talk._replace(turns=applied(variant, talk.turns))
            replaced = markers.marked(changed.turns, talk.tools)
            marked = talk._replace(turns=replaced.turns, tools=replaced.tools)
            try:
                text = self._render(marked, asks)
            except DataError as error:
                failed = failed or str(error)
                continue
            numbers = set(range(len(replaced.fields)))
            trial = _Trial(
                variant,
                changed,
                marked,
                text,
                mangled=mangled(text, variant),
                missing=len(numbers - markers.numbers_in(text)),
            )
            if best is None or trial.faults < best.faults:
                best = trial
            if trial.faults == (False, 0):
                break
        if best is None:
            return _Shape((), missing=_Missing(refused=failed))
        if best.mangled is not None:
            problem = f"the chat template writes the messages {best.mangled}"
            return _Shape(best.variant, missing=_Missing(refused=problem))
        missing = self._find_missing(best, asks)
        has_spans = not asks and not missing.refused
        spans = self._assistant_spans(best.marked, best.text) if has_spans else {}
        assistants = sum(turn["role"] == "assistant" for turn in talk.turns)
        ordered = not self.template.of(talk.tools).marks or len(spans) == assistants
        text = _remove_marks(best.text)
        return _Shape(best.variant, text, spans, ordered, missing)

    def _find_missing(self, trial: _Trial, asks: bool) -> _Missing:
        """The fields that have no marker in a trial's text, by the reason for it."""
        talk, elsewhere, unsure = trial.talk, [], []
        turns = talk.turns
        fields = markers.marked(turns, talk.tools).fields
        written = markers.numbers_in(trial.text)
        for number in sorted(set(range(len(fields))) - written):
            field = fields[number]
            # The name of the function that has answered stands in its call as well.
            is_link = field.name == "name" and turns[field.turn]["role"] == "tool"
            if is_link:
                continue
            if self._writes_marker(talk, number, asks):
                unsure.append(number)
            elif self._writes_elsewhere(talk, number, field):
                elsewhere.append(number)
            else:
                template = self.template.of(talk.tools)
                return _Missing(refused=self._dropped_message(field, template))
        return _Missing(tuple(elsewhere), tuple(unsure))

    def _dropped_message(self, field: Field, template: ChatTemplate) -> str:
        way = f"set {self._section}.chat_template" if self._section else "change that"
        return (
            f"the chat template leaves out {_field_name(field)}; remove it"
            f"{self.ignoring(joint=', ')}, or {way} (now {template.where})"
        )

    def _stripped_message(self, field: Field, text: str) -> str:
        what = "all" if text == field.text else messages.short(text.strip())
        last = f", or {self._section}.chat_template" if self._section else ""
        return (
            f"the chat template leaves out {what} of {_field_name(field)} "
            f"({markers.size(text):,} characters), which the loss counts; give the "
            f'message "weight": 0, set {self._stripped_option}="mask" (such turns do '
            f'not count) or "count" (the rest counts){last}'
        )

    @property
    def _stripped_option(self) -> str:
        return f"{self._section}.stripped" if self._section else "--stripped"

    # -------------------------------------------------------------------- spans

    def _assistant_spans(self, talk: Conversation, text: str) -> dict[int, Span]:
        """Spans of the assistant turns, by index, in a text with generation marks.

        If the template marks another number of turns, the indices are negative.
        """
        assistants = [i for i, t in enumerate(talk.turns) if t["role"] == "assistant"]
        if self.template.of(talk.tools).marks:
            spans = _marked_spans(text)
            if len(spans) != len(assistants):
                return dict(enumerate(spans, start=-len(spans)))
            return dict(zip(assistants, spans, strict=True))
        spans = {i: self._turn_span(talk, i, text) for i in assistants}
        return {i: span for i, span in spans.items() if span is not None}

    def _turn_span(self, talk: Conversation, i: int, text: str) -> Span | None:
        """The span of the text that changes with turn `i`; None without any."""
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
        start = self._prompt_end(talk._replace(turns=before), text, start)
        end = self.template.end.match(text, stop)
        return (start, end.end() if end else stop)

    def _prompt_end(self, before: Conversation, text: str, start: int) -> int:
        """The end of the generation prompt after `before`; `start` if it has none."""
        try:
            prompt = self._render(before, True)
            asks = prompt != self._render(before, False)
        except DataError:  # some templates reject a truncated conversation
            return start
        if len(prompt) > start or not text.startswith(prompt):
            return start
        # A template without a generation prompt may still write a header.
        return len(prompt) if asks or not text[len(prompt) : start].strip() else start


_ENDLESS = (
    "no special token ends the text of a turn that the loss counts, so the model will "
    "not learn to stop; end turns with {{{{ eos_token }}}} in {}, or add the token "
    "that ends them to tokenizer.json as a special token; conversations"
)
_RESHAPED = "the chat template changes {!r} when it writes it"


@contextlib.contextmanager
def _errors_name(where: str) -> Iterator[None]:
    """A context in which a DataError begins with the record's name."""
    try:
        yield
    except DataError as error:
        said = str(error)
        if said.startswith(where):
            raise
        raise DataError(f"{where}: {said}") from error


def _mark_one(talk: Conversation, number: int) -> Conversation:
    """The conversation with a marker in place of one value."""
    marked = markers.marked(talk.turns, talk.tools, only=number)
    return talk._replace(turns=marked.turns, tools=marked.tools)


def _field_name(field: Field) -> str:
    return f"messages[{field.turn}].{field.name}" if field.turn >= 0 else "tools"


def _remove_marks(text: str) -> str:
    return text.replace(START, "").replace(END, "")


def _marked_spans(marked: str) -> list[Span]:
    """Spans between marks, as positions in the text without marks."""
    spans: list[Span] = []
    start = removed = 0
    for index, character in enumerate(marked):
        if character == START:
            start = index - removed
        elif character == END:
            spans.append((start, index - removed))
        removed += character in (START, END)
    return spans
