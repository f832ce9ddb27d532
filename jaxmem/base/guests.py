"""Calls of a user's functions, which must leave the process as they found it."""

import contextlib
import itertools
import math
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any


class Misbehaved(Exception):
    """A function has left the process in another state."""


@contextlib.contextmanager
def received() -> Iterator[None]:
    """Repair what was called inside has changed of the process, and raise.

    Raises:
        Misbehaved: the working directory was changed, or the output closed.
    """
    directory = _working_directory()
    try:
        yield
    finally:
        faults = list(_repair(directory))
    if faults:
        raise Misbehaved("; ".join(faults))


def _working_directory() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it does not exist any more
        return None


def _repair(directory: str | None) -> Iterator[str]:
    if directory is not None and _working_directory() != directory:
        os.chdir(directory)
        yield "changed the working directory; use absolute paths instead"
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if getattr(stream, "closed", False):
            setattr(sys, name, open(descriptor, "w", closefd=False))
            yield f"closed sys.{name}"


def raise_if_of_the_user(error: BaseException) -> None:
    """Raise a KeyboardInterrupt that comes from Ctrl-C, which nothing defers."""
    python_raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if isinstance(error, KeyboardInterrupt) and python_raises:
        raise error


class Late(Exception):
    """A call took too long; a `TimeoutError` may also be of the function itself."""


def together(
    calls: Sequence[Callable[[], Any]], seconds: float | None, workers: int = 1
) -> list[tuple[Any, BaseException | None]]:
    """Call all, each in a thread of its own: the value of each, and its error.

    Args:
        calls: functions without arguments.
        seconds: maximum seconds of each call, or None. The error of a call that takes
            longer is `Late`; its thread is abandoned, and another call starts.
        workers: maximum number of calls at a time, without those that are late.
    """
    outcomes: list[tuple[Any, BaseException | None]] = [(None, Late())] * len(calls)
    ended: queue.SimpleQueue[tuple[int, Any, BaseException | None]]
    ended = queue.SimpleQueue()

    def run(i: int) -> None:
        try:
            ended.put((i, calls[i](), None))
        except BaseException as error:
            ended.put((i, None, error))

    waiting = iter(range(len(calls)))
    deadlines: dict[int, float] = {}  # of calls that run; in the order of their starts
    while True:
        for i in itertools.islice(waiting, workers - len(deadlines)):
            limit = math.inf if seconds is None else seconds
            deadlines[i] = time.monotonic() + limit
            threading.Thread(target=run, args=(i,), daemon=True).start()
        if not deadlines:
            return outcomes
        first, deadline = next(iter(deadlines.items()))
        seconds_left = max(deadline - time.monotonic(), 0.0)
        try:
            i, value, error = ended.get(
                timeout=None if seconds is None else seconds_left
            )
        except queue.Empty:
            del deadlines[first]
            continue
        if deadlines.pop(i, None) is not None:  # else it was late
            outcomes[i] = value, error
