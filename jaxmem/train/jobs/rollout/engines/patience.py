"""Repetition of requests that fail, within a stated time, and the lines about it."""

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from jaxmem.data.rewards import RolloutError

_Result = TypeVar("_Result")

# The time of `time.monotonic` at which an attempt ends. It becomes later while a
# server serves other requests, as one of its answers may take long.
Deadline = Callable[[], float]

_LONGEST_PAUSE = 30.0  # seconds
_WRONG_ANSWERS = 3  # of one request, after which the next is wrong as well
_FIRST_SILENCE, _LONGEST_SILENCE = 10.0, 300.0  # seconds between lines about a server


class EngineError(RolloutError):
    """An engine cannot serve the run; one line with its url and what to do."""


class EngineFailure(Exception):
    """A request failed and may succeed when it is sent again."""


class LateAnswer(EngineFailure):
    """No complete answer came before the deadline."""


class WrongAnswer(EngineFailure):
    """A complete answer is not what was asked for."""


class Reporter:
    """Lines about one server's failures: the first, then at intervals that double."""

    def __init__(self, server: str, say: Callable[[str], None]):
        self.server = server
        self._say = say
        self._lock = threading.Lock()
        self._failures = 0
        self._silent_until = 0.0
        self._silence = _FIRST_SILENCE
        self.succeeded_at = -math.inf  # a time of `time.monotonic`

    def failed(self, failure: EngineFailure, left: float) -> None:
        """Say that a request is sent again, unless a line has just said so."""
        with self._lock:
            self._failures += 1
            if time.monotonic() < self._silent_until:
                return
            count = "" if self._failures == 1 else f" ({self._failures} failures)"
            self._silent_until = time.monotonic() + self._silence
            self._silence = min(2 * self._silence, _LONGEST_SILENCE)
        self._say(
            f"{self.server} {failure}; it is asked again for {max(left, 0):.0f} "
            f"seconds{count}"
        )

    def succeeded(self) -> None:
        """Say that a server which had failed answers."""
        self.succeeded_at = time.monotonic()
        if not self._failures:  # read without the lock: the usual case costs nothing
            return
        with self._lock:
            failures, self._failures = self._failures, 0
            self._silent_until, self._silence = 0.0, _FIRST_SILENCE
        if failures:
            times = "once" if failures == 1 else f"{failures} times"
            self._say(f"{self.server} answers again, after it failed {times}")


class Patience:
    """The time that one request has, and its failures so far.

    Args:
        reporters: of the servers that may serve the request. It ends when none of them
            has served anything for `timeout` seconds.
        timeout: in seconds.
        first_pause: seconds before the second attempt; they double.
        wait: waits some seconds, or raises what ends all requests.
    """

    def __init__(
        self,
        reporters: Sequence[Reporter],
        timeout: float,
        first_pause: float,
        wait: Callable[[float], None],
    ):
        self._reporters, self.timeout = reporters, timeout
        self._started = time.monotonic()
        self._first_pause = self._pause = first_pause
        self._wait = wait
        self._wrong = 0
        self._reason: tuple[Reporter, EngineFailure] | None = None

    def deadline(self) -> float:
        """The time of `time.monotonic` at which the request ends."""
        return self._latest(self._started, self._reporters)

    def renew(self) -> None:
        """Give the request the whole time again, for a server that has not failed."""
        self._started = time.monotonic()

    def deadline_of(self, reporter: Reporter) -> Deadline:
        """The deadline of an attempt that begins now at one server."""
        started = time.monotonic()
        return lambda: min(self.deadline(), self._latest(started, [reporter]))

    def _latest(self, started: float, reporters: Sequence[Reporter]) -> float:
        successes = [reporter.succeeded_at for reporter in reporters]
        return max(started, *successes) + self.timeout

    def until_success(self, attempt: Callable[[Deadline], _Result]) -> _Result:
        """The result of the first attempt that succeeds, at the only server."""
        (reporter,) = self._reporters
        while True:
            try:
                result = attempt(self.deadline)
            except EngineFailure as failure:
                self._wait(self.after(failure, reporter))
            else:
                reporter.succeeded()
                return result

    def after(self, failure: EngineFailure, reporter: Reporter) -> float:
        """Seconds to wait before the next attempt.

        Raises:
            EngineError: no time is left, or the same request got several wrong answers.
        """
        left = self.deadline() - time.monotonic()
        self._wrong += isinstance(failure, WrongAnswer)
        if self._wrong >= _WRONG_ANSWERS:
            raise EngineError(f"{reporter.server} {failure}") from failure
        # Attempts near the end have little time, so that they hide the reason.
        if self._reason is None or not isinstance(failure, LateAnswer):
            self._reason = reporter, failure
        if left < self._first_pause:
            at, reason = self._reason
            answered = math.isfinite(at.succeeded_at)
            remedy = "Start the server again" if answered else "Correct rollouts.urls"
            raise EngineError(
                f"{at.server} {reason}; nothing else came for "
                f"rollouts.timeout={self.timeout:g} seconds. {remedy}, or raise "
                "rollouts.timeout, and resume the run"
            ) from failure
        reporter.failed(failure, left)
        pause, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE)
        return min(pause, left / 2)
