"""A checkpoint's chat template, as transformers renders it."""

import datetime
import functools
import json
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxmem import _imports
from jaxmem.base import json_files, messages
from jaxmem.data.records import DataError

Message = dict[str, Any]

# Unicode noncharacters, which no text has: they mark the ends of {% generation %}.
START, END = "\ufdd0", "\ufdd1"
# Names that are given to every template.
_GIVEN = frozenset(
    "messages tools documents add_generation_prompt raise_exception "
    "strftime_now".split()
)
_MOST_TURNS = 1_000_000  # of a template's loops
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


# A template is read at its first use, because most data do not need one.
Templates = Callable[[], "ChatTemplate"]


class ChatTemplate:
    """A Jinja template that renders conversations.

    Args:
        text: the template.
        tokens: special tokens by name, such as `bos_token`.
        where: its name in errors.
        special: special tokens that may end a turn.
        options: variables of the template, such as `enable_thinking`.
        today: the date that it may write; None: the current one.

    Attributes:
        end: a pattern of the special token that ends a turn, after its content.
        marks: whether the template says itself what is trained on.

    Raises:
        DataError: jinja2 is not installed, the template is not valid, or it reads none
            of the variables that an option names.
    """

    def __init__(
        self,
        text: str,
        tokens: Mapping[str, str],
        where: str,
        special: Iterable[str] = (),
        options: Mapping[str, Any] | None = None,
        today: datetime.datetime | None = None,
    ):
        self._tokens, self._options = dict(tokens), dict(options or {})
        ends = "|".join(map(re.escape, special))
        self.end = re.compile(rf"\s*(?:{ends})" if ends else "")
        self.marks = re.search(r"{%-?\s*generation\b", text) is not None
        self._where = where
        try:
            environment = _environment()
            from jinja2 import meta

            self._template = environment.from_string(text)
            # Those that the template reads and does not set first.
            self._variables = meta.find_undeclared_variables(environment.parse(text))
        except Exception as error:  # of jinja2, which may not be imported here
            raise DataError(f"{where}: {_reason(error)}") from error
        now = today or datetime.datetime.now()
        self._template.globals["strftime_now"] = now.strftime
        self._check(self._options)

    def _check(self, options: Mapping[str, Any]) -> None:
        """Raise for variables that the template does not read."""
        for name in options:
            if name not in self._variables:
                known = sorted(self._variables - _GIVEN - set(_NAMED_TOKENS))
                raise DataError(
                    f"{self._where}: chat_template_kwargs: the template reads no "
                    f"variable {messages.short(name)}; it reads "
                    f"{', '.join(known) or 'none'}"
                )

    def render(
        self,
        turns: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[Any] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """Render a conversation, as `tokenizer.apply_chat_template` does.

        Args:
            turns: messages with `role` and `content`.
            add_generation_prompt: whether to append the header of an assistant's turn.
            tools: schemas of the functions that may be called.
            options: variables of the template, before its own ones.

        Returns:
            The text, with marks around what `{% generation %}` encloses.

        Raises:
            DataError: the template raises.
        """
        self._check(options or {})
        try:
            return self._template.render(
                messages=list(turns),
                tools=tools or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **{**self._tokens, **self._options, **(options or {})},
            )
        except Exception as error:  # whatever the template's author raises
            raise DataError(f"the chat template says: {_reason(error)}") from error


def read_template(
    directory: str | os.PathLike[str],
    path: str | None,
    special: Iterable[str] = (),
    options: Mapping[str, Any] | None = None,
    today: datetime.datetime | None = None,
) -> ChatTemplate:
    """Read the chat template of a checkpoint, or that of a path instead.

    It is chat_template.jinja, or `chat_template` of tokenizer_config.json, whose
    special tokens it may name. The other arguments are those of `ChatTemplate`.

    Raises:
        DataError: there is no template, or it is not valid.
    """
    directory, tokens = Path(directory), {}
    described = directory / "tokenizer_config.json"
    try:
        config = json_files.read_object(described) if described.exists() else {}
    except json_files.JsonError as error:
        raise DataError(str(error)) from error
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
            reason = messages.reason(error)
            raise DataError(f"{chosen}: cannot be read: {reason}") from error
        return ChatTemplate(text, tokens, str(chosen), special, options, today)
    where = f"{described}: chat_template"
    text = config.get("chat_template")
    if isinstance(text, list):  # several, by name
        named = {t.get("name"): t.get("template") for t in text if isinstance(t, dict)}
        text = named.get("default")
    if not isinstance(text, str):
        raise DataError(
            f"{directory} has no chat template, neither in chat_template.jinja nor in "
            "tokenizer_config.json; add one, or give a job its path by "
            "data.chat_template"
        )
    return ChatTemplate(text, tokens, where, special, options, today)


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
            f"{_imports.how_to_install('train')}"
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
            return f"{START}{caller()}{END}"

    environment = _counting(jinja2, nodes, sandbox)(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    return environment


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """JSON without the HTML escapes of jinja2's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
        sort_keys=sort_keys,
    )  # fmt: skip


def _reason(error: Exception) -> str:
    line = getattr(error, "lineno", None)
    message = messages.cut(str(error) or type(error).__name__)
    return f"{message} (line {line})" if line else message
