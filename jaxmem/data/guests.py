"""Calls of a user's functions, which must leave the process as they found it."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator


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
