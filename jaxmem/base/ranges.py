"""Ranges of numbers that an option may take, and what an error says of other values.

    low <= value <= high        (or < where a bound is open)

A boolean is not a number. A number must be finite and representable in float32,
because it enters float32 arithmetic in the end. An integer must fit 64 bits.
"""

import dataclasses
from typing import Any

import numpy as np

LARGEST = float(np.finfo(np.float32).max)
SMALLEST = float(np.finfo(np.float32).tiny)
_INT64 = 2**63 - 1


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers between two bounds; `integers` and `reals` create them."""

    low: float | None = None  # the lower bound; None for none
    high: float | None = None  # the upper bound; None for none
    # a bound on the magnitude that any sensible value respects; only an error about a
    # larger value mentions it
    limit: float = LARGEST
    whole: bool = False  # whether only integers are in the range
    open_low: bool = False  # whether `low` itself is outside of the range
    open_high: bool = False  # whether `high` itself is outside of the range

    def problem(self, value: Any) -> str | None:
        """What is wrong with the value, as in "must be finite"; None if nothing is."""
        whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
        if not (whole or isinstance(value, (float, np.floating)) and not self.whole):
            return f"must be {'an integer' if self.whole else 'a number'}"
        number = int(value) if whole else float(value)
        if number != number or number in (float("inf"), -float("inf")):
            return "must be finite"
        if not self._holds(number):
            return f"must be {self._wanted}"
        if abs(number) > self.limit:
            size = "" if self.low is not None and self.low >= 0 else " in size"
            return f"must be at most {_plain(self.limit)}{size}"
        if 0 < abs(number) < SMALLEST:
            return f"must be 0 or at least {_plain(SMALLEST)} in size (float32)"
        return None

    @property
    def _wanted(self) -> str:
        low, high = _plain(self.low), _plain(self.high)
        if self.low is None:
            return f"{'below' if self.open_high else 'at most'} {high}"
        if self.high is None:
            return f"{'above' if self.open_low else 'at least'} {low}"
        if self.whole and not self.open_high:
            return f"from {low} to {high}"
        left, right = "[("[self.open_low], "])"[self.open_high]
        return f"in {left}{low}, {high}{right}"

    def _holds(self, value: float) -> bool:
        low = self.low is None or value > self.low or value == self.low
        high = self.high is None or value < self.high or value == self.high
        at_open_end = (self.open_low and value == self.low) or (
            self.open_high and value == self.high
        )
        return low and high and not at_open_end


def _plain(bound: float | None) -> str:
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

    Args:
        low: the smallest integer in the range; None for no such bound.
        high: the largest integer in the range; None for no such bound.
        above: the largest integer below the range, instead of `low`.
        below: the smallest integer above the range, instead of `high`.
        limit: largest magnitude; see `Range`.

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

    Args:
        low: the smallest number in the range; None for no such bound.
        high: the largest number in the range; None for no such bound.
        above: an exclusive lower bound, instead of `low`.
        below: an exclusive upper bound, instead of `high`.

    >>> reals(0, below=1).problem(1.0), reals(above=0).problem(float("inf"))
    ('must be in [0, 1)', 'must be finite')
    >>> reals(above=0).problem(1e-300)
    'must be 0 or at least 1.18e-38 in size (float32)'
    """
    low, high = above if low is None else low, below if high is None else high
    opens = above is not None, below is not None
    return Range(low, high, LARGEST, False, *opens)
