"""Loads gin files into frozen dataclasses; the only module that imports gin.

A file binds `section.field = value`, may `include` another, and is followed by
`section.field=value` overrides. A field of a group of settings is
`section.group.field`. An unknown field or a wrong type is an error that names the line
and suggests a similar one. `%gin.REQUIRED` marks a placeholder, which another binding
has to replace. `run.job` is read first, because a job of one's own has sections of its
own.
"""

import ast
import difflib
import json
import os
import re
import sys
import tokenize
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gin
from gin import config as gin_config, config_parser

from jaxmem.base import fields, messages, shipped, user_code
from jaxmem.base.fields import Setting, accepts, describe, problem_of
from jaxmem.base.user_code import UserCodeError
from jaxmem.data import python_records
from jaxmem.models.config import OTHER_NAMES, translation
from jaxmem.train import keys, peers, renamed_keys
from jaxmem.train.jobs import JOBS, Job
from jaxmem.train.jobs.job import job_named
from jaxmem.train.settings import JobConfig


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names line and reason."""


Jobs = Mapping[str, type[Job]]  # by the value of run.job


def sections(jobs: Jobs = JOBS) -> dict[str, type]:
    """The dataclass of each section, of all jobs."""
    return {
        section: dataclass
        for job in jobs.values()
        for section, dataclass in job.Config.sections().items()
    }


def _groups(jobs: Jobs) -> dict[str, type]:
    """The dataclass of each section and of each group of settings, by its whole name.

    A field of a section that is a dataclass is a group, as in `model.rope`.
    """
    return {
        f"{section}.{path}".rstrip("."): group
        for section, dataclass in sections(jobs).items()
        for path, group in fields.groups(dataclass).items()
    }


def _settings(jobs: Jobs) -> dict[str, Setting]:
    """Every setting by its key."""
    return {
        f"{section}.{path}": setting
        for section, dataclass in sections(jobs).items()
        for path, setting in fields.settings(dataclass).items()
    }


# What replaces a placeholder, for errors.
_EXAMPLES = {
    "model.checkpoint": "DIR or OWNER/NAME",
    "distill.teacher": "DIR or OWNER/NAME",
    "data.source": "FILE.jsonl",
    "task.source": "FILE.jsonl",
}
_MAKE = "configuration.make"  # the location of its arguments, for errors
_MOST_KEYS = 5  # that an error lists
# Keys that name data, which a plan does not read.
DATA_KEYS = ("data.source", "task.source")


class _Binding(NamedTuple):
    """One `key = value`, and its location (such as file:line) for errors."""

    key: str
    value: Any
    where: str
    source: str  # path of the file, or text of the override
    is_macro: bool = False

    @property
    def text(self) -> str:
        """The binding as a word of a command line."""
        value = self.value
        word = isinstance(value, str)
        return f"{self.key}={messages.name(value) if word else messages.short(value)}"


def load(
    path: str | os.PathLike[str],
    overrides: Sequence[str] = (),
    optional: Collection[str] = (),
) -> tuple[JobConfig, str]:
    """Read a gin file, then the overrides.

    The last binding of a key counts; that an override replaces another one is printed.
    A later `run.steps` also replaces an earlier `run.epochs`. Gin only parses the file:
    its configuration, which is global to the process, is neither read nor changed.

    Args:
        path: the file, or the name of a shipped one.  Included files are looked up in
            its directory, then in the current directory, then among the shipped ones.
        overrides: `section.field=value` each; the value is a Python literal, or a bare
            word, which becomes a string. None, for a field that cannot be None, removes
            the file's value: `model.ff=None` leaves it to `model.checkpoint`.
        optional: keys whose placeholders need not be replaced, because what they name
            is not read.

    Returns:
        The configuration, whose class depends on `run.job`, and the text of a gin file
        with every value of it, defaults included.

    Raises:
        ConfigError: missing file, bad syntax, unknown key, wrong type, impossible
            value, malformed override, or a placeholder that nothing replaces; or a job
            of the user's that cannot be used.
    """
    return _build(_read_bindings(path, overrides), optional)


def _build(
    bindings: Sequence[_Binding], optional: Collection[str]
) -> tuple[JobConfig, str]:
    """The configuration of bindings in their order, and its text."""
    jobs = _known_jobs(bindings)
    known = _settings(jobs)
    for binding in bindings:
        if not (binding.is_macro or binding.key in known):
            raise ConfigError(_describe_unknown(binding, jobs))
    effective = _effective_bindings(_without_epochs(bindings), known)
    effective = _replace_placeholders(effective, optional)
    config = _build_job(jobs, _resolved(effective))
    return config, keys.text(config)


def make(name: str | os.PathLike[str], /, **sections: Mapping[str, Any]) -> Any:
    """Return the configuration of a file with other settings, or of a job's defaults.

    The settings have the names, the checks and the errors that they have in a file.

    Args:
        name: a shipped file, with its suffix or without ("sft_lora",
            "recipes/qwen3_8b_24g"), a path, or the value of run.job ("sft", "dpo",
            "grpo", "distill", "file.py:Class"), for the defaults.
        sections: settings by section and field, as in model={"lora_rank": 8}; those of
            a group are a dict within. Lists become tuples, and paths strings.
            data.source and task.source may also be records: dicts in a list or in a
            `datasets.Dataset`, which are kept in the cache under their digest.

    Returns:
        The frozen dataclass that `load` returns, for `jaxmem.train.train`.

    Raises:
        ConfigError: as in `load`.
        RecordsError: records are no dicts, or not JSON.

    >>> config = make("sft", data={"source": "notes.txt"}, run={"steps": 200})
    >>> config.data.source, config.run.steps
    ('notes.txt', 200)
    """
    bindings = _named_bindings(str(name))
    for section, values in sections.items():
        if not isinstance(values, Mapping):
            must_be = messages.must_be(section, "a dict of settings", values)
            raise ConfigError(f"{_MAKE}: {must_be}")
    job = sections.get("run", {}).get("job")
    named = [] if job is None else [_Binding("run.job", job, _MAKE, _MAKE)]
    groups = _groups(_known_jobs([*bindings, *named]))
    old: list[str] = []  # keys
    spelled: dict[str, str] = {}  # keys as they are in the call, by the current ones
    for key, value in _python_settings(sections, groups):
        current = renamed_keys.current(key)
        if (other := spelled.setdefault(current, key)) != key:
            raise ConfigError(f"{_MAKE}: {other} and {key} are the same setting")
        old += [key] if current != key else []
        value = _python_value(current, value)
        bindings.append(_Binding(current, value, _MAKE, _MAKE))
    _note(renamed_keys.note(_MAKE, old))
    _check_macros({binding.key: binding for binding in bindings})
    return _build(bindings, ())[0]


def _python_settings(
    values: Mapping[str, Any], groups: Collection[str], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield the key and the value of settings in nested dicts: {"rope": {...}}."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and (key in groups or not prefix):
            yield from _python_settings(value, groups, f"{key}.")
        else:
            yield key, value


def _named_bindings(name: str) -> list[_Binding]:
    if name in JOBS or (user_code.names_code(name) and not Path(name).exists()):
        return [_Binding("run.job", name, _MAKE, _MAKE)]
    return list(_file_bindings(_path_of(name), ()))


def _python_value(key: str, value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if key in DATA_KEYS and _is_records(value):
        return python_records.store(value, key)
    return tuple(value) if isinstance(value, list) else value


def _is_records(value: Any) -> bool:
    """True for what may be iterated and is no name of data, nor several."""
    if isinstance(value, str | tuple | Mapping) or not isinstance(value, Iterable):
        return False
    is_list_of_names = isinstance(value, list) and any(
        isinstance(item, str) for item in value
    )
    return not is_list_of_names


def describe_keys(
    section: str | None = None,
    path: str | os.PathLike[str] | None = None,
    overrides: Sequence[str] = (),
) -> Iterator[str]:
    """Yield a line per key: name, default, type, meaning; see `jaxmem.train.keys`.

    Args:
        section: the only one to describe; None: all.
        path: a gin file whose job, which may be one of the user's, has sections too.
        overrides: as in `load`.

    Raises:
        ConfigError: there is no section of that name, or the job cannot be used.
    """
    jobs = JOBS if path is None else _known_jobs(_read_bindings(path, overrides))
    try:
        yield from keys.lines(sections(jobs), section)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _read_bindings(
    path: str | os.PathLike[str], overrides: Sequence[str]
) -> list[_Binding]:
    """All bindings in their order; macros are checked, and keys are not."""
    overriding = _override_bindings(overrides)
    last: dict[str, _Binding] = {}
    for binding in overriding:
        if binding.key in last:
            _note(f"{binding.text} replaces {last[binding.key].text}")
        last[binding.key] = binding
    bindings = [*_file_bindings(_path_of(path), ()), *overriding]
    _check_macros({binding.key: binding for binding in bindings})
    return bindings


def _path_of(name: str | os.PathLike[str]) -> Path:
    path = Path(name)
    return path if path.exists() else shipped.find(str(path)) or path


def _note(text: str) -> None:
    if text:
        print(f"jaxmem: {text}", file=sys.stderr)


def _known_jobs(bindings: Iterable[_Binding]) -> Jobs:
    """The jobs whose sections a configuration may have: registered ones and its own."""
    last = {binding.key: binding for binding in bindings}
    if "run.job" not in last or last["run.job"].value is None:
        return JOBS
    value, where = _resolve(last["run.job"].value, last), last["run.job"].where
    if not isinstance(value, str):
        raise ConfigError(f"{where}: {_describe_wrong_type('run.job', str, value)}")
    try:
        return {**JOBS, value: job_named(value)}
    except UserCodeError as error:
        raise ConfigError(f"{where}: {error}") from error


def _describe_wrong_type(key: str, annotation: Any, value: Any) -> str:
    expected, translated = describe(annotation), ""
    names = _names_in(value)
    kinds = map(typing.get_args, (annotation, *typing.get_args(annotation)))
    if names and (str, ...) in kinds:
        known = [OTHER_NAMES.get(name, name) for name in names]
        form = ", ".join(map(json.dumps, known)) + "," * (len(known) == 1)
        # Quotes of the shell too, because an override is where this happens.
        expected = f"a tuple of names, as in '({messages.cut(form)})'"
        translated = translation(names)
    must_be = messages.must_be(key, expected, value)
    return f"{must_be} ({type(value).__name__}){translated}"


def _names_in(value: Any) -> list[str]:
    """The names in a text, or in a list of texts; [] for another value."""
    if isinstance(value, str):
        return re.findall(r"[^\s,]+", value)
    is_list = isinstance(value, list) and all(isinstance(x, str) for x in value)
    return value if is_list else []


def _effective_bindings(
    bindings: Iterable[_Binding], known: Mapping[str, Setting]
) -> dict[str, _Binding]:
    """The last binding of each key, without those that a None removes."""
    effective: dict[str, _Binding] = {}
    for binding in bindings:
        is_macro, key = binding.is_macro, binding.key
        if (
            binding.value is None
            and not is_macro
            and not accepts(known[key].annotation, None)
        ):
            effective.pop(key, None)
        else:
            effective[key] = binding
    return effective


def _without_epochs(bindings: Sequence[_Binding]) -> Sequence[_Binding]:
    """The bindings without `run.epochs` if a later source sets `run.steps`.

    Within one file `run.epochs` decides, wherever it stands.
    """
    last = {binding.key: (i, binding) for i, binding in enumerate(bindings)}
    if not {"run.steps", "run.epochs"} <= last.keys():
        return bindings
    (i, steps), (j, epochs) = last["run.steps"], last["run.epochs"]
    if i < j or epochs.value is None or steps.source == epochs.source:
        return bindings
    _note(f"{steps.text} replaces {epochs.text}")
    return [binding for binding in bindings if binding.key != "run.epochs"]


def _replace_placeholders(
    effective: Mapping[str, _Binding], optional: Collection[str]
) -> dict[str, _Binding]:
    """The bindings with names in place of optional placeholders.

    Raises:
        ConfigError: another placeholder is left; the message names all of them.
    """
    replaced = dict(effective)
    missing: dict[str, list[str]] = {}  # keys by the name of their file
    for key, binding in effective.items():
        if binding.value is not gin.REQUIRED:
            continue
        replaced[key] = binding._replace(value=f"<{key}>")
        if key not in optional:
            missing.setdefault(Path(binding.source).name, []).append(key)
    if missing:
        raise ConfigError(
            "; ".join(map(_describe_placeholders, missing, missing.values()))
        )
    return replaced


def _describe_placeholders(file: str, keys: Sequence[str]) -> str:
    words = [f"{key}={_EXAMPLES.get(key, 'VALUE')}" for key in keys]
    if len(keys) == 1:
        return f"{keys[0]} is the placeholder of {file}; add {words[0]}"
    return (
        f"{', '.join(keys[:-1])} and {keys[-1]} are placeholders of {file}; add "
        f"{', '.join(words[:-1])} and {words[-1]}"
    )


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


def _resolved(bindings: Mapping[str, _Binding]) -> dict[str, _Binding]:
    """The bindings of keys, with the values of macros in the place of their names."""
    return {
        key: binding._replace(value=_resolve(binding.value, bindings))
        for key, binding in bindings.items()
        if not binding.is_macro
    }


def _resolve(value: Any, bindings: Mapping[str, _Binding]) -> Any:
    """A value with those of its macros, whose names `_check_macros` has looked up."""
    if isinstance(value, gin_config.ConfigurableReference):
        (name,) = _macros_in(value)
        return _resolve(bindings[name].value, bindings)
    if isinstance(value, Mapping):
        return {key: _resolve(item, bindings) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_resolve(item, bindings) for item in value)
    return value


def _is_required(value: Any) -> bool:
    """True if a value in a file is `%gin.REQUIRED`, gin's mark of a placeholder."""
    reference = isinstance(value, gin_config.ConfigurableReference)
    return reference and value.scoped_selector == "gin.REQUIRED/gin.constant"


class _OnlyValues(gin_config.ParserDelegate):
    """Rejects `@references`, which no field accepts."""

    def configurable_reference(self, scoped_selector, evaluate):
        raise ValueError(f"@{scoped_selector} is not a value; write a Python literal")


def _file_bindings(path: Path, including: tuple[Path, ...]) -> Iterator[_Binding]:
    if path.resolve() in including:
        raise ConfigError(f"{path} includes itself")
    including = (*including, path.resolve())
    first_line: dict[str, int] = {}
    old: list[str] = []  # keys
    for statement in _parse_statements(path):
        line = statement.location.line_num
        where = f"{path}:{line}"
        match statement:
            case config_parser.IncludeStatement(filename=name):
                yield from _file_bindings(_find_include(name, path, where), including)
            case config_parser.BindingStatement():
                written = _checked_key(statement, where)
                key = renamed_keys.current(written)
                old += [written] if written != key else []
                if key in first_line:
                    raise ConfigError(
                        f"{where}: {key} is already set on line {first_line[key]}"
                    )
                first_line[key] = line
                value, is_macro = statement.value, not statement.arg_name
                if _is_required(value):
                    value = gin.REQUIRED
                yield _Binding(key, value, where, str(path), is_macro)
            case config_parser.ImportStatement():
                raise ConfigError(f"{where}: a configuration file cannot import")
    _note(renamed_keys.note(str(path), old))


def _parse_statements(path: Path) -> Iterator[Any]:
    """Yield gin's statements; raise a ConfigError for what gin cannot parse."""
    parser = None
    try:
        parser = config_parser.ConfigParser(path.read_text("utf-8"), _OnlyValues())
        yield from parser
    except FileNotFoundError as error:
        hint = shipped.suggestion(str(path))
        raise ConfigError(f"cannot read {path}: {error.strerror}{hint}") from error
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
        raise ConfigError(
            f"{path}:{error.lineno}: {_describe_syntax_error(error.msg)}"
        ) from error
    except ConfigError:
        raise
    except (MemoryError, RecursionError) as error:
        line = parser.current_token.start[0] if parser else 1
        raise ConfigError(f"{path}:{line}: nested too deeply") from error
    except ValueError as error:
        line = parser.current_token.start[0] if parser else 1
        raise ConfigError(
            f"{path}:{line}: {_describe_syntax_error(str(error))}"
        ) from error


def _describe_syntax_error(message: str) -> str:
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
    return f"{statement.selector}.{statement.arg_name}"


def _override_bindings(overrides: Iterable[str]) -> list[_Binding]:
    bindings = []
    for override in overrides:
        where = f"override {messages.short(override)}"
        key, equals, text = override.partition("=")
        key = key.strip()
        if not (equals and text.strip() and re.fullmatch(r"[\w.]+", key)):
            raise ConfigError(
                f"{where}: expected section.field=value, as in data.batch_size=16"
            )
        current = renamed_keys.current(key)
        if current != key:
            _note(renamed_keys.note(where, [key]))
        bindings.append(
            _Binding(current, _override_value(text, where), where, override)
        )
    return bindings


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


def _describe_unknown(binding: _Binding, jobs: Jobs) -> str:
    shown = messages.short(binding.key)
    suggestion = _suggest_key(binding.key, jobs)
    return f"{binding.where}: unknown key {shown}; {suggestion}"


def _suggest_key(key: str, jobs: Jobs) -> str:
    section, _, field = key.rpartition(".")
    known = _groups(jobs)
    if key in known:  # of a group itself
        example = next(iter(fields.settings(known[key])))
        return f"it is a group of keys, as in {key}.{example}"
    beside = _related_sections(section.partition(".")[0], jobs)
    elsewhere = [
        f"{name}.{field}"
        for name in known
        if name.partition(".")[0] in beside and field in _field_names(known[name])
    ]
    if (answer := renamed_keys.answer(key)) is not None:
        return answer
    if (answer := peers.answer(key, elsewhere)) is not None:
        return answer
    if elsewhere:  # the field exists in another section
        return f"did you mean {' or '.join(elsewhere)}?"
    nearest = difflib.get_close_matches(section, known, n=1)
    if not nearest:
        return f"the sections are {', '.join(sections(jobs))}"
    names = _field_names(known[nearest[0]])
    close = difflib.get_close_matches(field, names, n=3)
    if close:
        return f"did you mean {' or '.join(f'{nearest[0]}.{name}' for name in close)}?"
    some = difflib.get_close_matches(field, names, n=_MOST_KEYS, cutoff=0)
    listed = ", ".join(f"{nearest[0]}.{name}" for name in some)
    section = nearest[0].partition(".")[0]
    return f"the nearest keys are {listed}; `jaxmem train --keys {section}` lists all"


def _related_sections(section: str, jobs: Jobs) -> list[str]:
    """Sections of the jobs that have this one; of all jobs if none has it."""
    of_jobs = [list(job.Config.sections()) for job in jobs.values()]
    sharing = [names for names in of_jobs if section in names] or of_jobs
    return [name for name in sections(jobs) if any(name in names for names in sharing)]


def _field_names(dataclass: type) -> list[str]:
    """The names of a dataclass's own settings, without those of its groups."""
    own = (field for field in fields.fields(dataclass) if field.group is None)
    return [field.path for field in own]


def _build_job(jobs: Jobs, bindings: Mapping[str, _Binding]) -> JobConfig:
    """Build every section of the job; raise for keys of another job's sections."""
    run = _build_section("run", sections(jobs)["run"], bindings)
    config = jobs[run.job].Config
    dataclasses_of = config.sections()
    names = list(dataclasses_of)
    for key, binding in bindings.items():
        section = key.partition(".")[0]
        if section not in names:
            owner = next(
                k for k, job in jobs.items() if section in job.Config.sections()
            )
            raise ConfigError(
                f"{binding.where}: {key} is of the job {owner!r}, but run.job is "
                f"{run.job!r}, whose sections are {', '.join(names)}"
                f"{_describe_twin(key, dataclasses_of)}"
            )
    parts = {
        name: _build_section(name, dataclass, bindings)
        for name, dataclass in dataclasses_of.items()
        if name != "run"
    }
    try:
        return config(**parts, run=run)
    except ValueError as error:
        raise ConfigError(_locate_key(error, bindings)) from error


def _describe_twin(key: str, dataclasses_of: Mapping[str, type]) -> str:
    """The end of an error about a key of `data` for a job that has it in `task`."""
    section, _, field = key.partition(".")
    task = dataclasses_of.get("task")
    if section != "data" or task is None or field not in _field_names(task):
        return ""
    return f"; for prompts it is task.{field}"


def _locate_key(error: ValueError, bindings: Mapping[str, _Binding]) -> str:
    """Prefix the error by the line that set the first key in its message."""
    keys = re.findall(r"\w+(?:\.\w+)+", str(error))
    where = next((bindings[key].where for key in keys if key in bindings), None)
    return f"{where}: {error}" if where else str(error)


def _build_section(
    section: str, dataclass: type, bindings: Mapping[str, _Binding]
) -> Any:
    """Check the types of bound values, then make the dataclass."""
    values: dict[str, Any] = {}
    for path, setting in fields.settings(dataclass).items():
        key = f"{section}.{path}"
        if key not in bindings:
            continue
        where, value = bindings[key].where, bindings[key].value
        wrong = user_code.object_error(key, setting, value)
        if not (wrong or accepts(setting.annotation, value)):
            wrong = _describe_wrong_type(key, setting.annotation, value)
        if wrong:
            raise ConfigError(f"{where}: {wrong}")
        problem = problem_of(value)
        if problem:
            got = messages.short(value)
            raise ConfigError(f"{where}: {key} {problem}, got {got}")
        values[path] = value
    try:
        return fields.build(dataclass, values)
    except ValueError as error:
        raise ConfigError(_locate_field(section, dataclass, error, bindings)) from error


def _locate_field(
    section: str, dataclass: type, error: ValueError, bindings: Mapping[str, _Binding]
) -> str:
    """Prefix a dataclass's error by the line of the file that caused it."""
    message = str(error).split("\n")[0]
    message = message.replace(f"{dataclass.__name__}.", f"{section}.")
    for path in fields.settings(dataclass):
        binding = bindings.get(f"{section}.{path}")
        if binding and re.search(rf"\b{re.escape(path)}\b", message):
            return f"{binding.where}: {message}"
    return message
