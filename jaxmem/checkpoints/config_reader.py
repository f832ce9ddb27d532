"""Reads JSON objects of a checkpoint key by key, checking types and ranges."""

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxmem.base import json_files, messages
from jaxmem.base.ranges import Range


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names the file and the cause."""


MISSING = object()
_ignored: set[str] = set()  # keys that a user has said do nothing


@contextlib.contextmanager
def ignoring_keys(keys: Iterable[str]) -> Iterator[None]:
    """Within this context, unknown keys of `config.json` of these names are accepted.

    >>> from jaxmem import checkpoints
    >>> with checkpoints.ignoring_keys(["a_trainers_note"]):
    ...     config = checkpoints.read_config("tests/checkpoints/tiny/qwen3")
    """
    added = set(keys) - _ignored
    _ignored.update(added)
    try:
        yield
    finally:
        _ignored.difference_update(added)


def read_object(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        CheckpointError: the file cannot be read, or holds something else.
    """
    try:
        return json_files.read_object(path)
    except json_files.JsonError as error:
        raise CheckpointError(str(error)) from error


def write_object(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file that holds one JSON object."""
    path.write_text(json.dumps(content, indent=2) + "\n", "utf-8")


class Reader:
    """Reads keys of a JSON object, and reports keys that nothing has read.

    Args:
        path: of the file, for errors.
        raw: the object.
        known: keys that need not be read.
    """

    def __init__(
        self, path: Path, raw: Mapping[str, Any], known: frozenset[str] = frozenset()
    ):
        self.path, self.raw = path, raw
        self.read: set[str] = set(known)

    def error(self, message: str) -> CheckpointError:
        """An error whose message starts with this file."""
        return CheckpointError(f"{self.path}: {message}")

    def take(
        self,
        key: str,
        kind: type | tuple,
        default: Any = MISSING,
        within: Range | None = None,
    ) -> Any:
        """Return the value of a key, checked, or the default.

        With `float`, integers are converted. The default is also for null where that is
        no value of its own; without a default, both are errors.

        Raises:
            CheckpointError: the key is missing, or its value has another type or range.
        """
        self.read.add(key)
        value = self.raw.get(key, MISSING)
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if value is None and default is not MISSING and type(None) not in kinds:
            return default
        if value is MISSING:
            if default is MISSING:
                raise self.error(f"{key} is missing")
            return default
        if float in kinds and type(value) is int:
            value = float(value)
        if type(value) not in kinds:
            names = " or ".join(k.__name__ for k in kinds)
            raise self.error(f"{key} must be {names}, got {messages.short(value)}")
        if within is not None and value is not None:
            problem = within.problem(value)
            if problem:
                raise self.error(f"{key} {problem}, got {messages.short(value)}")
        return value

    def strings(self, key: str) -> list[str]:
        """Return a list of strings; empty if the key is missing or null."""
        listed = self.take(key, (list, type(None)), None) or []
        wrong = [value for value in listed if not isinstance(value, str)]
        if wrong:
            raise self.error(f"{key} must list names, got {messages.short(wrong[0])}")
        return listed

    def choose(self, key: str, value: Any, known: Mapping[str, Any]) -> Any:
        """Look a value up in a table, or raise an error that names the key."""
        if not isinstance(value, str) or value not in known:
            raise self.error(
                f"{key} {messages.short(value)} is not implemented; known are "
                f"{', '.join(map(repr, known))}"
            )
        return known[value]

    def finish(self, must_be: Mapping[str, tuple]) -> None:
        """Raise for unread keys, and for keys with a value that is not implemented."""
        for key, implemented in must_be.items():
            if key in self.read:  # an architecture that implements other values
                continue
            value = self.raw.get(key, implemented[0])
            self.read.add(key)
            if value not in implemented:
                raise self.error(
                    f"{key}={messages.short(value)} is not implemented; only "
                    f"{implemented[0]!r} is"
                )
        unknown = [
            key
            for key, value in self.raw.items()
            if key not in self.read and key not in _ignored and value is not None
        ]
        if unknown:
            raise self.error(
                f"unknown keys {messages.listing(unknown)}: jaxmem does not implement "
                "their effect; if they have none, delete them or add --ignore-keys "
                f"{messages.cut(','.join(unknown))}"
            )
