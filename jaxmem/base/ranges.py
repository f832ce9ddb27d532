"""Ranges of numbers that an option may take, and what an error says of other values.

    low <= value <= high        (or < where a bound is open)

A boolean is not a number. A number must be finite and representable in float32,
because it enters float32 arithmetic in the end. An integer must fit 64 bits.
"""

import dataclasses
from typing import Any

import numpy as np

from jaxmem.base import messages

LARGEST = float(np.finfo(np.float32).max)
SMALLEST = float(np.finfo(np.float32).tiny)
_INT64 = 2**63 - 1


@dataclasses.dataclass(frozen=True, repr=False)
class Range:
    """The numbers between two bounds; `integers` and `reals` create them."""

    low: float | None = None  # the lower bound; None for none
    high: float | None = None  # the upper bound; None for none
    # a bound on the magnitude that any sensible value respects; only an error about a
    # larger value mentions it
    limit: float = LARGEST
    whole: bool = False  # True if only integers are in the range
    open_low: bool = False  # True if `low` itself is outside of the range
    open_high: bool = False  # True if `high` itself is outside of the range

    def __repr__(self) -> str:
        """The range in words, as `help` of a configuration's class shows it."""
        bounds = "" if self.low is self.high is None else f" {self._describe_bounds}"
        return f"<{'integers' if self.whole else 'numbers'}{bounds}>"

    def problem(self, value: Any) -> str | None:
        """The fault of a value, as in "must be finite"; None if it is in range."""
        whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
        if not (whole or isinstance(value, (float, np.floating)) and not self.whole):
            return f"must be {'an integer' if self.whole else 'a number'}"
        number = int(value) if whole else float(value)
        if number != number or number in (float("inf"), -float("inf")):
            return "must be finite"
        low, high = self.low, self.high
        too_low = low is not None and (number <= low if self.open_low else number < low)
        too_high = high is not None and (
            number >= high if self.open_high else number > high
        )
        if too_low or too_high:
            return f"must be {self._describe_bounds}"
        if abs(number) > self.limit:
            size = "" if self.low is not None and self.low >= 0 else " in size"
            return f"must be at most {_format_bound(self.limit)}{size}"
        if 0 < abs(number) < SMALLEST:
            return f"must be 0 or at least {_format_bound(SMALLEST)} in size (float32)"
        return None

    def fault(self, value: Any, optional: bool) -> str | None:
        """The fault of a field's value, as `base.fields.Constraint` has it."""
        problem = self.problem(value)
        return f"{problem}, or None" if problem and optional else problem

    @property
    def _describe_bounds(self) -> str:
        low, high = _format_bound(self.low), _format_bound(self.high)
        if self.low is None:
            return f"{'below' if self.open_high else 'at most'} {high}"
        if self.high is None:
            return f"{'above' if self.open_low else 'at least'} {low}"
        if self.whole and not self.open_high:
            return f"from {low} to {high}"
        left, right = "[("[self.open_low], "])"[self.open_high]
        return f"in {left}{low}, {high}{right}"


def _format_bound(bound: float | None) -> str:
    if isinstance(bound, int):
        power = bound.bit_length() - 1
        return f"2**{power}" if power > 15 and bound == 2**power else f"{bound:,}"
    return f"{bound:.3g}" if bound is not None else ""


def integers(
    low: int | None = None,
    high: int | None = None,
    *,
    above: int | None = None,
    below: int | None = None,
    limit: int = _INT64,
) -> Range:
    """The range of integers from `low`, or above `above`, to `high`, or below `below`.

    No such bound is None; `limit` is that of `Range`.

    >>> integers(1, 18).problem(0), integers(1).problem(True), integers(1).problem(3)
    ('must be from 1 to 18', 'must be an integer', None)
    >>> integers(0, below=2**31).problem(-1), integers(1, limit=2**20).problem(10**9)
    ('must be in [0, 2**31)', 'must be at most 2**20')
    """
    low, high = above if low is None else low, below if high is None else high
    opens = above is not None, below is not None
    return Range(low, high, limit, True, *opens)


def reals(
    low: float | None = None,
    high: float | None = None,
    *,
    above: float | None = None,
    below: float | None = None,
) -> Range:
    """The range of numbers from `low`, or above `above`, to `high`, or below `below`.

    >>> reals(0, below=1).problem(1.0), reals(above=0).problem(float("inf"))
    ('must be in [0, 1)', 'must be finite')
    >>> reals(above=0).problem(1e-300)
    'must be 0 or at least 1.18e-38 in size (float32)'
    """
    low, high = above if low is None else low, below if high is None else high
    opens = above is not None, below is not None
    return Range(low, high, LARGEST, False, *opens)


def check(name: str, value: Any, within: Range) -> None:
    """Raise a ValueError that names the value unless it is in the range."""
    if problem := within.problem(value):
        raise ValueError(f"{name} {problem}, got {messages.short(value)}")
