"""Code of the user, which keys name by "file.py:name" or "package.module:name".

    load(name, key, known={}, kind="a function", accepts=callable) -> the object

`key` is the key of the configuration that has the name, for errors; `known` maps names
of shipped objects to them; `accepts` is True of what the key can use, and `kind` says
what that is. A field that may name code has `Named` in its annotation, so that runs
record a digest of the code, and commands that read a run refuse what they do not trust:

    loss: Annotated[str, user_code.Named(LOSSES), "loss of a token"] = "grpo"
"""

import abc
import contextlib
import contextvars
import dataclasses
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxmem.base import fields, guests, messages
from jaxmem.base.fields import Setting

_DIGITS = 12  # hexadecimal ones of a digest that are shown


Check = Callable[[str, str], None]  # of a key and of the name of code
_checks = contextvars.ContextVar[tuple[Check, ...]]("checks", default=())


class UserCodeError(ValueError):
    """Code cannot be used; the message names the key, the file and its line."""


@dataclasses.dataclass(frozen=True)
class Named:
    """A fact of a field: it may name code, or a row of `known` by its key, or several.

    Without `known`, the code that reads the field checks its names.
    """

    known: Mapping[str, Any] | None = None

    def fault(self, value: Any, optional: bool) -> str | None:
        """See `base.fields.Constraint`; nothing is imported."""
        if not self.known:
            return None
        if isinstance(value, str) and (value in self.known or names_code(value)):
            return None
        return f"must be {_describe_names(self.known)}"


def choices(setting: Setting) -> str:
    """The names that a field may have, in words; empty without known ones."""
    named = setting.fact(Named)
    if named is None or not named.known:
        return ""
    return _describe_names(named.known) + (", or None" if setting.is_optional else "")


def object_error(key: str, setting: Setting, value: Any) -> str | None:
    """The error of a field of `Named` that got code itself; None: it got other things.

    Args:
        key: the key of the configuration.
        setting: the field, which need not be one of `Named`.
        value: the key's value, or several in a tuple.
    """
    if setting.fact(Named) is None:
        return None
    values = value if isinstance(value, tuple) else (value,)
    code = next((each for each in values if callable(each)), None)
    if code is None:
        return None
    kind = "class" if isinstance(code, type) else "function"
    own = getattr(code, "__name__", "")
    name = own if own.isidentifier() else "name"  # a lambda's is none
    return (
        f"{key} is the name of a {kind} in a file: write it to a file and name it, as "
        f'in "file.py:{name}"'
    )


def load(
    name: str,
    key: str,
    known: Mapping[str, Any] | None = None,
    kind: str = "a function",
    accepts: Callable[[Any], bool] = callable,
) -> Any:
    """The object of a name: a shipped one, or one of a file or a module.

    A file is executed once in a process, and again only after it has changed.

    Raises:
        UserCodeError: the name has another form, the file, the module or the object
            does not exist, importing it fails, or it is of another kind.
    """
    if known and name in known:
        return known[name]
    if not names_code(name):
        raise UserCodeError(messages.must_be(key, _describe_names(known or {}), name))
    for check in _checks.get():
        check(key, name)
    source, _, attribute = name.rpartition(":")
    module = _module_of(source, key)
    if not hasattr(module, attribute):
        file = getattr(module, "__file__", "built in")  # perhaps not the one meant
        name = messages.short(attribute)
        raise UserCodeError(f"{key}: {source} has no {name} ({file})")
    loaded = getattr(module, attribute)
    if not accepts(loaded):
        raise UserCodeError(f"{key}: {messages.must_be(name, kind, loaded)}")
    return loaded


def names_code(name: str) -> bool:
    """True if it has the form "file.py:name" or "package.module:name"."""
    source, _, attribute = name.rpartition(":")
    return bool(source and attribute)


def location(name: str) -> str:
    """The file or module that loading the name would run, for messages."""
    source = name.rpartition(":")[0]
    return str(_file_path(source)) if _is_file(source) else f"the module {source}"


def _describe_names(known: Mapping[str, Any]) -> str:
    shipped = f"one of {', '.join(map(repr, known))}, or " if known else ""
    return f'{shipped}"file.py:name" or "package.module:name"'


@contextlib.contextmanager
def checked(check: Check) -> Iterator[None]:
    """Call `check` with key and name before `load` runs code; it raises to forbid it.

    A configuration that others wrote is read within, so that no key of it runs code.
    """
    token = _checks.set((*_checks.get(), check))
    try:
        yield
    finally:
        _checks.reset(token)


class Hooked(abc.ABC):
    """A base of classes that users write, whose abstract methods are their hooks.

    Attributes:
        page: the page of the documentation that lists them.
    """

    page: str

    def __new__(cls, *arguments: Any, **options: Any):
        """Make an object; raise a UserCodeError that names the hooks that it lacks."""
        if missing := missing_hooks(cls):
            raise UserCodeError(f"{cls.__qualname__} ({_file_of(cls)}) {missing}")
        return super().__new__(cls)


def missing_hooks(kind: type[Hooked]) -> str:
    """The methods that a class lacks and the page that lists them; empty with all."""
    names = sorted(getattr(kind, "__abstractmethods__", ()))
    return f"has no {', '.join(names)}: see {kind.page}" if names else ""


# ------------------------------------------------- the code that a configuration names


def names_in(section: str, config: Any) -> Iterator[tuple[str, str]]:
    """Yield (key, name) of code that the fields of a section name."""
    for path, setting in fields.settings(type(config)).items():
        if setting.fact(Named) is None:
            continue
        value = fields.value_of(config, path)
        for name in value if isinstance(value, tuple) else (value,):
            if name is not None and names_code(name):
                yield f"{section}.{path}", name


def digest(name: str, key: str) -> str:
    """SHA-256 of the file of the code; of a module, which is imported, its own file.

    Raises:
        UserCodeError: the file cannot be read, or the module cannot be imported.
    """
    source = name.rpartition(":")[0]
    if _is_file(source):
        return _sha256(_read_source(source, key))
    path = getattr(_module_of(source, key), "__file__", None)
    return "" if path is None else _sha256(Path(path).read_bytes())


def changes(saved: Mapping[str, str], current: Mapping[str, str]) -> list[str]:
    """A message for each file or module whose digest is not what a run has saved.

    Args:
        saved: digests by the name of the code; names that only one of them has are
            those of other settings, or of a run from before digests were saved.
        current: those of now.
    """
    sources = {name.rpartition(":")[0]: name for name in saved.keys() & current.keys()}
    return [
        f"{source} has changed (SHA-256 {saved[name][:_DIGITS]}…, is "
        f"{current[name][:_DIGITS]}…)"
        for source, name in sorted(sources.items())
        if saved[name] != current[name]
    ]


# -------------------------------------------------------------------- importing


def _is_file(source: str) -> bool:
    return source.endswith(".py")


def _file_path(source: str) -> Path:
    return Path(source).expanduser().absolute()


def _module_of(source: str, key: str) -> ModuleType:
    """The module of a file or of a dotted name, as it is imported."""
    try:
        with guests.received():
            if _is_file(source):
                return _file_module(source, key)
            _look_in_current_directory()
            return importlib.import_module(source)
    except UserCodeError:
        raise
    except BaseException as error:
        guests.raise_if_of_the_user(error)
        line = _line_in(error, _file_path(source) if _is_file(source) else None)
        raise UserCodeError(
            f"{key}: cannot import {source}{line}: {type(error).__name__}: "
            f"{_error_text(error)}"
        ) from error


def _file_module(source: str, key: str) -> ModuleType:
    path, content = _file_path(source), _read_source(source, key)
    # The name is the content's, so that classes of two versions are not mixed up.
    version = hashlib.sha256(f"{path}\n".encode() + content).hexdigest()[:16]
    name = f"jaxmem_user_{path.stem}_{version}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # for pickling, and for annotations
    try:
        # Not by the loader, which might take bytecode of an older content.
        exec(compile(content, str(path), "exec"), vars(module))
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _read_source(source: str, key: str) -> bytes:
    try:
        return _file_path(source).read_bytes()
    except FileNotFoundError:
        raise UserCodeError(f"{key}: cannot import {source}: no such file") from None
    except OSError as error:
        why = messages.reason(error)
        raise UserCodeError(f"{key}: cannot import {source}: {why}") from error


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _look_in_current_directory() -> None:
    """Let Python find modules in the current directory, after all other places.

    The command `jaxmem` does not look there. A file named as a module of the standard
    library or of an installed package does not take its place.
    """
    directory = str(Path.cwd())
    if "" not in sys.path and directory not in sys.path:
        sys.path.append(directory)


# ------------------------------------------------------------- blame of the user's line


def described(error: BaseException, code: Any) -> str:
    """The error that code has raised, and the last line of its own file in the trace.

    Args:
        error: as it was caught.
        code: the function, class or object, as it was loaded.
    """
    line = _line_in(error, _file_of(code))
    return f"{line} {type(error).__name__}: {_error_text(error)}"


def _file_of(code: Any) -> Path | None:
    """The file that defines a function, a class or the class of an object."""
    code = inspect.unwrap(code)
    if not (inspect.isroutine(code) or inspect.isclass(code)):
        code = type(code)
    try:
        return Path(inspect.getfile(code)).absolute()
    except (TypeError, OSError):  # built in
        return None


def _line_in(error: BaseException, file: Path | None) -> str:
    lines, trace = [], error.__traceback__
    while trace is not None:
        if Path(trace.tb_frame.f_code.co_filename).absolute() == file:
            lines.append(trace.tb_lineno)
        trace = trace.tb_next
    return f" (line {lines[-1]})" if lines else ""


def _error_text(error: BaseException) -> str:
    try:
        return messages.cut(str(error)) or type(error).__name__
    except Exception:  # its own `__str__` raises
        return type(error).__name__
