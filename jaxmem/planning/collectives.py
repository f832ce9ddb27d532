"""The collectives of a compiled program, and their bytes."""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import jax

BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4}
BYTES |= {"f32": 4, "f64": 8, "s64": 8, "u64": 8}

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$")
_COLLECTIVE = re.compile(
    r" = (?P<type>.+?) (?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all"
    r"|ragged-all-to-all|collective-permute)(?P<start>-start)?\("
)
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_WHILE = re.compile(r" while\(.*body=%?([\w.-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CALLED = re.compile(r"(?:calls|to_apply|branch_computations)=\{?((?:%[\w.-]+,? ?)+)")


class Collective(NamedTuple):
    """One collective instruction of a program, on one device."""

    kind: str  # XLA's name of the instruction
    array: str  # its results on one device, such as "f32[2,1024]"
    payload: int  # bytes of the reduced or of the gathered array, on one device
    parts: int  # devices in one group
    times: int  # executions per run; 0 if a loop's length depends on data
    backward: bool  # True: it belongs to a backward pass

    @property
    def moved(self) -> float:
        """Bytes that a device sends in a ring algorithm, which is the minimum."""
        if self.kind == "collective-permute":
            return self.payload
        share = self.payload * (self.parts - 1) / self.parts
        return 2 * share if self.kind == "all-reduce" else share


def of(compiled: jax.stages.Compiled) -> list[Collective]:
    """Collectives of a program between several devices, in program order."""
    lines = _by_computation(compiled.as_text() or "")
    times = _count_executions(lines)
    return [
        collective
        for name, body in lines.items()
        for line in body
        for collective in _parse_line(line, times.get(name, 0))
        if collective.parts > 1
    ]


def _by_computation(text: str) -> dict[str, list[str]]:
    lines_of, current = {}, []
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            # A line that starts with ENTRY marks the entry computation.
            name = "ENTRY" if line.startswith("ENTRY") else header[1]
            current = lines_of.setdefault(name, [])
        current.append(line)
    return lines_of


def _count_executions(lines: dict[str, list[str]]) -> dict[str, int]:
    """Executions of each computation."""
    times_of: dict[str, int] = {}

    def visit(name, times):
        times_of[name] = times_of.get(name, 0) + times
        for line in lines.get(name, ()):
            if loop := _WHILE.search(line):
                trips = _TRIPS.search(line)
                visit(loop[1], times * int(trips[1]) if trips else 0)
            elif called := _CALLED.search(line):
                for other in called[1].replace("%", "").split(","):
                    visit(other.strip(), times)

    visit("ENTRY", 1)
    return times_of


def _parse_line(line: str, times: int) -> Iterator[Collective]:
    match = _COLLECTIVE.search(line)
    if not match:
        return
    kind, arrays = match["kind"], _ARRAY.findall(match["type"])
    if match["start"]:  # the type may list operands first; results are last
        operands = line[match.end() :].partition(")")[0]
        arrays = arrays[-operands.count("%") :]
    # XLA for CPUs reduces 16-bit types as 32-bit ones; other devices do not.
    half = 2 if "_promoted" in line else 1
    payload = sum(_count_bytes(*array) for array in arrays) // half
    parts = _group_size(line)
    if kind == "reduce-scatter":
        payload *= parts
    types = " ".join(f"{dtype}[{shape}]" for dtype, shape in arrays)
    yield Collective(kind, types, payload, parts, times, "transpose(" in line)


def _count_bytes(dtype: str, shape: str) -> int:
    return BYTES[dtype] * math.prod(int(n) for n in shape.split(",") if n)


def _group_size(line: str) -> int:
    """The number of devices in a group, from each syntax that XLA prints."""
    if "collective-permute" in line:
        return 2
    if axes := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", axes[1]))
        return math.prod(int(sizes[name]) for name in re.findall(r"'(\w+)'", axes[2]))
    if table := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(table[1])
    first = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    return len(first[1].split(",")) if first else 1


_SENT = r"(?:all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)"
_START = re.compile(rf"%([\w.-]*) = .* (?:{_SENT}|async|fusion)-start\(")
_DONE = re.compile(rf" (?:{_SENT}|async|fusion)-done\(%?([\w.-]+)")
_PRODUCT = re.compile("gemm|cublas|dot|cudnn|fmha|mosaic_gpu")


def _is_collective(line: str, computations: dict[str, list[str]]) -> bool:
    """True if an instruction, or the computation that it calls, is a collective."""
    called = re.search(r"calls=%([\w.-]+)", line)
    lines = computations[called[1]] if called else [line]
    return any(map(_COLLECTIVE.search, lines))


def hidden(text: str) -> tuple[int, int]:
    """(collectives that overlap with a matrix product, all collectives).

    A collective overlaps if a product is between its start and its end in the scheduled
    program. XLA prints instructions in scheduled order, and asynchronous ones as a
    pair, `…-start` and `…-done`, since jax 0.12 also of a fusion that sends.
    """
    beside, computations = 0, _by_computation(text)
    for lines in computations.values():
        started: dict[str, int] = {}
        products = 0
        for line in lines:
            if (match := _START.search(line)) and _is_collective(line, computations):
                started[match[1]] = products
            elif (match := _DONE.search(line)) and match[1] in started:
                beside += products > started[match[1]]
            elif " = " in line and _PRODUCT.search(line.split(", metadata=")[0]):
                products += 1
    return beside, len(_COLLECTIVE.findall(text))
