"""Conversations to text, by a checkpoint's chat template, as transformers renders it.

messages -> template -> text, and the spans of characters that an assistant wrote
"""

import datetime
import functools
import json
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxmem.core import json_files, messages
from jaxmem.data.records import DataError

Message = dict[str, Any]
Span = tuple[int, int]  # first character, and the one after the last

# Unicode noncharacters, which no text has: they mark the ends of {% generation %}.
_START, _END = "\ufdd0", "\ufdd1"
_FILLER = range(0xE000, 0xF900)  # private-use characters, most of which no text has
_MOST_TURNS = 1_000_000  # of a template's loops
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


# A template is read at its first use, because most data do not need one.
Templates = Callable[[], "ChatTemplate"]


class Rendered(NamedTuple):
    """A conversation as text, with the characters that the loss counts."""

    text: str
    counted: tuple[Span, ...]


class ChatTemplate:
    """A Jinja template that renders conversations.

    Args:
        text: the template.
        tokens: special tokens by name, such as `bos_token`.
        where: its name in errors.
        special: special tokens that may end a turn.

    Raises:
        DataError: jinja2 is not installed, or the template is not valid.
    """

    def __init__(
        self,
        text: str,
        tokens: Mapping[str, str],
        where: str,
        special: Iterable[str] = (),
    ):
        self._tokens = dict(tokens)
        ends = "|".join(map(re.escape, special))
        self._end = re.compile(rf"\s*(?:{ends})" if ends else "")
        self._marks = re.search(r"{%-?\s*generation\b", text) is not None
        try:
            self._template = _environment().from_string(text)
        except Exception as error:  # of jinja2, which may not be imported here
            raise DataError(f"{where}: {_reason(error)}") from error

    def render(
        self, conversation: Sequence[Message], *, add_generation_prompt: bool = False
    ) -> str:
        """Render a conversation, as `tokenizer.apply_chat_template` does.

        Args:
            conversation: messages with `role` and `content`.
            add_generation_prompt: whether to append the header of an assistant's turn.

        Returns:
            The text.

        Raises:
            DataError: the template raises.
        """
        text = self._marked(conversation, add_generation_prompt)
        return text.replace(_START, "").replace(_END, "")

    def _marked(
        self, conversation: Sequence[Message], add_generation_prompt: bool
    ) -> str:
        try:
            return self._template.render(
                messages=list(conversation),
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._tokens,
            )
        except Exception as error:  # whatever the template's author raises
            raise DataError(f"the chat template says: {_reason(error)}") from error

    def render_counted(
        self, conversation: Sequence[Message], first: int = 0
    ) -> Rendered:
        """Render a conversation, and find the spans that its assistant turns wrote.

        A turn starts where the template's generation prompt ends, and includes the
        special token that ends it. A template with `{% generation %}` defines turns
        itself.

        Args:
            conversation: messages with `role` and `content`.
            first: number of the first message whose turn may count.

        Returns:
            The text, and spans of characters in increasing order.

        Raises:
            DataError: the template raises.
        """
        marked = self._marked(conversation, False)
        text = marked.replace(_START, "").replace(_END, "")
        turns = [i for i, m in enumerate(conversation) if m["role"] == "assistant"]
        if self._marks:
            spans = _marked_spans(marked)
            skipped = sum(i < first for i in turns)
            return Rendered(text, tuple(spans[skipped:]))
        counted = [self._span(conversation, i, text) for i in turns if i >= first]
        return Rendered(text, tuple(span for span in counted if span is not None))

    def _span(self, conversation: Sequence[Message], i: int, text: str) -> Span | None:
        """The span of the text that changes if the turn's content does."""
        filler = next(chr(c) for c in _FILLER if chr(c) not in text)
        other = [*conversation]
        other[i] = {"role": "assistant", "content": filler}
        changed = self.render(other)
        if changed == text:  # the template omits the turn
            return None
        start = len(os.path.commonprefix([text, changed]))
        stop = len(text) - len(os.path.commonprefix([text[::-1], changed[::-1]]))
        start = self._after_prompt(conversation[:i], text, start)
        end = self._end.match(text, stop)
        return (start, end.end() if end else stop)

    def _after_prompt(self, before: Sequence[Message], text: str, start: int) -> int:
        """The end of the generation prompt, if it is before the content."""
        try:
            prompt = self.render(before, add_generation_prompt=True)
            asks = prompt != self.render(before)
        except DataError:  # some templates reject a truncated conversation
            return start
        if len(prompt) > start or not text.startswith(prompt):
            return start
        # A template without a generation prompt may still write a header.
        return len(prompt) if asks or not text[len(prompt) : start].strip() else start


def read_template(
    directory: str | os.PathLike[str], path: str | None, special: Iterable[str] = ()
) -> ChatTemplate:
    """Read the chat template of a checkpoint.

    Args:
        directory: of the checkpoint: chat_template.jinja, or `chat_template` of
            tokenizer_config.json, whose special tokens the template may name.
        path: of a template to use instead, or None.
        special: special tokens that may end a turn.

    Returns:
        The template.

    Raises:
        DataError: there is no template, or it is not valid.
    """
    directory = Path(directory)
    config = _optional_object(directory / "tokenizer_config.json")
    tokens = {}
    for name in _NAMED_TOKENS:
        token = config.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            tokens[name] = token
    own = directory / "chat_template.jinja"
    chosen = Path(path).expanduser() if path else own
    if path or own.exists():
        try:
            text = json_files.read_text(chosen)
        except (OSError, json_files.JsonError) as error:
            reason = getattr(error, "strerror", None) or error
            raise DataError(f"{chosen}: cannot be read: {reason}") from error
        return ChatTemplate(text, tokens, str(chosen), special)
    where = directory / "tokenizer_config.json"
    text = _default_template(config.get("chat_template"))
    if text is None:
        raise DataError(
            f"{directory} has no chat template, neither in chat_template.jinja nor in "
            "tokenizer_config.json; set data.chat_template to the path of one"
        )
    return ChatTemplate(text, tokens, f"{where}: chat_template", special)


def _optional_object(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return json_files.read_object(path)
    except json_files.JsonError as error:
        raise DataError(str(error)) from error


def _default_template(value: Any) -> str | None:
    """The template, which may be one of several in a list."""
    if isinstance(value, list):
        named = {t.get("name"): t.get("template") for t in value if isinstance(t, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None


# -------------------------------------------------------------------- jinja2


def _counting(jinja2, nodes, sandbox) -> Any:
    """A sandbox whose templates end after a number of turns of all their loops."""
    turns = threading.local()

    class Template(jinja2.Template):
        def render(self, *arguments, **named):
            turns.count = 0
            return super().render(*arguments, **named)

    def counted(items):
        for item in items:
            turns.count += 1
            if turns.count > _MOST_TURNS:
                reason = f"its loops take more than {_MOST_TURNS:,} turns"
                raise jinja2.exceptions.TemplateError(reason)
            yield item

    class Environment(sandbox.ImmutableSandboxedEnvironment):
        template_class = Template

        def from_string(self, source, *arguments, **named):
            tree = self.parse(source)
            for loop in tree.find_all(nodes.For):
                given = loop.iter, "counted", [], [], None, None
                loop.iter = nodes.Filter(*given, lineno=loop.lineno)
            return super().from_string(tree, *arguments, **named)

        def __init__(self, **options):
            super().__init__(**options)
            self.filters["counted"] = counted

    return Environment


@functools.cache
def _environment() -> Any:
    """Return a sandbox like that of transformers, for which templates are written."""
    try:
        import jinja2
        from jinja2 import ext, nodes, sandbox
    except ModuleNotFoundError as error:
        raise DataError(
            "a chat template needs jinja2, which is not installed; run: "
            "pip install 'jaxmem[train]'"
        ) from error

    class Generation(ext.Extension):
        """`{% generation %} ... {% endgeneration %}`, around what is trained on."""

        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("mark")
            return nodes.CallBlock(call, [], [], body).set_lineno(line)

        def mark(self, caller):
            return f"{_START}{caller()}{_END}"

    environment = _counting(jinja2, nodes, sandbox)(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception(jinja2)
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """JSON without the HTML escapes of jinja2's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
        sort_keys=sort_keys,
    )  # fmt: skip


def _raise_exception(jinja2):
    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    return raise_exception


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _reason(error: Exception) -> str:
    line = getattr(error, "lineno", None)
    message = messages.cut(str(error) or type(error).__name__)
    return f"{message} (line {line})" if line else message


def _marked_spans(marked: str) -> list[Span]:
    """Spans between marks, as positions in the text without marks."""
    spans, start, removed = [], 0, 0
    for place, character in enumerate(marked):
        if character == _START:
            start = place - removed
        elif character == _END:
            spans.append((start, place - removed))
        removed += character in (_START, _END)
    return spans
