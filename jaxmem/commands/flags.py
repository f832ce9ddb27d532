"""Flags of a command, made from the annotations of its request."""

import argparse
import dataclasses
import inspect
import types
import typing
from typing import Any, Literal, TypeVar

from jaxmem.base import fields
from jaxmem.base.command_options import CommandOptions, Flag, Positional, flag_of

_Request = TypeVar("_Request", bound=CommandOptions)


def add_flags(parser: argparse.ArgumentParser, request: type[CommandOptions]) -> None:
    """Add an argument for each field of a request.

    Positional arguments have the order of the fields. Flags of the command itself come
    before those of the groups that commands share.
    """
    named = {field.path: field for field in fields.fields(request)}
    for field in [field for field in named.values() if field.fact(Positional)]:
        _add_positional(parser, named.pop(field.path))
    for group in request.__mro__:
        title = vars(group).get("TITLE")
        place = parser if title is None else parser.add_argument_group(*title)
        for name in inspect.get_annotations(group):
            if name in named:
                _add_flag(place, named.pop(name))


def read(request: type[_Request], arguments: argparse.Namespace) -> _Request:
    """The request of parsed arguments.

    Raises:
        ValueError: an argument cannot be used, or not beside another.
    """
    values = vars(arguments).items()
    return request(**{k: tuple(v) if isinstance(v, list) else v for k, v in values})


def _add_positional(parser: Any, field: fields.Setting) -> None:
    options = _shared(field)
    if typing.get_origin(field.annotation) is tuple:
        options["nargs"] = "*"
    elif "default" in options:
        options["nargs"] = "?"
    parser.add_argument(field.path, metavar=flag_of(field), **options)


def _add_flag(parser: Any, field: fields.Setting) -> None:
    flag, kind = field.fact(Flag) or Flag(), field.annotation
    if field.is_optional:
        kind = next(k for k in typing.get_args(kind) if k is not types.NoneType)
    options: dict[str, Any] = {"dest": field.path, **_shared(field)}
    if kind is bool:
        parser.add_argument(flag_of(field), action="store_true", **options)
        return
    if flag.metavar is not None:
        options["metavar"] = flag.metavar
    if flag.bare is not None:
        options |= {"nargs": "?", "const": flag.bare}
    if flag.parse is not None:
        options["type"] = flag.parse
    elif typing.get_origin(kind) is Literal:
        options["choices"] = typing.get_args(kind)
    elif typing.get_origin(kind) is tuple:
        options["action"] = "append"
    elif kind is not str:
        options["type"] = kind
    is_required = "default" not in options
    parser.add_argument(flag_of(field), required=is_required, **options)


def _shared(field: fields.Setting) -> dict[str, Any]:
    """The help, with the default in place of `{default}`, and the default."""
    default = field.default
    shown = f"{default:g}" if isinstance(default, float) else str(default)
    options: dict[str, Any] = {"help": field.help.replace("{default}", shown)}
    if default is not dataclasses.MISSING:
        options["default"] = [*default] if isinstance(default, tuple) else default
    return options
