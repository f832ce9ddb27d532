"""Values in errors: of one line, short, and never an error of their own."""

import numpy as np
import pytest

from jaxmem.base import messages


class Loud:
    def __repr__(self):
        raise RuntimeError("no")


class Wide:
    def __repr__(self):
        return "a\nb" * 10**6


def nested(levels):
    made = []
    for _ in range(levels):
        made = [made]
    return made


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (5, "5"), ("a b", "'a b'"), ([1, None], "[1, None]"), ({"a": 1}, "{'a': 1}"),
        ((2, 4), "(2, 4)"), (0.5, "0.5"), ("a\nb", r"'a\nb'"), (10**30, str(10**30)),
        (10**5000, "<integer of about 5,001 digits>"),
        (-(10**5000), "<integer of about 5,001 digits>"), (nested(9), "[[[[...]]]]"),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_short(value, text):
    assert messages.short(value) == text


@pytest.mark.parametrize(
    "value",
    [
        "x" * 10**6, [list(range(10**5))] * 10, {str(i): i for i in range(10**5)},
        Wide(), np.zeros(10**6), [10**5000] * 9, nested(10**5), b"\n" * 10**6,
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_long_values_are_cut(value):
    text = messages.short(value)
    assert len(text) <= 240 and "\n" not in text


def test_values_that_cannot_be_shown():
    assert messages.short(Loud()).startswith("<Loud instance at")
    assert messages.short(type("list", (), {})()).startswith("<list")  # no len


def test_names_and_lists():
    assert messages.name("model.norm.weight") == "model.norm.weight"
    assert messages.name("a\nb") == r"'a\nb'" and messages.name("") == "''"
    assert len(messages.name("x" * 10**6)) <= 240
    assert messages.listing("ab") == "'a', 'b'"
    assert messages.listing(range(1000), most=2) == "0, 1 and 998 more"
    assert messages.cut("a\nb" * 200, 10) == "a ba ba..."


def test_cut_text_has_no_escapes_of_a_terminal():
    assert messages.cut("a\x1b[2J\x1b[31mred\r\nb\u2028c\x07 é 漢") == (
        r"a\x1b[2J\x1b[31mred b c\x07 é 漢"
    )


def test_counted_has_singular_and_plural():
    counted = [messages.counted(n, "step") for n in (0, 1, 2000)]
    assert counted == ["0 steps", "1 step", "2,000 steps"]
    assert messages.counted(2, "micro-batch") == "2 micro-batches"
