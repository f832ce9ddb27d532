"""Values of the command line's options, as argparse reads them."""

import argparse
import json
from typing import Any

from jaxmem.base import messages


def shape(text: str) -> tuple[int, int, int]:
    """Three sizes, separated by commas."""
    parts = [_parse_positive(part) for part in text.split(",")]
    if len(parts) != 3 or None in parts:
        raise _argument_error("three positive integers, as in 4096,1024,50257", text)
    n, d, v = (part for part in parts if part is not None)
    return n, d, v


def count(text: str) -> int:
    """A positive integer."""
    number = _parse_positive(text)
    if number is None:
        raise _argument_error("a positive integer", text)
    return number


def chunk(text: str) -> int | str:
    """A positive number of tokens, or "auto"."""
    tokens = _parse_positive(text)
    if tokens is None and text != "auto":
        raise _argument_error("a positive number of tokens, or auto", text)
    return tokens or text


def json_object(text: str) -> dict[str, Any]:
    """An object as JSON."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}")
    return value


def _parse_positive(text: str) -> int | None:
    """A positive integer below 2**31; None for any other text."""
    try:
        number = int(text)
    except ValueError:
        return None
    return number if 1 <= number < 2**31 else None


def _argument_error(expected: str, text: str) -> argparse.ArgumentTypeError:
    message = f"invalid value {messages.short(text)}: must be {expected}"
    return argparse.ArgumentTypeError(message)
