"""A checkpoint's chat template, as transformers renders it."""

import datetime
import functools
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxmem.base import imports, json_files, messages
from jaxmem.checkpoints.directories import named_templates
from jaxmem.data.records import DataError
from jaxmem.data.rendering_budget import RenderingBoundError

Message = dict[str, Any]

# Unicode noncharacters, which no text has: they mark the ends of {% generation %}.
START, END = "\ufdd0", "\ufdd1"
# Names that are given to every template.
_GIVEN = frozenset(
    "messages tools documents add_generation_prompt raise_exception "
    "strftime_now".split()
)
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
        special: the special tokens that may end a turn.
        end: a pattern of the special token that ends a turn, after its content.
        marks: True if the template marks by `{% generation %}` what is trained on.

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
        self.special = tuple(special)
        ends = "|".join(map(re.escape, self.special))
        self.end = re.compile(rf"\s*(?:{ends})" if ends else "")
        self.marks = re.search(r"{%-?\s*generation\b", text) is not None
        self.where = where
        try:
            sandbox, environment = _environment()
            self._template = environment.from_string(text)
            self._variables = sandbox.variables(environment, text)
        except Exception as error:  # of jinja2, which may not be imported here
            raise DataError(f"{where}: {_reason(error)}") from error
        now = today or datetime.datetime.now()
        self._template.globals["strftime_now"] = now.strftime
        self._check_options(self._options)

    def of(self, tools: Sequence[Any] | None) -> "ChatTemplate":
        """The template that renders conversations with these tools."""
        return self._with_tools() if tools and self._with_tools is not None else self

    def _check_options(self, options: Mapping[str, Any]) -> None:
        """Raise for variables that the template does not read."""
        for name in options:
            if name not in self._variables:
                known = sorted(self._variables - _GIVEN - set(_NAMED_TOKENS))
                raise DataError(
                    f"{self.where}: chat_template_kwargs: the template does not read "
                    f"the variable {messages.short(name)}; it reads "
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
            add_generation_prompt: True to append the header of an assistant's turn.
            tools: schemas of the functions that may be called.
            options: variables of the template, before its own ones.

        Returns:
            The text, with marks around what `{% generation %}` encloses.

        Raises:
            DataError: the template raises, or takes more turns, time or characters than
            a rendering has.
        """
        chosen = self.of(tools)
        if chosen is not self:
            return chosen.render(
                turns,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                options=options,
            )
        self._check_options(options or {})
        try:
            return self._template.render(
                messages=list(turns),
                tools=tools or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **{**self._tokens, **self._options, **(options or {})},
            )
        except Exception as error:  # whatever the template's author raises
            of_bound = isinstance(error, RenderingBoundError)
            said = self.where if of_bound else "the chat template says"
            raise DataError(f"{said}: {_reason(error)}") from error


def read_template(
    directory: str | os.PathLike[str],
    path: str | None,
    special: Iterable[str] = (),
    options: Mapping[str, Any] | None = None,
    today: datetime.datetime | None = None,
) -> ChatTemplate:
    """Read the chat template of a checkpoint, or of a path instead.

    It is chat_template.jinja, or `chat_template` of tokenizer_config.json, whose
    special tokens it may name. Of several named ones (additional_chat_templates/ has
    more) it is "default", and "tool_use", if there is one, where tools are given. The
    other arguments are as in `ChatTemplate`.

    Raises:
        DataError: there is no template, none is the default, or one is not valid.
    """
    directory, tokens = Path(directory), {}
    config = _read_tokenizer_config(directory)
    for name in _NAMED_TOKENS:
        token = config.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            tokens[name] = token
    if path:
        texts = {"default": _read_text(Path(path).expanduser())}
    else:
        texts = _read_named(directory, config.get("chat_template"))

    def template(name: str, with_tools: Templates | None = None) -> ChatTemplate:
        text, where = texts[name]
        return ChatTemplate(text, tokens, where, special, options, today, with_tools)

    if "default" in texts:
        with_tools = functools.cache(functools.partial(template, "tool_use"))
        return template("default", with_tools if "tool_use" in texts else None)
    lacks = f"{directory} has no chat template in chat_template.jinja or in "
    lacks += "tokenizer_config.json"
    if texts:
        lacks = f"{directory} has the chat templates {messages.listing(texts)}, but "
        lacks += 'none is "default"'
    raise DataError(f"{lacks}; add one, or data.chat_template=FILE.jinja to a job")


def template_text(directory: str | os.PathLike[str]) -> str | None:
    """The text of a checkpoint's chat template; None without one.

    Raises:
        DataError: a file that may have one cannot be read.
    """
    directory = Path(directory).expanduser()
    described = _read_tokenizer_config(directory).get("chat_template")
    text, _ = _read_named(directory, described).get("default", (None, None))
    return text


def _read_tokenizer_config(directory: Path) -> dict[str, Any]:
    path = directory / "tokenizer_config.json"
    try:
        return json_files.read_object(path) if path.exists() else {}
    except json_files.JsonError as error:
        raise DataError(str(error)) from error


def _read_text(path: Path) -> tuple[str, str]:
    """The text of a template in a file, and the template's name in errors."""
    try:
        return json_files.read_text(path), str(path)
    except (OSError, json_files.JsonError) as error:
        reason = messages.reason(error)
        raise DataError(f"{path}: cannot be read: {reason}") from error


def _read_named(directory: Path, described: Any) -> dict[str, tuple[str, str]]:
    """(text, name in errors) of a checkpoint's templates, by name.

    `described` is `chat_template` of tokenizer_config.json.
    """
    own = directory / "chat_template.jinja"
    more = named_templates(directory)
    if own.exists() or more:  # before those of tokenizer_config.json
        paths = {path.stem: path for path in more}
        paths |= {"default": own} if own.exists() else {}
        return {name: _read_text(path) for name, path in paths.items()}
    where = f"{directory / 'tokenizer_config.json'}: chat_template"
    if isinstance(described, str):
        return {"default": (described, where)}
    listed = described if isinstance(described, list) else []
    texts = {x.get("name"): x.get("template") for x in listed if isinstance(x, dict)}
    return {
        name: (text, f"{where} {name!r}")
        for name, text in texts.items()
        if isinstance(name, str) and isinstance(text, str)
    }


@functools.cache
def _environment() -> tuple[Any, Any]:
    """Return the module of the sandbox, and a sandbox, if jinja2 is installed."""
    try:
        from jaxmem.data import template_sandbox
    except ModuleNotFoundError as error:
        raise DataError(
            "a chat template needs jinja2, which is not installed; run: "
            f"{imports.how_to_install('train')}"
        ) from error
    return template_sandbox, template_sandbox.bounded_environment((START, END))


def _reason(error: Exception) -> str:
    line = getattr(error, "lineno", None)
    message = messages.cut(str(error) or type(error).__name__)
    return f"{message} (line {line})" if line else message
