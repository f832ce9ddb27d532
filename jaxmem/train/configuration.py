"""Loads gin files into frozen dataclasses; the only module that imports gin.

A file binds `section.field = value`, may `include` another, and is followed by
`section.field=value` overrides.  An unknown field or a wrong type is an error that
names the line and suggests a similar one.
"""

import ast
import dataclasses
import difflib
import os
import re
import tokenize
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gin
from gin import config as gin_config, config_parser

from jaxmem.base import messages, shipped
from jaxmem.base.fields import accepts, describe, problem_of
from jaxmem.train import keys
from jaxmem.train.jobs import JOBS
from jaxmem.train.settings import JobConfig


class ConfigError(ValueError):
    """A configuration that cannot be used; the message says where and why."""


_CONFIGURABLES: dict[type, Any] = {}  # gin's, by dataclass; made at the first use


def sections() -> dict[str, type]:
    """The dataclass of each section, of all jobs."""
    return {
        section: dataclass
        for job in JOBS.values()
        for section, dataclass in job.Config.sections().items()
    }


def _configurable(section: str) -> Any:
    dataclass = sections()[section]
    if dataclass not in _CONFIGURABLES:
        _CONFIGURABLES[dataclass] = gin.external_configurable(
            dataclass, name=section, module="jaxmem"
        )
    return _CONFIGURABLES[dataclass]


class _Binding(NamedTuple):
    """One `key = value`, and a description of its place for errors."""

    key: str
    value: Any
    where: str


def load(
    path: str | os.PathLike[str], overrides: Sequence[str] = ()
) -> tuple[JobConfig, str]:
    """Read a gin file, then the overrides.

    Gin's configuration, which is global to the process, is empty afterwards.

    Args:
        path: the file.  Included files are looked up in its directory, then in the
            current directory.
        overrides: `section.field=value` each; the value is a Python literal, or a bare
            word, which becomes a string. None, for a field that cannot be None, removes
            the file's value: `model.ff=None` leaves it to `model.checkpoint`.

    Returns:
        The configuration, whose class depends on `run.job`, and the text of a gin file
        with every value of it, defaults included.

    Raises:
        ConfigError: missing file, bad syntax, unknown key, wrong type, impossible
            value, malformed or repeated override.
    """
    bindings = _effective(
        [*_file_bindings(Path(path), ()), *_override_bindings(overrides)]
    )
    _check_macros(bindings)
    places = {key: binding.where for key, binding in bindings.items()}
    # Clear gin's global state before and after.
    gin.clear_config()
    try:
        for section in sections():
            _configurable(section)
        for key, binding in bindings.items():
            gin.bind_parameter(_gin_key(key), binding.value)
        return _build_job(places), gin.operative_config_str()
    finally:
        gin.clear_config()


def describe_keys(section: str | None = None) -> Iterator[str]:
    """Yield a line per key: name, default, type, meaning; see `jaxmem.train.keys`.

    Raises:
        ConfigError: there is no section of that name.
    """
    try:
        yield from keys.lines(sections(), section)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _effective(bindings: Iterable[_Binding]) -> dict[str, _Binding]:
    """The last binding of each key, without those that a None removes."""
    effective: dict[str, _Binding] = {}
    for binding in bindings:
        section, _, field = binding.key.partition(".")
        if (
            binding.value is None
            and field
            and not accepts(_types(section)[field], None)
        ):
            effective.pop(binding.key, None)
        else:
            effective[binding.key] = binding
    return effective


def _types(section: str) -> dict[str, Any]:
    return typing.get_type_hints(sections()[section])


def _check_macros(bindings: Mapping[str, _Binding]) -> None:
    uses = {key: _macros_in(binding.value) for key, binding in bindings.items()}
    for key, binding in bindings.items():
        reached, ahead = set(), list(uses[key])
        while ahead:
            name = ahead.pop()
            if name not in uses:
                raise ConfigError(f"{binding.where}: %{name} is not defined")
            if name == key:
                raise ConfigError(f"{binding.where}: %{name} is defined by itself")
            if name not in reached:
                reached.add(name)
                ahead += uses[name]


def _macros_in(value: Any) -> list[str]:
    references = gin_config.iterate_references(value)
    return [r.scoped_selector.removesuffix("/gin.macro") for r in references]


class _OnlyValues(gin_config.ParserDelegate):
    """Rejects `@references`, which no field accepts."""

    def configurable_reference(self, scoped_selector, evaluate):
        raise ValueError(f"@{scoped_selector} is not a value; write a Python literal")


def _file_bindings(path: Path, including: tuple[Path, ...]) -> Iterator[_Binding]:
    if path.resolve() in including:
        raise ConfigError(f"{path} includes itself")
    including = (*including, path.resolve())
    first_line: dict[str, int] = {}
    for statement in _statements(path):
        line = statement.location.line_num
        where = f"{path}:{line}"
        match statement:
            case config_parser.IncludeStatement(filename=name):
                yield from _file_bindings(_find_include(name, path, where), including)
            case config_parser.BindingStatement():
                key = _checked_key(statement, where)
                if key in first_line:
                    raise ConfigError(
                        f"{where}: {key} is already set on line {first_line[key]}"
                    )
                first_line[key] = line
                yield _Binding(key, statement.value, where)
            case config_parser.ImportStatement():
                raise ConfigError(f"{where}: a configuration file cannot import")


def _statements(path: Path) -> Iterator[Any]:
    """Yield gin's statements; raise a ConfigError for what gin cannot parse."""
    parser = None
    try:
        parser = config_parser.ConfigParser(path.read_text("utf-8"), _OnlyValues())
        yield from parser
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start})") from error
    except tokenize.TokenError as error:
        message, (line, _) = error.args
        if message == "too many nested parentheses":  # 3.11 runs out of stack instead
            message = "nested too deeply"
        raise ConfigError(f"{path}:{line}: {message}") from error
    except SyntaxError as error:
        raise ConfigError(f"{path}:{error.lineno}: {_reason(error.msg)}") from error
    except ConfigError:
        raise
    except (MemoryError, RecursionError) as error:
        line = parser.current_token.start[0] if parser else 1
        raise ConfigError(f"{path}:{line}: nested too deeply") from error
    except ValueError as error:
        line = parser.current_token.start[0] if parser else 1
        raise ConfigError(f"{path}:{line}: {_reason(str(error))}") from error


def _reason(message: str) -> str:
    word = re.search(r"Failed to parse token '(.*)'", message)
    if word:
        return f"{messages.name(word[1])} is not a value; a string needs quotes"
    return messages.cut(message.split("\n")[0])  # gin appends further lines


def _find_include(name: str, including: Path, where: str) -> Path:
    of_package = [folder / name for folder in shipped.FOLDERS]
    candidates = [including.parent / name, Path(name), *of_package]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise ConfigError(
        f"{where}: include {name!r}: no such file beside {including.name} "
        f"({including.parent.resolve()}), in the current directory or among the "
        "shipped ones"
    )


def _checked_key(statement: config_parser.BindingStatement, where: str) -> str:
    if not statement.arg_name:  # gin's macro: NAME = value, used as %NAME
        return statement.selector
    if statement.scope:
        raise ConfigError(
            f"{where}: {statement.scope}/{statement.selector}: scopes are not supported"
        )
    key = f"{statement.selector}.{statement.arg_name}"
    _check_known(key, where)
    return key


def _gin_key(key: str) -> str | tuple[str, str, str]:
    return key if "." in key else (key, "gin.macro", "value")


def _override_bindings(overrides: Iterable[str]) -> list[_Binding]:
    bindings: dict[str, _Binding] = {}
    for override in overrides:
        where = f"override {messages.short(override)}"
        key, equals, text = override.partition("=")
        if not (equals and text.strip() and re.fullmatch(r"[\w.]+", key)):
            raise ConfigError(
                f"{where}: expected section.field=value, as in data.batch_size=16"
            )
        _check_known(key, where)
        if key in bindings:
            raise ConfigError(f"{where}: {key} is already set by {bindings[key].where}")
        bindings[key] = _Binding(key, _override_value(text, where), where)
    return list(bindings.values())


def _override_value(text: str, where: str) -> Any:
    try:
        return ast.literal_eval(text.strip())
    # Python's parser raises either of the last two errors for deep nesting.
    except (
        ValueError, SyntaxError, TypeError, MemoryError, RecursionError,
    ) as error:  # fmt: skip
        if text.strip()[0] in "\"'([{":
            shown = messages.short(text)
            raise ConfigError(f"{where}: {shown} is not a Python literal") from error
        return text.strip()


def _check_known(key: str, where: str) -> None:
    section, _, field = key.rpartition(".")
    if section not in sections() or field not in _fields(section):
        shown = messages.short(key)
        raise ConfigError(f"{where}: unknown key {shown}; {_suggestion(key)}")


def _suggestion(key: str) -> str:
    section, _, field = key.rpartition(".")
    beside = _beside(section)
    elsewhere = [f"{name}.{field}" for name in beside if field in _fields(name)]
    if elsewhere:  # the field exists in another section
        return f"did you mean {' or '.join(elsewhere)}?"
    nearest = difflib.get_close_matches(section, sections(), n=1)
    if not nearest:
        return f"the sections are {', '.join(sections())}"
    close = difflib.get_close_matches(field, _fields(nearest[0]), n=3)
    if not close:
        return f"{nearest[0]} has {', '.join(_fields(nearest[0]))}"
    return f"did you mean {' or '.join(f'{nearest[0]}.{name}' for name in close)}?"


def _beside(section: str) -> list[str]:
    """Sections of the jobs that have this one; of all jobs if none has it."""
    of_jobs = [list(job.Config.sections()) for job in JOBS.values()]
    sharing = [names for names in of_jobs if section in names] or of_jobs
    return [name for name in sections() if any(name in names for names in sharing)]


def _fields(section: str) -> list[str]:
    return [field.name for field in dataclasses.fields(sections()[section])]


def _build_job(places: dict[str, str]) -> JobConfig:
    """Build every section of the job; raise for keys of another job's sections."""
    run = _build("run", places)
    if run.job not in JOBS:
        raise ConfigError(
            f"{places['run.job']}: run.job must be one of "
            f"{', '.join(map(repr, JOBS))}, got {messages.short(run.job)}"
        )
    config = JOBS[run.job].Config
    names = list(config.sections())
    for key, where in places.items():
        section = key.partition(".")[0]
        if "." in key and section not in names:
            owner = next(
                k for k, job in JOBS.items() if section in job.Config.sections()
            )
            raise ConfigError(
                f"{where}: {key} is of the job {owner!r}, but run.job is "
                f"{run.job!r}, whose sections are {', '.join(names)}"
            )
    parts = {name: _build(name, places) for name in names if name != "run"}
    try:
        return config(**parts, run=run)
    except ValueError as error:
        raise ConfigError(_with_key(error, places)) from error


def _with_key(error: ValueError, places: dict[str, str]) -> str:
    """Prefix the error by the line that set the first key in its message."""
    keys = re.findall(r"\w+\.\w+", str(error))
    where = next((places[key] for key in keys if key in places), None)
    return f"{where}: {error}" if where else str(error)


def _build(section: str, places: dict[str, str]) -> Any:
    """Check the types of bound values, then let gin construct the dataclass."""
    types_of = _types(section)
    for field, value in gin.get_bindings(section).items():
        key, got = f"{section}.{field}", messages.short(value)
        if not accepts(types_of[field], value):
            raise ConfigError(
                f"{places[key]}: {key} must be {describe(types_of[field])}, got "
                f"{got} ({type(value).__name__})"
            )
        problem = problem_of(value)
        if problem:
            raise ConfigError(f"{places[key]}: {key} {problem}, got {got}")
    try:
        return _configurable(section)()
    except ValueError as error:
        raise ConfigError(_with_place(section, error, places)) from error


def _with_place(section: str, error: ValueError, places: dict[str, str]) -> str:
    """Prefix a dataclass's error by the line of the file that caused it."""
    message = str(error).split("\n")[0]  # gin appends further lines
    message = message.replace(f"{sections()[section].__name__}.", f"{section}.")
    for field in _fields(section):
        where = places.get(f"{section}.{field}")
        if where and re.search(rf"\b{field}\b", message):
            return f"{where}: {message}"
    return message
