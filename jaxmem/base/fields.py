"""Checks of training-config fields, which all raise errors of one form."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

from jaxmem.base import messages
from jaxmem.base.ranges import Range, integers, reals


def check_field(config: object, name: str, good: bool, expected: str) -> None:
    """Raise a ValueError unless a field is good; `expected` describes good values."""
    if not good:
        field = f"{type(config).__name__}.{name}"
        raise ValueError(messages.must_be(field, expected, getattr(config, name)))


def check_numbers(config: Any, ranges: Mapping[str, Range]) -> None:
    """Raise a ValueError that names the first field whose number is out of its range.

    None is accepted in a field whose type allows it.
    """
    for field in dataclasses.fields(config):
        if field.name not in ranges:
            continue
        value = getattr(config, field.name)
        optional = type(None) in typing.get_args(field.type)
        problem = ranges[field.name].problem(value)
        if problem and not (optional and value is None):
            suffix = ", or None" if optional else ""
            raise ValueError(
                f"{type(config).__name__}.{field.name} {problem}{suffix}, got "
                f"{messages.short(value)}"
            )


def check_choices(config: Any) -> None:
    """Raise a ValueError that names the first field that is none of its literals."""
    for field in dataclasses.fields(config):
        kinds = field.type, *typing.get_args(field.type)
        if Literal in map(typing.get_origin, kinds):
            good = accepts(field.type, getattr(config, field.name))
            check_field(config, field.name, good, describe(field.type))


def problem_of(value: Any) -> str | None:
    """The fault of a value that no option may have; None for any other value.

    Such values are numbers outside of float32 or int64, and text that UTF-8 cannot
    encode or that contains a NUL character.
    """
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return "must be text that UTF-8 can encode"
        return "must not contain a NUL character" if "\0" in value else None
    if type(value) not in (int, float):
        return None
    return (integers() if type(value) is int else reals()).problem(value)


def accepts(annotation: Any, value: Any) -> bool:
    """True if a value has the type that a field declares."""
    origin, choices = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return any(accepts(choice, value) for choice in choices)
    if origin is Literal:
        return any(type(value) is type(c) and value == c for c in choices)
    if annotation is float:
        return type(value) in (int, float)
    return type(value) is (origin or annotation)


def describe(annotation: Any) -> str:
    """The type that a field declares, in words."""
    origin, choices = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(choice) for choice in choices)
    if origin is Literal:
        return " or ".join(repr(choice) for choice in choices)
    if annotation is types.NoneType:
        return "None"
    return (origin or annotation).__name__
