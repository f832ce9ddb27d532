"""Graceful stopping: SIGTERM and SIGINT end a run between two steps."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_AGAIN = "send it again to stop at once"
_DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)


class Stop:
    """A context that handles SIGTERM and SIGINT.

    The first signal raises KeyboardInterrupt (SIGINT) or SystemExit (SIGTERM, with the
    status 128 + signal); inside `deferred` it only sets `signal`. A second signal ends
    the process at once, also while compiled code runs, during which Python executes no
    handlers; in an interactive session it raises KeyboardInterrupt instead.

    Only default handlers are replaced, and only in the main thread, as Python allows
    no other; they are restored on exit.

    Attributes:
        signal: number of the first signal; 0 before it.
    """

    def __init__(self):
        self.signal = 0
        self._deferred = False
        self._replaced: dict[int, Any] = {}

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():
            handlers = {number: signal.getsignal(number) for number in _SIGNALS}
            self._replaced = {n: h for n, h in handlers.items() if h in _DEFAULTS}
        if self._replaced:
            reader, self._writer = os.pipe()
            os.set_blocking(self._writer, False)
            self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            self._watch = threading.Thread(
                target=self._watch_signals, args=[reader], daemon=True
            )
            self._watch.start()
        for number in self._replaced:
            signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for number, handler in self._replaced.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, handler)
        if self._replaced:
            signal.set_wakeup_fd(self._wakeup)
            os.write(self._writer, b"\0")
            self._watch.join()
            os.close(self._writer)
        if kind is None:
            self.raise_if_requested()

    @property
    def name(self) -> str:
        """The name of the signal: "SIGTERM" or "SIGINT"."""
        return signal.Signals(self.signal).name

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Let the first signal set `signal` and raise nothing."""
        before, self._deferred = self._deferred, True
        try:
            yield
        finally:
            self._deferred = before

    def raise_if_requested(self) -> None:
        """Raise if there was a signal.

        Raises:
            KeyboardInterrupt: it was SIGINT.
            SystemExit: it was SIGTERM; the status is 128 + signal.
        """
        if self.signal == signal.SIGINT:
            raise KeyboardInterrupt
        if self.signal:
            raise SystemExit(128 + self.signal)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        again, self.signal = bool(self.signal), self.signal or number
        if again or not self._deferred:
            self.raise_if_requested()

    def _watch_signals(self, reader: int) -> None:
        """Read the signal numbers that the C-level handler writes to the pipe."""
        with os.fdopen(reader, "rb", buffering=0) as numbers:
            count = 0
            while number := ord(numbers.read(1)):
                if number not in self._replaced:
                    continue
                count += 1
                name = signal.Signals(number).name
                if count == 1:
                    _print(f"jaxmem: {name}: stopping after this step; {_AGAIN}")
                elif not hasattr(sys, "ps1"):  # not in an interactive session
                    _print(f"jaxmem: {name}: ended")
                    os._exit(128 + number)


def _print(line: str) -> None:
    """Write to stderr unbuffered; the main thread may be inside a write to it."""
    with contextlib.suppress(OSError):
        os.write(2, f"\n{line}\n".encode())
