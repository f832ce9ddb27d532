"""The one form of error for an impossible value in a training config."""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

from jaxmem import _repr
from jaxmem._ranges import Range


def check_field(config: object, name: str, good: bool, wanted: str) -> None:
    """Raise a ValueError that names the field of a config unless its value is good.

    Args:
      config: the dataclass; its class is named too.
      name: of the field.
      good: whether the value is fine.
      wanted: what it must be, in words.
    """
    if not good:
        raise ValueError(
            f"{type(config).__name__}.{name} must be {wanted}, "
            f"got {_repr.short(getattr(config, name))}"
        )


def check_numbers(config: Any, ranges: Mapping[str, Range]) -> None:
    """Raise a ValueError that names the first field whose number is out of its range.

    Args:
      config: a dataclass; None is fine in a field whose type says so.
      ranges: of the fields that hold numbers, by name.
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
                f"{_repr.short(value)}"
            )
