"""Strict parsing of JSON from outside, with limits and errors that name the place.

Parsed values have finite numbers, limited depth, no duplicate keys and only text that
can be encoded again; anything else raises `JsonError`.
"""

import json
import math
import re
import stat
from pathlib import Path
from typing import Any

from jaxmem.base import messages

MAX_BYTES = 256 * 2**20  # of a file, or of one line of data
MAX_DEPTH = 100  # of objects and lists; comparing deeper ones may exhaust the stack
MAX_DIGITS = 308  # of an integer: float64 can represent it
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class JsonError(ValueError):
    """JSON that is malformed or exceeds a limit; the message says what and where."""


def parse(text: str) -> Any:
    """Parse JSON as RFC 8259 defines it.

    Returns:
        The value of dicts, lists, strings, finite numbers, booleans and None.

    Raises:
        JsonError: the text is not JSON (NaN and Infinity are not), repeats a key,
            exceeds a limit, or has a string with half of a surrogate pair.
    """
    if len(text) > MAX_BYTES:
        raise JsonError(f"longer than {MAX_BYTES // 2**20} MiB")
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        position = f"column {error.colno}"
        position = position if error.lineno == 1 else f"line {error.lineno}, {position}"
        raise JsonError(f"not valid JSON: {error.msg} ({position})") from error
    except RecursionError as error:
        raise JsonError(_TOO_DEEP) from error
    _check_values(value, _SURROGATE.search(text) is not None)
    return value


def read_text(path: Path) -> str:
    """A file of UTF-8 text; an OSError or a JsonError if it cannot be read as such."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise JsonError("not a file")
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise JsonError(f"not UTF-8 text (byte {error.start})") from error


def read_object(path: Path) -> dict[str, Any]:
    """The object that a file holds as JSON; a JsonError, which names it, if none."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise JsonError(f"larger than {MAX_BYTES // 2**20} MiB")
        value = parse(read_text(path))
    except JsonError as error:
        raise JsonError(f"{path}: {error}") from error
    except (OSError, ValueError) as error:  # ValueError: the path itself is invalid
        raise JsonError(f"{path}: cannot be read: {messages.reason(error)}") from error
    if not isinstance(value, dict):
        raise JsonError(f"{path}: expected a JSON object, got {messages.short(value)}")
    return value


_TOO_DEEP = f"nested deeper than {MAX_DEPTH}"


def _check_values(root: Any, surrogates: bool) -> None:
    """Check depth and strings, one level of nesting at a time."""
    level, depth = [root], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH + 1:
            raise JsonError(_TOO_DEEP)
        if surrogates:
            _check_strings(level)
        inner: list[Any] = []
        for value in level:
            if isinstance(value, (list, dict)):
                inner += value.values() if isinstance(value, dict) else value
        level = inner


def _check_strings(level: list[Any]) -> None:
    keys = (key for value in level if isinstance(value, dict) for key in value)
    for text in (*level, *keys):
        if isinstance(text, str):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise JsonError(
                    f"{messages.short(text)} holds half of a surrogate pair"
                ) from error


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise JsonError(f"the key {messages.short(twice)} is there twice")
    return fields


def _parse_integer(text: str) -> int:
    if len(text.lstrip("-")) > MAX_DIGITS:
        raise JsonError(f"an integer of {len(text.lstrip('-')):,} digits is too large")
    return int(text)


def _parse_float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise JsonError(f"the number {messages.cut(text, 40)} is too large")
    return number


def _refuse_constant(text: str) -> Any:
    raise JsonError(f"{text} is not JSON; write null, or leave the key out")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_build_object,
    parse_int=_parse_integer,
    parse_float=_parse_float,
    parse_constant=_refuse_constant,
)
