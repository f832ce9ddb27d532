"""Bounds of a chat template's rendering: turns of loops, seconds and characters."""

import math
import threading
import time
from collections.abc import Collection, Mapping
from typing import Any

_MOST_TURNS = 1_000_000  # of a template's loops
_MOST_SECONDS = 30  # of the rendering of a conversation
_MOST_CHARACTERS = 2**28  # of the texts that a rendering makes, together
_MOST_BITS = 2**14  # of a number: decimal digits of more cannot be written
_ENTRY = 8  # characters that an entry of a list or dictionary counts as
_PLAIN = frozenset((str, int, float, bool, type(None)))


class RenderingBoundError(ValueError):
    """A template takes more turns, time or characters than a rendering has."""


class RenderingBudget(threading.local):
    """What the rendering in this thread has taken, and when its time ends."""

    turns, made, ends = 0, 0, math.inf

    def start(self) -> None:
        """Begin a rendering."""
        self.turns, self.made = 0, 0
        self.ends = time.monotonic() + _MOST_SECONDS

    def check(self, size: int = 0) -> None:
        """Raise for characters beyond the bound, or where the time is over."""
        if self.made + size > _MOST_CHARACTERS:
            raise RenderingBoundError(
                f"it makes texts of more than {_MOST_CHARACTERS:,} characters"
            )
        if time.monotonic() > self.ends:
            raise RenderingBoundError(f"it takes more than {_MOST_SECONDS} seconds")

    def spend(self, size: int) -> None:
        """Count characters that were made."""
        self.check(size)
        self.made += size

    def check_bits(self, bits: int) -> None:
        """Raise for a number beyond the bound."""
        if bits > _MOST_BITS:
            raise RenderingBoundError(
                f"it makes a number of more than {_MOST_BITS:,} bits"
            )

    def check_texts(self, *values: Any) -> None:
        """Raise if these values are too long as text, which nested lists can be."""
        held = [value for value in values if type(value) not in _PLAIN]
        if held:
            self.check(sum(map(text_size, held)))

    def turn(self) -> None:
        """Count a turn of a loop."""
        self.turns += 1
        if self.turns > _MOST_TURNS:
            raise RenderingBoundError(f"its loops take more than {_MOST_TURNS:,} turns")
        self.check()

    def add(self, result: Any) -> Any:
        """Count a result, and return it."""
        if isinstance(result, int):
            self.check_bits(result.bit_length())
        self.spend(size(result))
        return result


def size(value: Any) -> int:
    """Characters that a value counts as, without what its entries hold."""
    if isinstance(value, str):
        return len(value)
    is_held = isinstance(value, (list, tuple, dict, set))
    return _ENTRY * len(value) if is_held else 0


def text_size(value: Any, sizes: dict[int, tuple[Any, int]] | None = None) -> int:
    """Characters of a value's `str` or `repr`, at least.

    A list that stands in another one many times is walked once: `sizes` has the sizes
    by identity, with the values, which keeps the identities unique.
    """
    if isinstance(value, str):
        return len(value) + 2
    if isinstance(value, int):
        return value.bit_length() // 3 + 2
    if not isinstance(value, Collection) or isinstance(value, range):
        return 25  # a number, or the name of a function
    sizes = {} if sizes is None else sizes
    if id(value) not in sizes:
        parts = [*value, *value.values()] if isinstance(value, Mapping) else value
        size = 2
        for part in parts:
            size += 4 + (len(part) if type(part) is str else text_size(part, sizes))
        sizes[id(value)] = value, size
    return sizes[id(value)][1]
