"""Numbers that a text has, as people write them: 72, -1,234.5, .5e3."""

import re

# Commas separate groups of two or three digits, of which the last has three.
_DIGITS = r"(?:\d{1,3}(?:,\d{2,3})*,\d{3}(?!\d)|\d+)"
NUMBER = re.compile(rf"[-+]?(?:{_DIGITS}(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?")


def last_number(text: str) -> str | None:
    """The last number of a text, without commas; None without one."""
    numbers = NUMBER.findall(text)
    return numbers[-1].replace(",", "") if numbers else None
