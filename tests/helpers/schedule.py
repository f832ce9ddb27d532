"""Operations that run during a copy to the host or back, by a compiled program.

XLA prints a program in the order in which it starts what is in it; a copy that does not
hold up the rest is a pair, `…-start` and `…-done`. What lies between, overlaps.
"""

import re
from typing import NamedTuple

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%([\w.\-]+) = (.*)$")
_OPERATION = re.compile(r"(?:^|[\s)}\]])([a-z][a-z\-]*)\(%?([\w.\-]*)")
_CALLED = re.compile(r'(?:calls=|custom_call_target=")([^\s,"]+)')
_PRODUCT = re.compile("gemm|cublas|dot|cudnn|fmha")
_HOST = "S(5)"


class Copy(NamedTuple):
    """One between host and device."""

    computation: str  # "ENTRY", or the name of a loop's body
    to_host: bool
    products: int  # matrix products between its start and its end


def host_copies(text: str) -> list[Copy]:
    """The host copies of a scheduled program, `compiled.as_text()`."""
    made = []
    for part in re.split(r"\n(?=%|ENTRY)", text):
        name = part.split(" ")[0].lstrip("%")
        lines = [m.groups() for m in map(_INSTRUCTION.match, part.splitlines()) if m]
        started = {}
        for i, (left, right) in enumerate(lines):
            plain = right.split(", metadata=")[0]
            found = _OPERATION.search(plain)
            operation, operand = found.groups() if found else ("", "")
            if operation.endswith("-start") and _HOST in plain:
                started[left] = i, _goes_to_host(left, plain)
            elif operation.endswith("-done") and operand in started:
                start, to_host = started[operand]
                between = lines[start + 1 : i]
                made.append(Copy(name, to_host, sum(map(_is_product, between))))
    return made


def _goes_to_host(name, right):
    if "slice" in name:  # of a stack: written to, or read from
        return "update" in name
    return _HOST in right.split("}", 1)[0]  # a plain copy's result comes first


def _is_product(instruction):
    left, right = instruction
    found = _OPERATION.search(right)
    kind = found.group(1) if found else ""
    said = left + "".join(_CALLED.findall(right))
    return kind in ("fusion", "custom-call") and bool(_PRODUCT.search(said))
