"""Times alternating paths relative to a bare GEMM, for any framework.

A chip at its power limit slows down depending on what ran just before, so times taken
minutes apart are not comparable. Therefore a sample is many back-to-back calls of one
path with one wait at the end; every sample is taken between two samples of the unit
(the bare GEMM), and a path's ratio is relative to the mean of these two; and the order
of the paths rotates from one repetition to the next.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

OUT_OF_MEMORY = "out of memory"
_TRIES = 3  # calls that estimate how many calls a sample takes
Run = Callable[[], Any]  # starts one call, and returns its possibly unfinished result


class Timing(NamedTuple):
    """Medians over the repetitions, and the relative range of the ratio."""

    ms: float
    over_unit: float
    spread: float  # (largest - smallest ratio) / median


@dataclasses.dataclass(frozen=True)
class Stopwatch:
    """A framework's ways to wait for results and to recognise that memory ran out."""

    # returns when a result, and everything started before it, is finished
    wait: Callable[[Any], Any]
    # whether an exception means that memory ran out
    is_out_of_memory: Callable[[Exception], bool]
    # approximate duration of the back-to-back calls of one sample; 0 for one call per
    # sample
    sample_seconds: float

    def seconds(self, run: Run, calls: int = 1) -> float:
        """Seconds per call, of the given number of back-to-back calls."""
        start = time.perf_counter()
        result = None
        for _ in range(calls):
            result = None  # free its memory before the next call
            result = run()
        self.wait(result)
        return (time.perf_counter() - start) / calls

    def calls(self, run: Run) -> int | None:
        """Calls per sample, after a warm-up call; None if memory runs out."""
        try:
            self.seconds(run)
            if not self.sample_seconds:
                return 1
            # The fastest one: a slow first call, which may record a graph, would make a
            # sample a single call, whose launch overhead does not overlap with others.
            once = min(self.seconds(run) for _ in range(_TRIES))
        except Exception as error:
            if not self.is_out_of_memory(error):
                raise
            return None
        return math.ceil(self.sample_seconds / once)


def take_turns(
    stopwatch: Stopwatch, unit: Run, paths: Mapping[Any, Run], repetitions: int
) -> tuple[float, dict[Any, Timing | None]]:
    """Milliseconds of the unit, and the `Timing` of each path, None out of memory.

    Raises:
        MemoryError: memory runs out for the unit.
    """
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
            run_seconds = stopwatch.seconds(paths[name], calls[name])
            unit_seconds.append(stopwatch.seconds(unit, unit_calls))
            seconds[name].append(run_seconds)
            ratios[name].append(run_seconds / statistics.mean(unit_seconds[-2:]))
    timings: dict[Any, Timing | None] = dict.fromkeys(paths)
    for name in fitting:
        middle = statistics.median(ratios[name])
        spread = (max(ratios[name]) - min(ratios[name])) / middle
        ms = statistics.median(seconds[name]) * 1e3
        timings[name] = Timing(ms, middle, spread)
    return statistics.median(unit_seconds) * 1e3, timings


def columns(
    shape: tuple[int, int, int],
    unit_ms: float,
    forward: Timing | None,
    forward_backward: Timing | None,
    active: float = 1.0,
    missing: str = OUT_OF_MEMORY,
) -> dict[str, Any]:
    """Columns of a result row: time, ratio to the unit, rate.

    Rates count the operations that the result requires, 2·N·V·D in a forward pass and
    6·N·V·D with gradients, for the active fraction of the rows; recomputed logits are
    not counted. The shape is (N, D, V).
    """
    n, d, v = shape
    gemm = 2e-9 * n * d * v  # TFLOP, and a rate over ms: TFLOP/s
    row: dict[str, Any] = {
        "gemm_ms": round(unit_ms, 3),
        "gemm_tflops": round(gemm / unit_ms, 1),
    }
    for name, timing, passes in (
        ("forward", forward, 1),
        ("forward_backward", forward_backward, 3),
    ):
        row[f"{name}_ms"] = round(timing.ms, 3) if timing else missing
        row[f"{name}_over_gemm"] = round(timing.over_unit, 3) if timing else ""
        row[f"{name}_spread"] = round(timing.spread, 3) if timing else ""
        rate = round(active * passes * gemm / timing.ms, 1) if timing else ""
        row[f"{name}_tflops"] = rate
    return row
