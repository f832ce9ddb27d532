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
    """The resources that this thread's rendering has used, and its deadline."""

    turns = 0  # of loops
    characters = 0  # of the texts that it has made
    deadline = math.inf  # of `time.monotonic`

    def start(self) -> None:
        """Begin a rendering."""
        self.turns, self.characters = 0, 0
        self.deadline = time.monotonic() + _MOST_SECONDS

    def check(self, added: int = 0) -> None:
        """Raise if `added` characters exceed the bound, or the deadline has passed."""
        if self.characters + added > _MOST_CHARACTERS:
            raise RenderingBoundError(
                f"it makes texts longer than {_MOST_CHARACTERS:,} characters"
            )
        if time.monotonic() > self.deadline:
            raise RenderingBoundError(f"it takes more than {_MOST_SECONDS} seconds")

    def spend(self, size: int) -> None:
        """Count characters of a new text."""
        self.check(size)
        self.characters += size

    def check_bits(self, bits: int) -> None:
        """Raise for a number of more bits than the bound."""
        if bits > _MOST_BITS:
            raise RenderingBoundError(
                f"it makes a number of more than {_MOST_BITS:,} bits"
            )

    def check_texts(self, *values: Any) -> None:
        """Raise if values are too long as text: a nested list can be, though small."""
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
    """Characters that a value counts as, without the contents of its entries."""
    if isinstance(value, str):
        return len(value)
    is_held = isinstance(value, (list, tuple, dict, set))
    return _ENTRY * len(value) if is_held else 0


def text_size(value: Any, sizes: dict[int, tuple[Any, int]] | None = None) -> int:
    """A lower bound on the characters of a value's `str` or `repr`.

    A list that occurs many times in another is walked once: `sizes` maps identities to
    values and sizes. It holds the values so that no identity is used again.
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
