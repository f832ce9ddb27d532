"""Milliseconds of paths that take turns, each beside the bare GEMM; any framework.

A chip at its power limit slows down by what ran just before, so that milliseconds
taken minutes apart do not compare. Hence: a sample is many calls of one path, waited
for once; every sample lies between two samples of the unit (the bare GEMM), and a
path's ratio is to the mean of these two; the paths' order rotates from one repetition
to the next.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

OUT_OF_MEMORY = "out of memory"
_TRIES = 3  # calls that say how many a sample takes
Run = Callable[[], Any]  # starts one call and returns its result, perhaps not there yet


class Timing(NamedTuple):
    """Medians over the repetitions, and how far the ratio was from one to another."""

    ms: float
    over_unit: float
    spread: float  # (largest - smallest ratio) / median


@dataclasses.dataclass(frozen=True)
class Stopwatch:
    """How a framework is waited for, and how it says that memory ran out.

    Attributes:
        wait: returns once a result is there, and all that was started before it.
        is_out_of_memory: whether an exception means that.
        sample_seconds: back-to-back calls of one sample last about this long; 0 for
            a call a sample.
    """

    wait: Callable[[Any], Any]
    is_out_of_memory: Callable[[Exception], bool]
    sample_seconds: float

    def seconds(self, run: Run, calls: int = 1) -> float:
        """Seconds a call, of as many back to back."""
        start = time.perf_counter()
        made = None
        for _ in range(calls):
            made = None  # its memory is free for the next call
            made = run()
        self.wait(made)
        return (time.perf_counter() - start) / calls

    def calls(self, run: Run) -> int | None:
        """Calls a sample takes, warmed up; None where memory runs out."""
        try:
            self.seconds(run)
            if not self.sample_seconds:
                return 1
            # The fastest: by a call that recorded a graph, say, a sample would be one
            # call, whose start and end nothing hides.
            once = min(self.seconds(run) for _ in range(_TRIES))
        except Exception as error:
            if not self.is_out_of_memory(error):
                raise
            return None
        return math.ceil(self.sample_seconds / once)


def take_turns(
    stopwatch: Stopwatch, unit: Run, paths: Mapping[Any, Run], repetitions: int
) -> tuple[float, dict[Any, Timing | None]]:
    """ms of the unit, and each path's `Timing`: None where memory runs out."""
    asked = {name: stopwatch.calls(run) for name, run in paths.items()}
    unit_calls = stopwatch.calls(unit)
    if unit_calls is None:
        raise MemoryError("none for the bare GEMM, the unit of the measurement")
    calls = {name: n for name, n in asked.items() if n is not None}
    fitting = list(calls)
    seconds: dict[Any, list] = {name: [] for name in fitting}
    ratios: dict[Any, list] = {name: [] for name in fitting}
    unit_seconds = [stopwatch.seconds(unit, unit_calls)]
    for repetition in range(repetitions):
        first = repetition * len(fitting) // repetitions
        for name in fitting[first:] + fitting[:first]:
            taken = stopwatch.seconds(paths[name], calls[name])
            unit_seconds.append(stopwatch.seconds(unit, unit_calls))
            seconds[name].append(taken)
            ratios[name].append(taken / statistics.mean(unit_seconds[-2:]))
    made = {name: _timing(seconds[name], ratios[name]) for name in fitting}
    return statistics.median(unit_seconds) * 1e3, {k: made.get(k) for k in paths}


def _timing(seconds, ratios):
    middle = statistics.median(ratios)
    spread = (max(ratios) - min(ratios)) / middle
    return Timing(statistics.median(seconds) * 1e3, middle, spread)


def columns(
    shape: tuple[int, int, int],
    unit_ms: float,
    forward: Timing | None,
    both: Timing | None,
    active: float = 1.0,
    missing: str = OUT_OF_MEMORY,
) -> dict[str, Any]:
    """Columns of a row: time, ratio to the unit, rate.

    Rates count what the result needs, 2·N·V·D forward and 6·N·V·D with gradients, of
    the active share of the rows; logits made a second time are not counted. A timing
    that is missing says so.
    """
    n, d, v = shape
    gemm = 2e-9 * n * d * v  # TFLOP, and a rate over ms: TFLOP/s
    row: dict[str, Any] = {
        "gemm_ms": round(unit_ms, 3),
        "gemm_tflops": round(gemm / unit_ms, 1),
    }
    for name, timing, passes in (
        ("forward", forward, 1),
        ("forward_backward", both, 3),
    ):
        row[f"{name}_ms"] = round(timing.ms, 3) if timing else missing
        row[f"{name}_over_gemm"] = round(timing.over_unit, 3) if timing else ""
        row[f"{name}_spread"] = round(timing.spread, 3) if timing else ""
        rate = round(active * passes * gemm / timing.ms, 1) if timing else ""
        row[f"{name}_tflops"] = rate
    return row
