"""Rows of `RULES`: the error of each kind, and the settings that it concerns."""

import dataclasses
from typing import Annotated

import pytest

from jaxmem.base.fields import check
from jaxmem.base.rules import left_out, must, needs, refused, stays


@dataclasses.dataclass(frozen=True)
class Curve:
    low: float = 0.0
    high: float = 1.0

    RULES = (must("high", "at least low={low:g}", lambda c: c.high >= c.low),)


@dataclasses.dataclass(frozen=True)
class Section:
    name: str = "a"
    size: int | None = None
    tags: dict[str, int] | None = None
    workers: int = 4
    loops: bool = False
    curve: Annotated[Curve, "a group"] = Curve()

    RULES = (
        needs("size loops", "a name other than {name!r}", lambda c: c.name != "a"),
        left_out("workers", "without loops", lambda c: not c.loops),
        stays("tags", {"x": 1}, "with loops", lambda c: c.loops),
        refused("name", "is too long for curve.high={curve.high}", lambda c: c.size),
    )


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({}, None),
        ({"size": 3}, "Section.size=3 needs a name other than 'a'"),
        ({"loops": True}, "Section.loops=True needs a name other than 'a'"),
        ({"name": "b"}, None),
        (
            {"workers": 9},
            "Section.workers must be left out, or 4, without loops, got 9",
        ),
        (
            {"name": "b", "loops": True},
            "Section.tags=None must stay {'x': 1} with loops",
        ),
        ({"name": "b", "loops": True, "tags": {"x": 1}, "workers": 9}, None),
        (
            {"name": "b", "size": 1},
            "Section.name='b' is too long for curve.high=1.0",
        ),
        (
            {"curve": Curve(low=2.0)},
            "Section.curve.high must be at least low=2, got 1.0",
        ),
    ],
)
def test_check_evaluates_every_kind_of_row(changes, error):
    section = Section(**changes)
    if error is None:
        check(section)
        return
    with pytest.raises(ValueError) as raised:
        check(section)
    assert str(raised.value) == error


def test_rows_across_sections_have_no_class_in_their_errors():
    @dataclasses.dataclass(frozen=True)
    class Whole:
        one: Section = Section()
        two: Section = Section()

        RULES = (needs("two.name", "one.size", lambda c: c.one.size),)

    check(Whole(), "")
    with pytest.raises(ValueError) as raised:
        check(Whole(two=Section(name="b")), "")
    assert str(raised.value) == "two.name='b' needs one.size"


def test_rows_of_a_class_add_to_those_of_its_bases():
    @dataclasses.dataclass(frozen=True)
    class Further(Curve):
        RULES = (must("low", "above 0", lambda c: c.low > 0),)

    check(Further(low=0.5))
    with pytest.raises(ValueError, match="^Further.low must be above 0, got 0.0$"):
        check(Further())
    with pytest.raises(ValueError, match="^Further.high must be at least low=2, got"):
        check(Further(low=2.0))
