"""Graceful stopping: SIGTERM and SIGINT end a run between two steps."""

import collections
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_ONE = 1.0  # seconds; signals that are nearer are one, which a wrapper forwards twice
_AGAIN = "send it again a second later to stop at once"
_DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)


class Stop:
    """A context that handles SIGTERM and SIGINT.

    The first signal raises KeyboardInterrupt (SIGINT) or SystemExit (SIGTERM, with the
    status 128 + signal); inside `deferred` it only sets `signal`. A second signal that
    is not within a second of it ends the process at once, also while compiled code
    runs, during which Python executes no handlers; in an interactive session it raises
    KeyboardInterrupt instead.

    Only default handlers are replaced, and only in the main thread, as Python allows
    no other; they are restored on exit.

    Args:
        end: when the work ends after the first signal, for the printed line.

    Attributes:
        signal: number of the first signal; 0 before it.
    """

    def __init__(self, end: str = "after this step"):
        self._end = end
        self.signal, self._since = 0, 0.0
        self._deferred, self._is_lost = False, False
        # One element for each signal sent again that the watch has not read yet.
        self._resent: collections.deque[int] = collections.deque()
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
            self._hook, sys.unraisablehook = sys.unraisablehook, self._on_unraisable
        for number in self._replaced:
            signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for number, handler in self._replaced.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, handler)
        if self._replaced:
            if sys.unraisablehook == self._on_unraisable:
                sys.unraisablehook = self._hook
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
        now = time.monotonic()
        if not self.signal or self._is_lost:
            self.signal, self._since = self.signal or number, self._since or now
            self._is_lost = False
            if not self._deferred:
                self.raise_if_requested()
        elif now - self._since >= _ONE:
            self.raise_if_requested()

    def _on_unraisable(self, ignored: Any) -> None:
        """Send the signal again where Python ignores what its handler raised.

        It does so within a callback of the garbage collector, such as jax has.
        """
        if not self.signal or not isinstance(
            ignored.exc_value, (KeyboardInterrupt, SystemExit)
        ):
            return self._hook(ignored)
        self._is_lost = True
        self._resent.append(self.signal)
        threading.Timer(0.01, signal.raise_signal, [self.signal]).start()

    def _watch_signals(self, reader: int) -> None:
        """Read the signal numbers that the C-level handler writes to the pipe."""
        with os.fdopen(reader, "rb", buffering=0) as numbers:
            since = None  # the first signal
            while number := ord(numbers.read(1)):
                if number not in self._replaced:
                    continue
                if self._resent:  # however late it comes
                    self._resent.popleft()
                    continue
                name, now = signal.Signals(number).name, time.monotonic()
                if since is None:
                    since = now
                    _print(f"jaxmem: {name}: stopping {self._end}; {_AGAIN}")
                elif now - since >= _ONE and not hasattr(sys, "ps1"):
                    _print(f"jaxmem: {name}: ended")
                    os._exit(128 + number)


def _print(line: str) -> None:
    """Write to stderr unbuffered; the main thread may be inside a write to it."""
    with contextlib.suppress(OSError):
        os.write(2, f"\n{line}\n".encode())
