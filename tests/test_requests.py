"""Flags of commands, which are made from the annotations of their requests."""

import argparse
import dataclasses
from typing import Annotated, ClassVar, Literal

import pytest

from jaxmem.base import options
from jaxmem.base.command_options import CommandOptions, Flag, Positional
from jaxmem.base.fields import Must
from jaxmem.base.ranges import integers
from jaxmem.commands import cli, flags, requests


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shared(CommandOptions):
    TITLE: ClassVar = ("shared options", "of all commands")

    verbose: Annotated[bool, "print more"] = False


@dataclasses.dataclass(frozen=True)
class Request(Shared):
    model: Annotated[str, Positional("DIR"), "model"]
    prompt: Annotated[str | None, Positional("PROMPT"), "text"] = None
    rest: Annotated[tuple[str, ...], Positional("key=value"), "settings"] = ()
    _: dataclasses.KW_ONLY
    source: Annotated[str, Flag("--in", "FILE"), "file"]
    max_tokens: Annotated[int | None, integers(1), "most tokens"] = None
    top_p: Annotated[float, Must("in (0, 1]", lambda p: 0 < p <= 1), "({default})"] = 1
    kind: Annotated[Literal["a", "b"], "kind, {default}"] = "a"
    stop: Annotated[tuple[str, ...], "ends"] = ()
    keys: Annotated[str | None, Flag(bare=""), "sections, or one"] = None
    count: Annotated[int, Flag(parse=options.count), "count"] = 3


def parser():
    made = argparse.ArgumentParser()
    flags.add_flags(made, Request)
    return made


def read(*arguments):
    return flags.read(Request, parser().parse_args(arguments))


def test_add_flags_leaves_defaults_to_the_request():
    assert read("m", "--in", "x") == Request("m", source="x")


def test_add_flags_parses_by_type_and_annotation():
    made = read(
        "m", "text", "a=1", "b=2", "--in=x", "--keys",
        "--max-tokens=2", "--top-p=0.5", "--kind=b",
        "--stop=y", "--stop=z", "--count=4", "--verbose",
    )  # fmt: skip
    assert made == Request(
        "m", "text", ("a=1", "b=2"), source="x", keys="", max_tokens=2, top_p=0.5,
        kind="b", stop=("y", "z"), count=4, verbose=True,
    )  # fmt: skip
    assert hash(made)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("m",), "the following arguments are required: --in"),
        (("m", "--in=x", "--max-tokens=y"), "--max-tokens: invalid int value: 'y'"),
        (("m", "--in=x", "--kind=c"), "--kind: invalid choice: 'c'"),
        (("m", "--in=x", "--count=0"), "--count: invalid value '0': must be a posit"),
    ],
)
def test_add_flags_refuses_text_of_no_value(arguments, message, capsys):
    with pytest.raises(SystemExit):
        read(*arguments)
    assert message in capsys.readouterr().err


def test_request_names_the_flag_of_an_impossible_value():
    with pytest.raises(ValueError, match="^--max-tokens must be at least 1, got 0$"):
        read("m", "--in=x", "--max-tokens=0")
    with pytest.raises(ValueError, match=r"^--top-p must be in \(0, 1\], got nan$"):
        read("m", "--in=x", "--top-p=nan")


@pytest.mark.parametrize("seconds", [0, -1])
def test_heartbeat_has_at_least_a_second(seconds):
    with pytest.raises(
        ValueError, match=f"^--heartbeat must be at least 1.*{seconds}$"
    ):
        requests.TrainRequest("a.gin", heartbeat=seconds)


def test_help_has_the_default_of_the_request():
    text = parser().format_help()
    assert "(1)" in text and "kind, a" in text
    _, own, shared = text.replace("shared options:", "options:").split("options:\n")
    assert own.index("--in FILE") < own.index("--count COUNT")
    assert "--verbose" in shared


def test_group_has_the_values_of_its_fields():
    assert read("m", "--in=x", "--verbose").group(Shared) == Shared(verbose=True)


def test_commands_share_the_flags_of_a_model():
    """They have one help and one order, whatever a command adds."""
    (parsers,) = cli._parser()._subparsers._group_actions
    names = "generate", "serve", "score", "eval"
    every = [
        {
            x.option_strings[0]: (x.help, x.choices, x.metavar, x.default)
            for x in parsers.choices[name]._actions
            if x.option_strings
        }
        for name in names
    ]
    shared = ["--adapter", "--dtype", "--base"]
    for own in every:
        assert [flag for flag in own if flag in shared] == shared
        assert [own[flag] for flag in shared] == [every[0][flag] for flag in shared]
    code = [every[0]["--factory"], every[0]["--trust-code"]]
    for own in every[2:]:
        assert [own["--factory"], own["--trust-code"]] == code
    assert "--factory" not in every[1]  # a model of the user's own is not served
