"""Short representations of values for one-line error messages."""

import math
import reprlib
from collections.abc import Collection, Iterable, Sequence

_LONGEST = 240  # characters of one value
_LONGEST_NAME = 100  # characters of a name that is shown without quotes
_BITS = 256  # longest integer whose digits are shown


class _Short(reprlib.Repr):
    def __init__(self):
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 3, 80, 200
        self.maxlong = 80

    def repr_int(self, x, level):
        """The digits, or their number: Python refuses to print thousands of digits."""
        if abs(x).bit_length() <= _BITS:
            return repr(x)
        digits = int(abs(x).bit_length() * math.log10(2)) + 1
        return f"<integer of about {digits:,} digits>"


_SHORT = _Short()


def short(value: object) -> str:
    """The value's repr on one line, cut where it is long; it never raises."""
    try:
        text = " ".join(_SHORT.repr(value).splitlines())
    except Exception:  # the value's own methods may raise anything
        text = f"<{type(value).__name__}>"
    return cut(text, _LONGEST)


def must_be(name: str, expected: str, got: object) -> str:
    """The error text for a value that an argument, a key or a field cannot have."""
    return f"{name} must be {expected}, got {short(got)}"


def reason(error: BaseException) -> str:
    """Why something cannot be read, as the operating system or a library says."""
    return cut(getattr(error, "strerror", None) or str(error))


def name(text: str) -> str:
    """The name unchanged, or as `short` writes it if it is long or unprintable."""
    plain = text.isprintable() and 0 < len(text) <= _LONGEST_NAME
    return text if plain else short(text)


def counted(number: int, noun: str) -> str:
    """The number and the noun, in the plural unless the number is 1."""
    ending = "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{'' if number == 1 else ending}"


def listing(values: Iterable[object], most: int = 5) -> str:
    """The first values, each as `short` writes it, and the number of the others."""
    values = list(values)
    more = f" and {len(values) - most:,} more" if len(values) > most else ""
    return ", ".join(map(short, values[:most])) + more


def cut(text: str, length: int = 300) -> str:
    """The start of a text, such as another library's message, on one line.

    What cannot be printed, such as a terminal's escapes, is written as in `repr`.
    """
    text = " ".join(text[: 2 * length].splitlines())
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return text if len(text) <= length else f"{text[: length - 3]}..."


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> str:
    """Rows as lines; the columns `left` are left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
