"""What a record is, by its columns: one object a form.

A form has the columns that it needs, those that it takes besides, and what it makes of
them: a document of supervised training, two answers to one prompt, or a prompt.
"""

import abc
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from jaxmem.base import messages
from jaxmem.data.chat import Message
from jaxmem.data.records import DataError
from jaxmem.data.rendering import Conversation, Rendered, Span
from jaxmem.data.turns import Talk, talk_of, tools_of

_PROMPT = ("prompt", "question", "query")
_ANSWER = ("completion", "response", "output", "answer")
_MESSAGES = ("messages", "conversations", "conversation")
_TEMPLATES = {
    "system": ("system", "system_prompt"),
    "tools": ("tools", "functions"),
    "options": ("chat_template_kwargs",),
}


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


class Asked(NamedTuple):
    """What a model is to answer: a text, or a conversation and its text."""

    prompt: str | list[Message]
    text: str
    rendered: bool  # whether the text has all special tokens, being a template's


class Renders(Protocol):
    """What a form needs to render conversations."""

    @property
    def ignored(self) -> Collection[str]:
        """Keys of messages that are left out."""
        ...

    def counted(self, talk: Conversation, where: str) -> Rendered:
        """A conversation and the spans that the loss counts."""
        ...

    def asked(self, talk: Conversation, where: str) -> str:
        """A conversation up to the answer."""
        ...


class Columns:
    """The columns of one record, under the names that a form gives them."""

    def __init__(self, where: str, values: Mapping[str, Any], names: Mapping[str, str]):
        self.where, self._values, self.names = where, values, names

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def string(self, name: str) -> str:
        """A column that must be a string."""
        value = self._values[name]
        if not isinstance(value, str):
            raise DataError(
                f'{self.where}: "{self.names[name]}" must be a string, got '
                f"{messages.short(value)}"
            )
        return value

    def talk(self, name: str, renders: Renders) -> Talk:
        """A column that must be messages."""
        key = self.names[name]
        return talk_of(self.where, key, self._values[name], renders.ignored)

    def before(self) -> list[Message]:
        """The message of the system, if the record has one of its own."""
        if "system" not in self:
            return []
        return [{"role": "system", "content": self.string("system")}]

    def conversation(
        self, turns: Sequence[Message], counted: Collection[int] = ()
    ) -> Conversation:
        """Messages, and what the record has for the template besides."""
        options = self["options"] if "options" in self else None
        if options is not None and not isinstance(options, dict):
            raise DataError(
                f"{self.where}: chat_template_kwargs must be an object, got "
                f"{messages.short(options)}"
            )
        tools = tools_of(self.where, self["tools"]) if "tools" in self else None
        return Conversation(turns, frozenset(counted), tools, options)


class Form(abc.ABC):
    """A kind of record."""

    name: str  # as in "read as ..."
    needs: Mapping[str, tuple[str, ...]]  # names of columns, with their spellings
    takes: Mapping[str, tuple[str, ...]] = {}  # those that may be missing

    def names(self, keys: Collection[str]) -> dict[str, str] | None:
        """The columns of this form among those of a record; None if it is another."""
        chosen = {}
        for name, spellings in {**self.needs, **self.takes}.items():
            found = next((spelling for spelling in spellings if spelling in keys), None)
            if found is not None:
                chosen[name] = found
            elif name in self.needs:
                return None
        return chosen


class DocumentForm(Form):
    """Records of supervised training."""

    @abc.abstractmethod
    def document(self, columns: Columns, renders: Renders) -> Document:
        """The document of a record."""


class PromptForm(Form):
    """Records that ask something."""

    @abc.abstractmethod
    def prompt(self, columns: Columns, renders: Renders) -> Asked:
        """What is asked."""


class PairForm(Form):
    """Records of a chosen and a rejected answer."""

    @abc.abstractmethod
    def answers(self, columns: Columns, renders: Renders) -> list[Document]:
        """The documents of both."""


def document_of_turns(
    columns: Columns, talk: Talk, first: int, renders: Renders
) -> Document:
    """Render messages; the loss counts assistant turns from message `first` on."""
    turns, where = talk.turns, columns.where
    assistants = [i for i, t in enumerate(turns) if t["role"] == "assistant"]
    counted = [i for i in assistants if i >= first and i not in talk.muted]
    if not any(i >= first for i in assistants):
        raise DataError(f"{where}: no message has the role 'assistant'")
    text, spans = renders.counted(columns.conversation(turns, counted), where)
    if counted and not any(start < stop for start, stop in spans):
        raise DataError(f"{where}: the chat template writes no assistant turn")
    return Document(where, text, counted=spans)


def _asked(columns: Columns, turns: list[Message], renders: Renders) -> Asked:
    text = renders.asked(columns.conversation(turns), columns.where)
    return Asked(turns, text, rendered=True)


class Text(DocumentForm):
    """A text, of which every token counts."""

    name = "texts"
    needs = {"text": ("text",)}

    def document(self, columns: Columns, renders: Renders) -> Document:
        return Document(columns.where, columns.string("text"))


class Answered(DocumentForm):
    """A prompt and its answer: two texts, or two lists of messages."""

    name = "prompts and answers"
    needs = {"prompt": _PROMPT, "answer": _ANSWER}
    takes = _TEMPLATES

    def document(self, columns: Columns, renders: Renders) -> Document:
        before, after = columns["prompt"], columns["answer"]
        if isinstance(before, list) or isinstance(after, (list, dict)):
            return self._of_messages(columns, renders)
        if "system" not in columns:
            answer = columns.string("answer")
            return Document(columns.where, answer, columns.string("prompt"))
        turns = [
            *columns.before(),
            {"role": "user", "content": columns.string("prompt")},
            {"role": "assistant", "content": columns.string("answer")},
        ]
        return document_of_turns(columns, Talk(turns, frozenset()), 2, renders)

    def _of_messages(self, columns: Columns, renders: Renders) -> Document:
        asked = [*columns.before(), *messages_of(columns, "prompt", "user", renders)]
        after = answer_of(columns, "answer", renders)
        muted = frozenset(len(asked) + i for i in after.muted)
        talk = Talk([*asked, *after.turns], muted)
        return document_of_turns(columns, talk, len(asked), renders)


def messages_of(
    columns: Columns, name: str, role: str, renders: Renders
) -> list[Message]:
    """Messages of a column, or the one that a text is."""
    value = columns[name]
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return columns.talk(name, renders).turns


def answer_of(columns: Columns, name: str, renders: Renders) -> Talk:
    """The messages of an answer, or the one that a text is."""
    if isinstance(columns[name], str):
        turn = {"role": "assistant", "content": columns[name]}
        return Talk([turn], frozenset())
    return columns.talk(name, renders)


class Messages(DocumentForm, PromptForm):
    """A conversation."""

    name = "conversations"
    needs = {"messages": ("messages",)}
    takes = {**_TEMPLATES, "prompt": _PROMPT}

    def _talk(self, columns: Columns, renders: Renders) -> Talk:
        turns, muted = columns.talk("messages", renders)
        if before := columns.before():
            if turns[0]["role"] == "system":
                raise DataError(
                    f'{columns.where}: "{columns.names["system"]}" and a message both '
                    "have the role 'system'; remove one, or name the column in "
                    "data.ignored"
                )
            turns, muted = before + turns, frozenset(i + 1 for i in muted)
        if "prompt" in columns:
            asked = messages_of(columns, "prompt", "user", renders)
            if not _begins(turns, asked):
                raise DataError(
                    f"{columns.where}: the messages do not begin with "
                    f'"{columns.names["prompt"]}"; remove it, or name it in '
                    "data.ignored"
                )
        return Talk(turns, muted)

    def document(self, columns: Columns, renders: Renders) -> Document:
        return document_of_turns(columns, self._talk(columns, renders), 0, renders)

    def prompt(self, columns: Columns, renders: Renders) -> Asked:
        turns = self._talk(columns, renders).turns
        if turns[-1]["role"] == "assistant":
            turns = turns[:-1]
        if not turns:
            raise DataError(f"{columns.where}: no message asks anything")
        return _asked(columns, turns, renders)


def _begins(turns: Sequence[Message], asked: Sequence[Message]) -> bool:
    """Whether messages begin with those of a prompt, after the system's if any."""
    starts = (0, 1) if turns[0]["role"] == "system" else (0,)
    wanted = list(asked)
    return any(list(turns[i : i + len(wanted)]) == wanted for i in starts)


class ShareGpt(Messages):
    """A conversation of ShareGPT: messages with "from" and "value"."""

    name = "ShareGPT conversations"
    needs = {"messages": ("conversations", "conversation")}


class Alpaca(DocumentForm, PromptForm):
    """An instruction with an input, and its output."""

    name = "Alpaca's instructions"
    needs = {"instruction": ("instruction",), "answer": _ANSWER}
    takes = {**_TEMPLATES, "input": ("input", "context"), "history": ("history",)}

    def _turns(self, columns: Columns) -> list[Message]:
        turns = columns.before()
        history = columns["history"] if "history" in columns else []
        pairs = isinstance(history, list) and all(
            isinstance(pair, list) and len(pair) == 2 for pair in history
        )
        if not pairs:
            raise DataError(
                f'{columns.where}: "history" must be a list of pairs of a question and '
                f"its answer, got {messages.short(history)}"
            )
        for question, answer in history:
            turns.append({"role": "user", "content": question})
            turns.append({"role": "assistant", "content": answer})
        given = columns.string("input") if "input" in columns else ""
        asked = columns.string("instruction") + ("\n" + given if given else "")
        return [*turns, {"role": "user", "content": asked}]

    def document(self, columns: Columns, renders: Renders) -> Document:
        turns = self._turns(columns)
        answer = {"role": "assistant", "content": columns.string("answer")}
        talk = Talk([*turns, answer], frozenset())
        return document_of_turns(columns, talk, 0, renders)

    def prompt(self, columns: Columns, renders: Renders) -> Asked:
        return _asked(columns, self._turns(columns), renders)


class Instruction(Alpaca):
    """An instruction without an output, to be answered."""

    needs = {"instruction": ("instruction",)}


class Prompt(PromptForm):
    """A prompt: a text, or messages."""

    name = "prompts"
    needs = {"prompt": _PROMPT}
    takes = _TEMPLATES

    def prompt(self, columns: Columns, renders: Renders) -> Asked:
        if isinstance(columns["prompt"], str) and "system" not in columns:
            prompt = columns.string("prompt")
            return Asked(prompt, prompt, rendered=False)
        turns = messages_of(columns, "prompt", "user", renders)
        return _asked(columns, [*columns.before(), *turns], renders)


class Preference(PairForm):
    """A chosen and a rejected answer: texts, messages, or whole conversations."""

    name = "pairs of answers"
    needs = {"chosen": ("chosen",), "rejected": ("rejected",)}
    takes = {**_TEMPLATES, "prompt": (*_PROMPT, "instruction", *_MESSAGES)}

    def answers(self, columns: Columns, renders: Renders) -> list[Document]:
        if columns["chosen"] == columns["rejected"]:
            raise DataError(f"{columns.where}: chosen and rejected are equal")
        both = [columns["chosen"], columns["rejected"]]
        asked = columns["prompt"] if "prompt" in columns else ""
        if "system" in columns or not all(isinstance(x, str) for x in [*both, asked]):
            return self._conversations(columns, renders)
        chosen, rejected = (columns.string(name) for name in ("chosen", "rejected"))
        if asked and chosen.startswith(asked) and rejected.startswith(asked):
            chosen, rejected = chosen[len(asked) :], rejected[len(asked) :]
        return [Document(columns.where, x, asked) for x in (chosen, rejected)]

    def _conversations(self, columns: Columns, renders: Renders) -> list[Document]:
        talks = [answer_of(columns, name, renders) for name in ("chosen", "rejected")]
        before = columns.before()
        if "prompt" in columns:
            asked = messages_of(columns, "prompt", "user", renders)
            whole = [_begins(talk.turns, asked) for talk in talks]
            if whole[0] != whole[1]:
                raise DataError(
                    f"{columns.where}: one of chosen and rejected begins with the "
                    "prompt, and the other does not"
                )
            before = before if whole[0] else [*before, *asked]
        talks = [
            Talk([*before, *t.turns], frozenset(len(before) + i for i in t.muted))
            for t in talks
        ]
        ours, theirs = (talk.turns for talk in talks)
        differ = (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False))
                  if a != b)  # fmt: skip
        first = next(differ, min(len(ours), len(theirs)))
        return [document_of_turns(columns, talk, first, renders) for talk in talks]
