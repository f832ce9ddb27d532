"""Groups of completions that threads sample while the policy is updated."""

import concurrent.futures
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import NamedTuple

from jaxmem.train.jobs.rollout.engines.patience import EngineError
from jaxmem.train.jobs.rollout.transcripts import Transcript

_POLL = 0.2  # seconds between two looks at whether the run is to end

# Samples one unit of work: a group, or what else belongs together.
Work = Callable[[], list[Transcript]]


class Attempt(NamedTuple):
    """A rollout of a step: 0, or the number of a further one of `grpo.resample`."""

    step: int
    number: int


class Traffic(NamedTuple):
    """Counts since the last look at them."""

    tokens: int  # sampled
    busy_seconds: float  # with at least one unit of work under way
    idle_seconds: float  # without any


class GroupSampler:
    """Runs units of work in threads, in the order in which they were submitted.

    Args:
        threads: units that run at a time.
    """

    def __init__(self, threads: int):
        self._waiting: SimpleQueue[tuple[Future, Work] | None] = SimpleQueue()
        self._threads = [
            # A request under way must not keep the process from ending.
            threading.Thread(target=self._serve, name=f"rollout-{i}", daemon=True)
            for i in range(threads)
        ]
        self._attempts: dict[Attempt, list[Future[list[Transcript]]]] = {}
        self._lock = threading.Lock()
        self._running, self._tokens = 0, 0
        self._busy = self._idle = 0.0
        self._changed = time.perf_counter()
        for thread in self._threads:
            thread.start()

    def _serve(self) -> None:
        """Run units until `close` is called."""
        while (item := self._waiting.get()) is not None:
            future, work = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self._run(work))
            except BaseException as error:  # raised where the result is asked for
                future.set_exception(error)

    def _start(self, work: Work) -> Future[list[Transcript]]:
        future: Future[list[Transcript]] = Future()
        self._waiting.put((future, work))
        return future

    def submit(
        self,
        attempt: Attempt,
        works: Sequence[Work],
        finished: Sequence[list[Transcript] | None] = (),
    ) -> None:
        """Start the units of an attempt, but those whose results are known.

        Args:
            attempt: which rollout they are of.
            works: the units.
            finished: the results of units that a run before this one has finished, None
                for others; () for none.
        """
        known = finished or [None] * len(works)
        self._attempts[attempt] = [
            self._start(work) if result is None else _done(result)
            for work, result in zip(works, known, strict=True)
        ]

    def __contains__(self, attempt: Attempt) -> bool:
        return attempt in self._attempts

    def _run(self, work: Work) -> list[Transcript]:
        self._count(1)
        try:
            transcripts = work()
        finally:
            self._count(-1)
        with self._lock:
            self._tokens += sum(len(x.completion_ids) for x in transcripts)
        return transcripts

    def _count(self, change: int) -> None:
        """Change the number of running units."""
        with self._lock:
            now = time.perf_counter()
            elapsed, self._changed = now - self._changed, now
            if self._running:
                self._busy += elapsed
            else:
                self._idle += elapsed
            self._running += change

    def result(
        self, attempt: Attempt, is_stopping: Callable[[], bool] = lambda: False
    ) -> list[Transcript]:
        """The completions of an attempt; waits for them.

        Raises:
            EngineError: `is_stopping()` has become True.
            Exception: that of the first unit which has failed; the others go on.
        """
        transcripts: list[Transcript] = []
        for unit in self._attempts[attempt]:
            while not unit.done():
                if is_stopping():
                    raise EngineError(
                        f"the run ends before the completions of step {attempt.step} "
                        "are sampled; finished groups are saved"
                    )
                concurrent.futures.wait([unit], timeout=_POLL)
            transcripts += unit.result()
        return transcripts

    def finished(self, attempt: Attempt) -> list[list[Transcript] | None]:
        """The result of each unit of an attempt; None for units under way."""
        units = self._attempts.get(attempt, [])
        return [unit.result() if _has_result(unit) else None for unit in units]

    def forget(self, attempt: Attempt) -> None:
        """Drop the results of an attempt."""
        self._attempts.pop(attempt, None)

    @property
    def queued(self) -> int:
        """Completions that no step has taken."""
        units = (unit for attempt in self._attempts.values() for unit in attempt)
        return sum(len(unit.result()) for unit in units if _has_result(unit))

    def traffic(self) -> Traffic:
        """The counts since the last call."""
        self._count(0)
        with self._lock:
            traffic = Traffic(self._tokens, self._busy, self._idle)
            self._tokens, self._busy, self._idle = 0, 0.0, 0.0
        return traffic

    def close(self) -> None:
        """Cancel the units that have not begun; do not wait for the others."""
        for attempt in self._attempts.values():
            for unit in attempt:
                unit.cancel()
        for _ in self._threads:
            self._waiting.put(None)

    def join(self, seconds: float) -> None:
        """Wait, after `close`, until all units have ended, at most so many seconds."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))


def _has_result(unit: Future) -> bool:
    return unit.done() and not unit.cancelled() and unit.exception() is None


def _done(result: list[Transcript]) -> Future[list[Transcript]]:
    future: Future[list[Transcript]] = Future()
    future.set_result(result)
    return future
