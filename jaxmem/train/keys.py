"""All keys of a configuration: type, default and a one-line description."""

import dataclasses
import inspect
import io
import tokenize
from collections.abc import Iterator, Mapping
from typing import Any, get_type_hints

from jaxmem.base import user_code
from jaxmem.base.fields import describe
from jaxmem.train.settings import JobConfig


def lines(sections: Mapping[str, type], selected: str | None = None) -> Iterator[str]:
    """Yield a line per key, of one section or of all: name, default, type, comment."""
    if selected is not None and selected not in sections:
        raise ValueError(
            f"--keys: no section {selected!r}; the sections are {', '.join(sections)}"
        )
    for section, dataclass in sections.items():
        if selected in (None, section):
            yield from _describe_section(section, dataclass)


def _describe_section(section: str, dataclass: Any) -> Iterator[str]:
    comments, types = _read_comments(dataclass), get_type_hints(dataclass)
    yield f"# {section}: {(dataclass.__doc__ or '').splitlines()[0]}"
    for field in dataclasses.fields(dataclass):
        name = f"{section}.{field.name}"
        kind = user_code.choices(field) or describe(types[field.name])
        about = f"{kind}; {comments.get(field.name, '')}"
        yield f"{name} = {field.default!r}  # {about.rstrip('; ')}"


def _read_comments(dataclass: type) -> dict[str, str]:
    """Comments above or behind each field, from the class's source."""
    source = inspect.getsource(dataclass)
    names = {field.name for field in dataclasses.fields(dataclass)}  # type: ignore
    by_field: dict[str, list[str]] = {}
    above: list[str] = []
    field, depth = None, 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        text = token.string
        if token.type == tokenize.COMMENT:
            (above if field is None else by_field[field]).append(text.lstrip("# "))
        elif token.type == tokenize.OP:
            depth += (text in "([{") - (text in ")]}")
        elif token.type == tokenize.NEWLINE:
            field = None
        elif token.type == tokenize.NAME and field is None:
            if text == "def":
                break
            if text in names and token.start[1] == 4 and not depth:
                field, by_field[text], above = text, above, []
            else:
                above = []
    return {name: " ".join(comments) for name, comments in by_field.items()}


def text(config: JobConfig) -> str:
    """Return every setting of a configuration as the text of a gin file."""
    lines = []
    for section in config.sections():
        part = getattr(config, section)
        lines += ["", f"# {section}"]
        lines += [
            f"{section}.{field.name} = {getattr(part, field.name)!r}"
            for field in dataclasses.fields(part)
        ]
    return "\n".join(lines[1:]) + "\n"


def differing(config: JobConfig) -> str:
    """Return the settings that differ from the defaults, as lines of a gin file.

    Settings that nothing reads, because of other settings, are left out.
    """
    unread = {*_unread(config)}
    return "\n".join(
        f"{section}.{field.name} = {getattr(part, field.name)!r}"
        for section in config.sections()
        for part in [getattr(config, section)]
        for field in dataclasses.fields(part)
        if getattr(part, field.name) != field.default
        and f"{section}.{field.name}" not in unread
    )


def _unread(config: Any) -> Iterator[str]:
    """Keys that have no effect beside the other settings."""
    if not config.model.lora_rank:
        fields = (field.name for field in dataclasses.fields(config.model))
        yield from (f"model.{name}" for name in fields if name.startswith("lora_"))
    if config.model.checkpoint is not None:
        yield "data.vocab_size"
    if config.run.epochs is not None:
        yield "run.steps"
    if not getattr(getattr(config, "data", None), "streaming", True):
        yield "data.shuffle_window"
    if config.eval.every is None:
        yield from ("eval.prompts", "eval.keep_best")
    if config.run.checkpoint_every is None:
        yield "run.keep"
