"""Calls of a user's functions, which must leave the process as they found it."""

import contextlib
import os
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
    directory = _directory()
    try:
        yield
    finally:
        faults = list(_repaired(directory))
    if faults:
        raise Misbehaved("; ".join(faults))


def _directory() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it does not exist any more
        return None


def _repaired(directory: str | None) -> Iterator[str]:
    if directory is not None and _directory() != directory:
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
    calls: Sequence[Callable[[], Any]], seconds: float | None
) -> list[tuple[Any, BaseException | None]]:
    """Call all in threads that may be abandoned: what each returns, and raises.

    It raises `Late` where it takes longer than the seconds that all have together.
    """
    outcomes: list[tuple[Any, BaseException | None]] = [(None, Late())] * len(calls)

    def run(i: int) -> None:
        try:
            outcomes[i] = calls[i](), None
        except BaseException as error:
            outcomes[i] = None, error

    threads = [
        threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(calls))
    ]
    for thread in threads:
        thread.start()
    end = None if seconds is None else time.monotonic() + seconds
    for thread in threads:
        thread.join(None if end is None else max(end - time.monotonic(), 0.0))
    return list(outcomes)  # which a late thread cannot change any more
