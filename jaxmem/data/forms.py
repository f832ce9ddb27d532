"""Forms of records, such as texts, conversations or pairs; columns tell the form.

A form has the columns that it needs, those that it takes besides, and methods that turn
them into a document of supervised training, two answers to one prompt, or a prompt.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from jaxmem.base import messages
from jaxmem.data.chat import Message
from jaxmem.data.chat_messages import ROLES, Talk, talk_of, tools_of
from jaxmem.data.records import DataError
from jaxmem.data.rendering import Conversation, Renderer, Span

_PROMPT = ("prompt", "question", "query")
_ANSWER = ("completion", "response", "output", "answer")
_MESSAGES = ("messages", "conversations", "conversation")
_TEMPLATES = {
    "system": ("system", "system_prompt"),
    "tools": ("tools", "functions"),
    "options": ("chat_template_kwargs",),
}

_UNKNOWN_ROLE = (
    "the loss does not count messages of the role {}, which is none of "
    f"{', '.join(ROLES)}; messages"
)


class Document(NamedTuple):
    """One text; the loss counts `text`, never `prompt`.

    In a text that a chat template rendered, special tokens are spelled out, and
    `counted` are the spans of characters that the loss counts. A record of tokens has
    `ids` in the place of both texts, and `labels`, -1 where the loss counts none.
    `source` is the number of the entry of `data.source` that it comes from.
    """

    name: str
    text: str
    prompt: str = ""
    counted: tuple[Span, ...] | None = None
    ids: tuple[int, ...] | None = None
    labels: tuple[int, ...] | None = None
    source: int = 0


class PromptText(NamedTuple):
    """A prompt for a model, and its text."""

    prompt: str | list[Message]
    text: str
    rendered: bool  # True if a template wrote the text, with all special tokens


class RecordColumns(dict[str, Any]):
    """The columns of one record, under the names that a form gives them."""

    def __init__(
        self,
        where: str,
        values: Mapping[str, Any],
        names: Mapping[str, str],
        renderer: Renderer,
    ):
        super().__init__(values)
        self.where, self.names, self._renderer = where, names, renderer

    def string(self, name: str) -> str:
        """A column that must be a string."""
        if not isinstance(self[name], str):
            field = f'{self.where}: "{self.names[name]}"'
            raise DataError(messages.must_be(field, "a string", self[name]))
        return self[name]

    def talk(self, name: str, role: str | None = None) -> Talk:
        """A column's messages; with a role, a text is one message of that role."""
        if role is not None and isinstance(self[name], str):
            return Talk([{"role": role, "content": self[name]}], frozenset())
        ignored = self._renderer.ignored
        return talk_of(self.where, self.names[name], self[name], ignored)

    @property
    def is_rendered(self) -> bool:
        """True if it needs a chat template, for its system, tools or variables."""
        return "system" in self or bool(self._tools()) or bool(self.get("options"))

    def ignoring(self) -> str:
        """See `Renderer`."""
        return self._renderer.ignoring()

    def before(self) -> list[Message]:
        """The system message of a column, as a list; [] without such a column."""
        if "system" not in self:
            return []
        return [{"role": "system", "content": self.string("system")}]

    def after_system(self, talk: Talk) -> Talk:
        """Put the record's system message first; a DataError if there is another."""
        before = self.before()
        if before and talk.turns[0]["role"] == "system":
            raise DataError(
                f'{self.where}: "{self.names["system"]}" and a message both have the '
                f"role 'system'; remove one{self._renderer.ignoring('the column')}"
            )
        return talk.after(before)

    def answer(self, name: str, prompt: list[Message]) -> Talk:
        """The prompt's and an answer's messages; an answer may repeat the prompt."""
        talk = self.talk(name, "assistant")
        if prompt and _end_of_prompt(talk.turns, prompt) is None:
            role = talk.turns[0]["role"]
            if role == "system" or role == prompt[-1]["role"] == "user":
                raise DataError(
                    f'{self.where}: "{self.names[name]}" begins with the role {role!r}'
                    f' and not with "{self.names["prompt"]}"; give only the answer, '
                    "or begin with the same prompt"
                )
            talk = talk.after(prompt)
        return self.after_system(talk)

    def document(self, talk: Talk, first: int) -> Document:
        """Render messages; the loss counts assistant turns from message `first` on."""
        turns, where = talk.turns, self.where
        assistants = [i for i, t in enumerate(turns) if t["role"] == "assistant"]
        counted = [i for i in assistants if i >= first and i not in talk.muted]
        if not any(i >= first for i in assistants):
            got = messages.listing(sorted({str(t["role"]) for t in turns[first:]}))
            raise DataError(f"{where}: no message has the role 'assistant'; got {got}")
        for turn in turns:
            if turn["role"] not in ROLES:
                self.note(_UNKNOWN_ROLE.format(messages.short(turn["role"])))
        text, spans = self._renderer.counted(self._conversation(turns, counted), where)
        if counted and not any(start < stop for start, stop in spans):
            raise DataError(
                f"{where}: the chat template does not write the assistant's turn"
            )
        return Document(where, text, counted=spans)

    def asked(self, turns: list[Message]) -> PromptText:
        """Render messages up to the answer."""
        text = self._renderer.prompt(self._conversation(turns), self.where)
        return PromptText(turns, text, rendered=True)

    def _conversation(
        self, turns: Sequence[Message], counted: Collection[int] = ()
    ) -> Conversation:
        """The messages with the record's tools and variables for the template."""
        options = self.get("options")
        if options is not None and not isinstance(options, dict):
            field = f"{self.where}: chat_template_kwargs"
            raise DataError(messages.must_be(field, "an object", options))
        return Conversation(turns, frozenset(counted), self._tools(), options)

    def _tools(self) -> list[Any] | None:
        return tools_of(self.where, self["tools"]) if "tools" in self else None

    def note(self, note: str) -> None:
        """Add a note about this record."""
        self._renderer.notes.add(note, self.where)


class Form:
    """A form of records; a subclass has one or two of the last three methods."""

    name: str  # as in "read as ..."
    needs: Mapping[str, tuple[str, ...]]  # spellings of required columns, by name
    takes: Mapping[str, tuple[str, ...]] = {}  # of columns that may be missing

    def names(self, keys: Collection[str]) -> dict[str, str] | None:
        """A record's columns by their names in this form; None if one is missing."""
        chosen = {}
        for name, spellings in {**self.needs, **self.takes}.items():
            spelling = next((s for s in spellings if s in keys), None)
            if spelling is not None:
                chosen[name] = spelling
            elif name in self.needs:
                return None
        return chosen

    def document(self, columns: RecordColumns) -> Document:
        """The document of a record of supervised training."""
        raise NotImplementedError

    def prompt(self, columns: RecordColumns) -> PromptText:
        """The prompt of a record."""
        raise NotImplementedError

    def answers(self, columns: RecordColumns) -> list[Document]:
        """The documents of a chosen and a rejected answer."""
        raise NotImplementedError


class TextForm(Form):
    """A text, of which every token counts."""

    name = "texts"
    needs = {"text": ("text",)}

    def document(self, columns: RecordColumns) -> Document:
        return Document(columns.where, columns.string("text"))


class Answered(Form):
    """A prompt and its answer: two texts, or two lists of messages."""

    name = "prompts and answers"
    needs = {"prompt": _PROMPT, "answer": _ANSWER}
    takes = _TEMPLATES

    def document(self, columns: RecordColumns) -> Document:
        before, after = columns["prompt"], columns["answer"]
        listed = isinstance(before, list) or isinstance(after, (list, dict))
        if not listed and not columns.is_rendered:
            answer = columns.string("answer")
            return Document(columns.where, answer, columns.string("prompt"))
        prompt = columns.talk("prompt", "user").turns
        talk = columns.answer("answer", prompt)
        return columns.document(talk, _end_of_prompt(talk.turns, prompt) or 0)


class Messages(Form):
    """A conversation."""

    name = "conversations"
    needs = {"messages": ("messages",)}
    takes = {**_TEMPLATES, "prompt": _PROMPT}

    def _talk(self, columns: RecordColumns) -> Talk:
        talk = columns.after_system(columns.talk("messages"))
        if "prompt" in columns:
            if _end_of_prompt(talk.turns, columns.talk("prompt", "user").turns) is None:
                raise DataError(
                    f"{columns.where}: the messages do not begin with "
                    f'"{columns.names["prompt"]}"; remove it{columns.ignoring()}'
                )
        return talk

    def document(self, columns: RecordColumns) -> Document:
        return columns.document(self._talk(columns), 0)

    def prompt(self, columns: RecordColumns) -> PromptText:
        turns = self._talk(columns).turns
        if turns[-1]["role"] == "assistant":
            turns = turns[:-1]
        if not turns:
            raise DataError(f"{columns.where}: no message asks anything")
        return columns.asked(turns)


def _end_of_prompt(turns: list[Message], prompt: list[Message]) -> int | None:
    """The index after a prompt's messages; None if `turns` does not begin with them.

    A system message may come before them.
    """
    starts = (0, 1) if turns[0]["role"] == "system" else (0,)
    ends = ((i, i + len(prompt)) for i in starts)
    return next((stop for i, stop in ends if turns[i:stop] == prompt), None)


class ShareGpt(Messages):
    """A conversation of ShareGPT: messages with "from" and "value"."""

    name = "ShareGPT conversations"
    needs = {"messages": ("conversations", "conversation")}


class Alpaca(Form):
    """An instruction with an input, and its output."""

    name = "Alpaca's instructions"
    needs = {"instruction": ("instruction",), "answer": _ANSWER}
    takes = {**_TEMPLATES, "input": ("input", "context"), "history": ("history",)}

    def _turns(self, columns: RecordColumns) -> list[Message]:
        turns = columns.before()
        history = columns.get("history", [])
        pairs = isinstance(history, list) and all(
            isinstance(pair, list) and [*map(type, pair)] == [str, str]
            for pair in history
        )
        if not pairs:
            expected = "a list of pairs of texts, a question and its answer"
            field = f'{columns.where}: "history"'
            raise DataError(messages.must_be(field, expected, history))
        for question, answer in history:
            turns.append({"role": "user", "content": question})
            turns.append({"role": "assistant", "content": answer})
        context = columns.string("input") if "input" in columns else ""
        question = columns.string("instruction") + ("\n" + context if context else "")
        return [*turns, {"role": "user", "content": question}]

    def document(self, columns: RecordColumns) -> Document:
        answer = {"role": "assistant", "content": columns.string("answer")}
        talk = Talk([*self._turns(columns), answer], frozenset())
        return columns.document(talk, 0)

    def prompt(self, columns: RecordColumns) -> PromptText:
        return columns.asked(self._turns(columns))


class Instruction(Alpaca):
    """An instruction without an output, to be answered."""

    needs = {"instruction": ("instruction",)}


class PromptForm(Form):
    """A prompt: a text, or messages."""

    name = "prompts"
    needs = {"prompt": _PROMPT}
    takes = _TEMPLATES

    def prompt(self, columns: RecordColumns) -> PromptText:
        if isinstance(columns["prompt"], str) and not columns.is_rendered:
            prompt = columns.string("prompt")
            return PromptText(prompt, prompt, rendered=False)
        return columns.asked(columns.after_system(columns.talk("prompt", "user")).turns)


class Preference(Form):
    """A chosen and a rejected answer: texts, messages, or whole conversations."""

    name = "pairs of answers"
    needs = {"chosen": ("chosen",), "rejected": ("rejected",)}
    takes = {**_TEMPLATES, "prompt": (*_PROMPT, "instruction", *_MESSAGES)}

    def answers(self, columns: RecordColumns) -> list[Document]:
        if columns["chosen"] == columns["rejected"]:
            raise DataError(f"{columns.where}: chosen and rejected are equal")
        both = [columns["chosen"], columns["rejected"]]
        prompt = columns.get("prompt", "")
        texts = all(isinstance(x, str) for x in [*both, prompt])
        if texts and prompt and all(x.startswith(prompt) for x in both):
            both = [answer[len(prompt) :] for answer in both]
            columns.update(chosen=both[0], rejected=both[1])
            columns.note(
                "both answers begin with the prompt, which jaxmem removes from them"
            )
        if not texts or columns.is_rendered:
            return self._conversations(columns)
        return [Document(columns.where, answer, prompt) for answer in both]

    def _conversations(self, columns: RecordColumns) -> list[Document]:
        prompt = columns.talk("prompt", "user").turns if "prompt" in columns else []
        talks = [columns.answer(name, prompt) for name in ("chosen", "rejected")]
        ours, theirs = (talk.turns for talk in talks)
        differ = (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False))
                  if a != b)  # fmt: skip
        first = next(differ, None)
        if first is None:
            raise DataError(
                f"{columns.where}: chosen and rejected are equal, or one is the "
                "beginning of the other; they must differ in a message of the "
                "assistant"
            )
        return [columns.document(talk, first) for talk in talks]
