"""A checkpoint's chat template, as transformers renders it."""

import datetime
import functools
import json
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxmem.base import imports, json_files, messages
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
_MOST_SECONDS = 30  # of the rendering of a conversation
_MOST_CHARACTERS = 2**28  # of a text that a template makes
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
        with_tools: returns the template of conversations with tools, at its first use;
            None: there is no other.

    Attributes:
        where: its name in errors.
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
        with_tools: "Templates | None" = None,
    ):
        self._with_tools = with_tools
        self._tokens, self._options = dict(tokens), dict(options or {})
        ends = "|".join(map(re.escape, special))
        self.end = re.compile(rf"\s*(?:{ends})" if ends else "")
        self.marks = re.search(r"{%-?\s*generation\b", text) is not None
        self.where = where
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

    def of(self, tools: Sequence[Any] | None) -> "ChatTemplate":
        """The template that renders conversations with these tools."""
        return self._with_tools() if tools and self._with_tools is not None else self

    def _check(self, options: Mapping[str, Any]) -> None:
        """Raise for variables that the template does not read."""
        for name in options:
            if name not in self._variables:
                known = sorted(self._variables - _GIVEN - set(_NAMED_TOKENS))
                raise DataError(
                    f"{self.where}: chat_template_kwargs: the template reads no "
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
        chosen = self.of(tools)
        if chosen is not self:
            return chosen.render(
                turns,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                options=options,
            )
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
    special tokens it may name. Of several named ones (additional_chat_templates/ has
    more) it is "default", and "tool_use", if there is one, where tools are given. The
    other arguments are those of `ChatTemplate`.

    Raises:
        DataError: there is no template, none is the default, or one is not valid.
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
    if path:
        texts = {"default": _written(Path(path).expanduser())}
    else:
        texts = _named(directory, config.get("chat_template"))

    def made(name: str, with_tools: Templates | None = None) -> ChatTemplate:
        text, where = texts[name]
        return ChatTemplate(text, tokens, where, special, options, today, with_tools)

    if "default" in texts:
        with_tools = functools.cache(functools.partial(made, "tool_use"))
        return made("default", with_tools if "tool_use" in texts else None)
    lacks = f"{directory} has no chat template, neither in chat_template.jinja nor in "
    lacks += "tokenizer_config.json"
    if texts:
        lacks = f"{directory} has the chat templates {messages.listing(texts)}, and "
        lacks += 'none is "default"'
    raise DataError(f"{lacks}; add one, or give a job its path by data.chat_template")


def _written(path: Path) -> tuple[str, str]:
    """The text of a template in a file, and its name in errors."""
    try:
        return json_files.read_text(path), str(path)
    except (OSError, json_files.JsonError) as error:
        reason = messages.reason(error)
        raise DataError(f"{path}: cannot be read: {reason}") from error


def _named(directory: Path, described: Any) -> dict[str, tuple[str, str]]:
    """Texts of a checkpoint's templates by name, with their names in errors."""
    own = directory / "chat_template.jinja"
    more = sorted((directory / "additional_chat_templates").glob("*.jinja"))
    if own.exists() or more:  # before those of tokenizer_config.json
        paths = {path.stem: path for path in more}
        paths |= {"default": own} if own.exists() else {}
        return {name: _written(path) for name, path in paths.items()}
    where = f"{directory / 'tokenizer_config.json'}: chat_template"
    if isinstance(described, str):
        return {"default": (described, where)}
    listed = described if isinstance(described, list) else []
    given = {x.get("name"): x.get("template") for x in listed if isinstance(x, dict)}
    return {
        name: (text, f"{where} {name!r}")
        for name, text in given.items()
        if isinstance(name, str) and isinstance(text, str)
    }


# -------------------------------------------------------------------- jinja2


class _Budget(threading.local):
    """The turns taken, and the end of the time, of the rendering in this thread."""

    turns, ends = 0, math.inf

    def start(self) -> None:
        self.turns, self.ends = 0, time.monotonic() + _MOST_SECONDS

    def check(self, size: int = 0) -> None:
        """Raise a ValueError for a long text, or where the time is over."""
        if size > _MOST_CHARACTERS:
            raise ValueError(f"it makes a text of {size:,} characters")
        if time.monotonic() > self.ends:
            raise ValueError(f"it takes more than {_MOST_SECONDS} seconds")

    def turn(self) -> None:
        """Count a turn of a loop."""
        self.turns += 1
        if self.turns > _MOST_TURNS:
            raise ValueError(f"its loops take more than {_MOST_TURNS:,} turns")
        self.check()


def _bounded(jinja2, nodes, sandbox) -> Any:
    """A sandbox whose templates end: turns, seconds and lengths of texts are bounded.

    Each operation of a template is checked before it runs; those that may take long
    for a short text (`urlize`, `wordwrap`, `lipsum`) are left out.
    """
    budget = _Budget()

    class Template(jinja2.Template):
        def render(self, *arguments, **named):
            budget.start()
            return super().render(*arguments, **named)

    class Bounds(jinja2.visitor.NodeTransformer):
        """Counts the turns of loops, and has `~` done by the filter `join`."""

        def visit_For(self, node, *arguments):
            self.generic_visit(node, *arguments)
            given = node.iter, "counted", [], [], None, None
            node.iter = nodes.Filter(*given, lineno=node.lineno)
            return node

        def visit_Concat(self, node, *arguments):
            self.generic_visit(node, *arguments)
            given = nodes.List(node.nodes), "join", [], [], None, None
            return nodes.Filter(*given, lineno=node.lineno)

    def counted(items):
        for item in items:
            budget.turn()
            yield item

    @jinja2.pass_eval_context
    def join(context, value, d="", attribute=None):
        value = list(value)
        budget.check(_joined(d, value))
        return jinja2.filters.do_join(context, value, d, attribute)

    @jinja2.pass_eval_context
    def replace(context, s, old, new, count=None):
        budget.check(_replaced(s, new, count))
        return jinja2.filters.do_replace(context, s, old, new, count)

    def center(value, width=80):
        budget.check(width if isinstance(width, int) else 0)
        return jinja2.filters.do_center(value, width)

    class Environment(sandbox.ImmutableSandboxedEnvironment):
        template_class = Template
        intercepted_binops = frozenset(("+", "*", "**"))

        def __init__(self, **options):
            super().__init__(**options)
            self.filters.update(counted=counted, join=join)
            self.filters.update(replace=replace, center=center)
            for name in ("urlize", "wordwrap"):
                del self.filters[name]
            del self.globals["lipsum"]

        def from_string(self, source, *arguments, **named):
            tree = Bounds().visit(self.parse(source))
            return super().from_string(tree, *arguments, **named)

        def call_binop(self, context, operator, left, right):
            budget.check(_length_of(operator, left, right))
            return super().call_binop(context, operator, left, right)

        def call(self, context, obj, *arguments, **named):
            budget.check(_length_of_call(obj, arguments))
            return super().call(context, obj, *arguments, **named)

    return Environment


def _joined(separator: Any, parts: Sequence[Any]) -> int:
    """Characters of joined texts, at least."""
    own = sum(len(part) for part in parts if isinstance(part, str))
    return own + len(str(separator)) * len(parts)


def _replaced(text: Any, new: Any, count: Any) -> int:
    """Characters of a text in which something is replaced, at most."""
    times = len(str(text)) + 1
    if isinstance(count, int) and count >= 0:
        times = min(times, count)
    return len(str(text)) + times * len(str(new))


def _length_of(operator: str, left: Any, right: Any) -> int:
    """The length of the result of an operator, or the bytes of a power."""
    sized = str, list, tuple
    if operator == "+" and isinstance(left, sized) and isinstance(right, sized):
        return len(left) + len(right)
    if operator == "*":
        for items, times in ((left, right), (right, left)):
            if isinstance(items, sized) and isinstance(times, int):
                return len(items) * max(times, 0)
    if operator == "**" and isinstance(left, int) and isinstance(right, int):
        return left.bit_length() * max(right, 0) // 8
    return 0


def _length_of_call(function: Any, arguments: Sequence[Any]) -> int:
    """The length of the result of a text's method, where that may be large."""
    text, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    if not isinstance(text, str) or not arguments:
        return 0
    first, *more = arguments
    if name == "join" and isinstance(first, (list, tuple)):
        return _joined(text, first)
    if name == "replace" and more:
        return _replaced(text, more[0], more[1] if len(more) > 1 else None)
    is_wide = name in ("center", "ljust", "rjust", "zfill") and isinstance(first, int)
    return first if is_wide else 0


@functools.cache
def _environment() -> Any:
    """Return a sandbox like that of transformers, for which templates are written."""
    try:
        import jinja2
        from jinja2 import ext, nodes, sandbox
    except ModuleNotFoundError as error:
        raise DataError(
            "a chat template needs jinja2, which is not installed; run: "
            f"{imports.how_to_install('train')}"
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

    environment = _bounded(jinja2, nodes, sandbox)(
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
