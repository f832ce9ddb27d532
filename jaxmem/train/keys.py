"""All keys of a configuration: type, default and a one-line description."""

from collections.abc import Iterator, Mapping
from typing import Any

from jaxmem.base import fields, user_code
from jaxmem.base.fields import Setting, describe
from jaxmem.train.settings import JobConfig


def lines(sections: Mapping[str, type], selected: str | None = None) -> Iterator[str]:
    """Yield a line per key, of one section or of all: name, default, type, help."""
    if selected is not None and selected not in sections:
        raise ValueError(
            f"--keys: no section {selected!r}; the sections are {', '.join(sections)}"
        )
    for section, dataclass in sections.items():
        if selected in (None, section):
            yield from _describe_section(section, dataclass)


def _describe_section(section: str, dataclass: Any) -> Iterator[str]:
    """The lines of a section, then those of its groups of settings."""
    for path, group in fields.groups(dataclass).items():
        name = f"{section}.{path}" if path else section
        yield f"# {name}: {(group.__doc__ or '').splitlines()[0]}"
        for setting in fields.fields(group):
            if setting.group is None:
                about = f"{kind(setting)}; {setting.help}".rstrip("; ")
                yield f"{name}.{setting.path} = {setting.default!r}  # {about}"


def kind(setting: Setting) -> str:
    """The values that a setting may have, in words: its type, or its known names."""
    return user_code.choices(setting) or describe(setting.annotation)


def text(config: JobConfig) -> str:
    """Return every setting of a configuration as the text of a gin file."""
    lines = []
    for section in config.sections():
        values = fields.values_of(getattr(config, section))
        lines += ["", f"# {section}"]
        lines += [f"{section}.{path} = {value!r}" for path, value in values.items()]
    return "\n".join(lines[1:]) + "\n"


def differing(config: JobConfig) -> str:
    """Return the settings that differ from the defaults, as lines of a gin file.

    Settings that nothing reads, because of other settings, are left out.
    """
    unread = {*_unread(config)}
    return "\n".join(
        f"{section}.{path} = {value!r}"
        for section, dataclass in config.sections().items()
        for path, value in fields.values_of(getattr(config, section)).items()
        if value != fields.settings(dataclass)[path].default
        and f"{section}.{path}" not in unread
    )


def _unread(config: Any) -> Iterator[str]:
    """Keys that have no effect beside the other settings."""
    if not config.model.lora_rank:
        names = fields.settings(type(config.model))
        yield from (f"model.{name}" for name in names if name.startswith("lora_"))
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
