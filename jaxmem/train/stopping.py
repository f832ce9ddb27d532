"""SIGTERM and SIGINT end a run between two steps, where nothing is lost."""

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
    """A context in which the first SIGTERM or SIGINT is a request to stop.

    It raises at once, like an interrupt, but inside `postponed` it is only noted. A
    second one ends the process without delay, even in compiled code, which keeps
    Python's own handlers waiting; in an interactive session it interrupts as ever.

    Handlers that somebody else has set are left alone, and outside the main thread,
    where Python allows none, this does nothing. On leaving, what was there is restored.

    Attributes:
      signal: the number of the first signal, 0 as long as there is none.
    """

    def __init__(self):
        self.signal = 0
        self._postponed = False
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
            self.leave_if_asked()

    @contextlib.contextmanager
    def postponed(self) -> Iterator[None]:
        """Inside, the first signal is noted in `signal`, and raises nothing."""
        before, self._postponed = self._postponed, True
        try:
            yield
        finally:
            self._postponed = before

    def leave_if_asked(self) -> None:
        """Raise what the signal stands for, if one came.

        Raises:
          KeyboardInterrupt: SIGINT.
          SystemExit: another, with the status 128 + signal that shells expect.
        """
        if self.signal == signal.SIGINT:
            raise KeyboardInterrupt
        if self.signal:
            raise SystemExit(128 + self.signal)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        again, self.signal = bool(self.signal), self.signal or number
        if again or not self._postponed:
            self.leave_if_asked()

    def _watch_signals(self, reader: int) -> None:
        """Read what the C handler writes as a signal arrives, whatever Python does."""
        with os.fdopen(reader, "rb", buffering=0) as numbers:
            count = 0
            while number := ord(numbers.read(1)):
                if number not in self._replaced:
                    continue
                count += 1
                name = signal.Signals(number).name
                if count == 1:
                    _print(f"jaxmem: {name}: stopping after this step; {_AGAIN}")
                elif not hasattr(sys, "ps1"):  # which interactive sessions have
                    _print(f"jaxmem: {name}: ended")
                    os._exit(128 + number)


def _print(line: str) -> None:
    """On stderr as it is: the main thread may be in the middle of a write to it."""
    with contextlib.suppress(OSError):
        os.write(2, f"\n{line}\n".encode())
