"""Options of commands: dataclasses from whose annotations the flags are made.

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class EvaluateRequest(TemplateOptions, ModelOptions):
        shots: Annotated[int | None, integers(0), "number of examples"] = None

The field `shots` is the flag `--shots`: its type, its range and its help stand in the
annotation, as in `base.fields`. `Flag` and `Positional` tell what these do not.
`{default}` in a help is the default. Nothing heavy is imported here, so that `--help`
of every command is fast and needs no extra.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, Literal, TypeVar

from jaxmem.base import fields, messages, options

_Group = TypeVar("_Group")
DType = Literal["bfloat16", "float16", "float32"]


@dataclasses.dataclass(frozen=True)
class Flag:
    """The spelling of a flag, where the name and the type of its field differ."""

    name: str = ""  # as in "--in"; "" for the name of the field
    metavar: str | None = None  # of the value; None for the name in capitals
    parse: Callable[[str], Any] | None = None  # of the value; None for the field's type
    bare: str | None = None  # the value of the flag alone; None if it needs one


@dataclasses.dataclass(frozen=True)
class Positional:
    """An argument without a flag, under this name."""

    metavar: str


@dataclasses.dataclass(frozen=True)
class CommandOptions:
    """Options of a command, or a group of them that several commands share.

    A class attribute `TITLE` of two texts gives a group its own section in the help.
    """

    def __post_init__(self):
        """Raise a ValueError that names the first flag with an impossible value."""
        for field in fields.fields(type(self)):
            value = getattr(self, field.path)
            if value is None and field.is_optional:
                continue
            for constraint in field.constraints:
                # Users leave a flag out, so that no error offers None.
                if (fault := constraint.fault(value, optional=False)) is not None:
                    flag = flag_of(field)
                    raise ValueError(f"{flag} {fault}, got {messages.short(value)}")

    def group(self, group: type[_Group]) -> _Group:
        """The values of one group, as an object of its class."""
        names = (field.path for field in fields.fields(group))
        return group(**{name: getattr(self, name) for name in names})


def flag_of(field: fields.Setting) -> str:
    """The flag of a field, as in "--max-tokens", or the name of a positional one."""
    if (positional := field.fact(Positional)) is not None:
        return positional.metavar
    flag = field.fact(Flag) or Flag()
    return flag.name or f"--{field.path.replace('_', '-')}"


def by_flag(options: CommandOptions, leave_out: Collection[str] = ()) -> dict[str, Any]:
    """The values of options by their flags, without the fields of some names."""
    return {
        flag_of(field): getattr(options, field.path)
        for field in fields.fields(type(options))
        if field.path not in leave_out
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class CodeOptions(CommandOptions):
    """The user's permission to run the code of a run's model."""

    factory: Annotated[
        str | None,
        Flag(metavar="FILE.py:NAME"),
        "your own code for the model of a run with model.factory",
    ] = None
    trust_code: Annotated[bool, "allow the code that the run's settings name"] = False


@dataclasses.dataclass(frozen=True)
class ModelOptions(CodeOptions):
    """A saved model, and how it is loaded; `score.opened_model.opened` opens it."""

    model: Annotated[str, Positional("DIR"), "run, checkpoint, adapter or Hub model"]
    _: dataclasses.KW_ONLY
    adapter: Annotated[
        str | None, "LoRA adapter to add: directory in PEFT's format, or Hub model"
    ] = None
    dtype: Annotated[
        DType | None, "type of the weights (default: the checkpoint's)"
    ] = None
    base: Annotated[
        Literal["nf4", "int8"] | None,
        "load the matrices of blocks as codes of 4 (nf4) or 8 (int8) bits",
    ] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TemplateOptions(CommandOptions):
    """Options of the chat template."""

    chat_template_kwargs: Annotated[
        Mapping[str, Any] | None,
        Flag(metavar="JSON", parse=options.json_object),
        """variables of the chat template, as in '{"enable_thinking": false}'""",
    ] = None
