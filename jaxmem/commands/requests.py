"""Flags of commands, made from the annotations of their requests."""

import argparse
import dataclasses
import inspect
import itertools
import types
import typing
from typing import Annotated, Any, Literal, TypeVar

from jaxmem.base import fields
from jaxmem.base.command_options import (
    CodeOptions,
    CommandOptions,
    DType,
    Flag,
    Positional,
    flag_of,
)

_Request = TypeVar("_Request", bound=CommandOptions)


@dataclasses.dataclass(frozen=True)
class ExportRequest(CodeOptions):
    """Options of `jaxmem export`."""

    path: Annotated[str, Positional("DIR"), "run, checkpoint, adapter or Hub model"]
    _: dataclasses.KW_ONLY
    out: Annotated[str | None, "directory to create; required without --push"] = None
    push: Annotated[
        str | None,
        Flag(metavar="OWNER/NAME"),
        "upload the model to this repository of the Hub",
    ] = None
    private: Annotated[bool, "with --push, make a new repository private"] = False
    merge: Annotated[bool, "merge the adapters into the weights"] = False
    base: Annotated[
        str | None,
        Flag(metavar="OWNER/NAME"),
        "base model to record in the saved adapter: a Hub model or a directory",
    ] = None
    dtype: Annotated[DType | None, "type of the saved weights"] = None


def add_flags(parser: argparse.ArgumentParser, request: type[CommandOptions]) -> None:
    """Add an argument for each field of a request.

    Positional arguments have the order of the fields. Flags of the command itself come
    before those of the groups that commands share.
    """
    every = fields.fields(request)
    positional = [field for field in every if field.fact(Positional)]
    groups = map(inspect.get_annotations, request.__mro__)
    flags = {field.path: field for field in every if field not in positional}
    for field in positional:
        nargs = {} if field.default is dataclasses.MISSING else {"nargs": "?"}
        parser.add_argument(
            field.path, metavar=flag_of(field), **nargs, **_shared(field)
        )
    for name in itertools.chain.from_iterable(groups):
        if name in flags:
            _add_flag(parser, flags.pop(name))


def read(request: type[_Request], arguments: argparse.Namespace) -> _Request:
    """The request of parsed arguments.

    Raises:
        ValueError: an argument cannot be used, or not beside another.
    """
    values = vars(arguments).items()
    return request(**{k: tuple(v) if isinstance(v, list) else v for k, v in values})


def _add_flag(parser: argparse.ArgumentParser, field: fields.Setting) -> None:
    flag, kind = field.fact(Flag) or Flag(), field.annotation
    if field.is_optional:
        kind = next(k for k in typing.get_args(kind) if k is not types.NoneType)
    options: dict[str, Any] = {"dest": field.path, **_shared(field)}
    if kind is bool:
        parser.add_argument(flag_of(field), action="store_true", **options)
        return
    if flag.metavar is not None:
        options["metavar"] = flag.metavar
    if field.default is dataclasses.MISSING:
        options["required"] = True
    if flag.parse is not None:
        options["type"] = flag.parse
    elif typing.get_origin(kind) is Literal:
        options["choices"] = typing.get_args(kind)
    elif typing.get_origin(kind) is tuple:
        options["action"] = "append"
    elif kind is not str:
        options["type"] = kind
    parser.add_argument(flag_of(field), **options)


def _shared(field: fields.Setting) -> dict[str, Any]:
    """The help, with the default in place of `{default}`, which the request sets."""
    default = field.default
    default = f"{default:g}" if isinstance(default, float) else str(default)
    return {
        "help": field.help.replace("{default}", default),
        "default": argparse.SUPPRESS,
    }
