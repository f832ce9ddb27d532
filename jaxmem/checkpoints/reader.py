"""JSON objects of a checkpoint, read key by key: each of its type, in its range."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxmem.core import json_files, messages
from jaxmem.core.ranges import Range


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names the file and what in it."""


MISSING = object()


def read_object(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
      CheckpointError: it cannot be read, or holds something else.
    """
    try:
        return json_files.read_object(path)
    except json_files.JsonError as error:
        raise CheckpointError(str(error)) from error


class Reader:
    """Takes keys out of a JSON object, and knows which were never asked for.

    Args:
      path: of the file, for errors.
      raw: the object.
      known: keys that need not be asked for.
    """

    def __init__(
        self, path: Path, raw: Mapping[str, Any], known: frozenset[str] = frozenset()
    ):
        self.path, self.raw = path, raw
        self.read: set[str] = set(known)

    def error(self, message: str) -> CheckpointError:
        """An error of this file."""
        return CheckpointError(f"{self.path}: {message}")

    def take(
        self,
        key: str,
        kind: type | tuple,
        default: Any = MISSING,
        within: Range | None = None,
    ) -> Any:
        """Return the value of a key, of one of these types, or the default.

        Args:
          key: of the object.
          kind: type, or types; where `float` is one, integers are converted.
          default: where the key is missing; without one that is an error.
          within: range of a number.
        """
        self.read.add(key)
        if key not in self.raw:
            if default is MISSING:
                raise self.error(f"{key} is missing")
            return default
        value = self.raw[key]
        kinds = kind if isinstance(kind, tuple) else (kind,)
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
        """Return a list of strings; empty where the key is missing or null."""
        listed = self.take(key, (list, type(None)), None) or []
        wrong = [value for value in listed if not isinstance(value, str)]
        if wrong:
            raise self.error(f"{key} must list names, got {messages.short(wrong[0])}")
        return listed

    def choose(self, key: str, value: Any, known: Mapping[str, Any]) -> Any:
        """Translate a value, or refuse it by name."""
        if not isinstance(value, str) or value not in known:
            raise self.error(
                f"{key} {messages.short(value)} is not implemented; known are "
                f"{', '.join(map(repr, known))}"
            )
        return known[value]

    def finish(self, must_be: Mapping[str, tuple]) -> None:
        """Refuse what has not been read, and keys that have another value."""
        for key, wanted in must_be.items():
            value = self.raw.get(key, wanted[0])
            self.read.add(key)
            if value not in wanted:
                raise self.error(
                    f"{key}={messages.short(value)} is not implemented; only "
                    f"{wanted[0]!r} is"
                )
        unknown = [key for key in self.raw if key not in self.read]
        if unknown:
            raise self.error(
                f"unknown keys {messages.listing(unknown)}: what they do to the model "
                "is not implemented; delete those that do nothing"
            )
