"""The event loop of a run, in which the async functions of users are awaited.

    of_process().run(coroutine, timeout) -> result

Locks, semaphores and the connections of clients belong to the loop in which they are
first used. All async functions of a process, of rewards and of environments, are
therefore awaited in one loop, whose thread lives until the end of the run.
"""

import asyncio
import atexit
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Coroutine, Iterator
from typing import Any

from jaxmem.base import guests

_SECONDS_TO_CLOSE = 5.0  # for tasks that are cancelled, and for a function that blocks


class Awaited:
    """A coroutine that runs in an `EventLoop`, from `EventLoop.start`."""

    def __init__(
        self,
        future: "concurrent.futures.Future[tuple[Any, BaseException | None]]",
        end: float | None,
    ):
        self._future, self._end = future, end

    def result(self) -> Any:
        """Wait for the coroutine, and return its value.

        Raises:
            Late: the timeout is over; the coroutine is cancelled.
            BaseException: the coroutine raised it, be it the end of the process.
        """
        left = None if self._end is None else max(self._end - time.monotonic(), 0.0)
        try:
            value, error = self._future.result(left)
        except TimeoutError:  # of the wait: the future never has an exception
            self.cancel()
            raise guests.Late() from None
        except BaseException:  # such as Ctrl-C
            self.cancel()
            raise
        if error is not None:
            raise error
        return value

    def cancel(self) -> None:
        """Cancel the coroutine, unless it has ended."""
        self._future.cancel()


class EventLoop:
    """An asyncio event loop in a thread of its own.

    It may be called from any other thread, also from one in which a loop runs, such as
    a notebook's.
    """

    def __init__(self):
        self._loop, self._closing = asyncio.new_event_loop(), False
        self._thread = threading.Thread(
            target=self._serve, name="jaxmem-event-loop", daemon=True
        )
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """True if coroutines can be run; False after `close`, and in a fork."""
        return self._thread.is_alive() and not self._closing

    def start(
        self, coroutine: Coroutine[Any, Any, Any], timeout: float | None = None
    ) -> Awaited:
        """Start a coroutine, and return without waiting for it.

        Args:
            coroutine: its first step is taken in the thread of the loop.
            timeout: maximum seconds from now, or None.
        """
        end = None if timeout is None else time.monotonic() + timeout
        outcome = asyncio.run_coroutine_threadsafe(_outcome(coroutine), self._loop)
        return Awaited(outcome, end)

    def run(
        self, coroutine: Coroutine[Any, Any, Any], timeout: float | None = None
    ) -> Any:
        """Run a coroutine to its end; arguments and errors are those of `Awaited`."""
        return self.start(coroutine, timeout).result()

    def close(self) -> None:
        """Cancel the tasks that still run, and end the thread."""
        if not self.is_open:
            return
        self._closing = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_SECONDS_TO_CLOSE)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self._closing:
            # A task that a function has left behind may raise the end of the process.
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                self._loop.run_forever()
        with contextlib.suppress(SystemExit, KeyboardInterrupt):
            self._loop.run_until_complete(_cancel_tasks())
        self._loop.close()


async def _outcome(
    coroutine: Coroutine[Any, Any, Any],
) -> tuple[Any, BaseException | None]:
    """(value, None), or (None, error): an exception must not end the loop."""
    try:
        return await coroutine, None
    except BaseException as error:
        return None, error


async def _cancel_tasks() -> None:
    """Cancel all tasks, and wait for them a few seconds at most."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_SECONDS_TO_CLOSE / 2)
    await asyncio.get_running_loop().shutdown_asyncgens()


_lock = threading.Lock()
_opened: list[EventLoop] = []  # at most one


def of_process() -> EventLoop:
    """The event loop of this process; opened at its first use, and after a `close`."""
    with _lock:
        if not (_opened and _opened[0].is_open):
            _opened[:] = [EventLoop()]
        return _opened[0]


@atexit.register
def close() -> None:
    """Close the event loop of this process, if it is open."""
    with _lock:
        for loop in _opened:
            loop.close()
        _opened.clear()


@contextlib.contextmanager
def closed_at_end() -> Iterator[None]:
    """Close the event loop of this process at the end of the block, a run."""
    try:
        yield
    finally:
        close()
