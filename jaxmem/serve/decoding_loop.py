"""The thread that owns the device: it decodes, pauses, and swaps weights."""

import collections
import enum
import itertools
import sys
import threading
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from jaxmem.base import messages
from jaxmem.serve.completion_request import CompletionRequest, check_model
from jaxmem.serve.request_error import RequestError
from jaxmem.serve.served_rows import CompletionJob, ServedRow
from jaxmem.serve.served_weights import ServedWeights
from jaxmem.serve.slot_pool import PoolShape, SlotPool

_POLL = 0.5  # seconds between two looks at a client that waits


class PauseMode(enum.StrEnum):
    """Handling of rows that are in progress, or wait, when a pause begins."""

    ABORT = "abort"  # they end
    WAIT = "wait"  # they are completed before
    KEEP = "keep"  # they stay as they are, and go on after it


class LoopCall:
    """A function that another thread wants to be called between two parts."""

    def __init__(self, function: Callable[[], Any]):
        self._function = function
        self._is_done = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Call the function; its exception is for the thread that waits."""
        try:
            self._result = self._function()
        except BaseException as error:
            self._error = error
        self._is_done.set()

    def fail(self, error: BaseException) -> None:
        """End the wait by an error; the function is not called."""
        self._error = error
        self._is_done.set()

    def result(self) -> Any:
        """Wait for the function, and return its result or raise its exception."""
        self._is_done.wait()
        if self._error is not None:
            raise self._error
        return self._result


class DecodingLoop:
    """Decodes the rows of all requests.

    `run` is called by the thread that owns the device, all other methods by threads
    of requests. Rows start in the order in which they came. Rows of another model or of
    other options wait until the slots are empty.

    Args:
        weights: models that are served; only calls of this loop change them.
        shape: sizes of the slots.
        most_waiting: completions that may wait for a slot.
    """

    def __init__(self, weights: ServedWeights, shape: PoolShape, most_waiting: int):
        self.weights, self._shape = weights, shape
        self._most_waiting = most_waiting
        self._pool: SlotPool | None = None  # of the loop's own thread
        self._changed = threading.Condition()  # guards all below
        self._calls: collections.deque[LoopCall] = collections.deque()
        self._waiting: collections.deque[ServedRow] = collections.deque()
        # Rows that came after a pause; they wait for its end.
        self._held: collections.deque[ServedRow] = collections.deque()
        self._pause: PauseMode | None = None
        self._is_stopped = False
        self._is_idle = True  # no slot has a row

    # --------------------------------------------------- for threads of requests

    def complete(
        self, request: CompletionRequest, is_gone: Callable[[], bool]
    ) -> list[ServedRow]:
        """Rows of a request, once they have ended.

        Args:
            request: checked.
            is_gone: returns True once nobody waits for the answer any more, which ends
                the rows.

        Raises:
            RequestError: the model is unloaded, too many completions wait, the server
                stops, or the device fails.
        """
        job = CompletionJob(request)
        with self._changed:
            if self._is_stopped:
                raise _stopping()
            check_model(request.model, self.weights.names)  # it may be unloaded by now
            self._check_queue(len(job.rows))
            queue = self._waiting if self._pause is None else self._held
            queue.extend(job.rows)
            self._changed.notify_all()
        while not job.wait(_POLL):
            if is_gone():
                self.call(lambda: self._end_rows(lambda row: row.job is job))
        if job.error is not None:
            raise job.error
        return job.rows

    def _check_queue(self, more: int) -> None:
        waiting = len(self._waiting) + len(self._held)
        if waiting + more > self._most_waiting:
            raise RequestError(
                f"{waiting} completions wait for a slot, and {self._most_waiting} may "
                f"(--max-waiting); send the {more} of this request later",
                HTTPStatus.TOO_MANY_REQUESTS,
            )

    def call(self, function: Callable[[], Any]) -> Any:
        """Call a function between two parts of decoding, and return its result.

        Raises:
            RequestError: the server stops.
        """
        call = LoopCall(function)
        with self._changed:
            if self._is_stopped:
                raise _stopping()
            self._calls.append(call)
            self._changed.notify_all()
        return call.result()

    def pause(self, mode: PauseMode) -> None:
        """Stop decoding; on return no token is drawn until `resume`.

        Rows that come later wait for `resume`.
        """

        def begin() -> None:
            with self._changed:
                self._pause = mode
                self._changed.notify_all()
            if mode == PauseMode.ABORT:
                self._end_rows(lambda row: True)

        self.call(begin)
        if mode == PauseMode.WAIT:
            with self._changed:
                self._changed.wait_for(self._has_drained)

    def _has_drained(self) -> bool:
        is_empty = self._is_idle and not self._waiting
        return self._is_stopped or self._pause != PauseMode.WAIT or is_empty

    def resume(self) -> None:
        """Go on with all rows."""
        with self._changed:
            self._pause = None
            self._waiting.extend(self._held)
            self._held.clear()
            self._changed.notify_all()

    def load(self, name: str, function: Callable[[], None]) -> None:
        """Call a function that loads weights, and forget what older ones have computed.

        Args:
            name: of the model or adapter whose weights it loads or replaces.
            function: changes nothing if it raises an error.

        Raises:
            RequestError: as the function does, or the server stops.
        """

        def load() -> None:
            function()
            if self._pool is not None and self._pool.name == name:
                self._forget_keys()

        self.call(load)

    def unload(self, name: str) -> None:
        """Unload an adapter once the rows in progress and in wait have used it.

        Raises:
            RequestError: no adapter has that name, or the server stops.
        """

        def unload() -> None:
            self.weights.unload_adapter(name)
            self._release_adapters()

        self.call(unload)

    def forget_keys(self) -> None:
        """Forget keys and values of all tokens.

        Rows in progress keep their tokens, which are read again.
        """
        self.call(self._forget_keys)

    def compile(self, request: CompletionRequest) -> None:
        """Compile the programs of a request's options, by completing it."""
        self.complete(request, lambda: False)
        decoder = self.weights.decoder(request.model)
        self.call(lambda: self._pool and self._pool.compile(decoder))

    @property
    def is_alive(self) -> bool:
        """True until `stop`, or an error that ends the loop."""
        return not self._is_stopped

    @property
    def is_idle(self) -> bool:
        """True if no completion is in progress or waits."""
        with self._changed:
            return self._is_idle and not self._waiting and not self._held

    @property
    def is_paused(self) -> bool:
        """True between `pause` and `resume`."""
        return self._pause is not None

    def stop(self) -> None:
        """End `run`, and all requests by an error."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    # ------------------------------------------------------- for the loop's thread

    def run(self) -> None:
        """Decode until `stop`."""
        try:
            while self._take_turn():
                pass
        finally:
            self.stop()
            self._end(_stopping())

    def _take_turn(self) -> bool:
        """Wait for work and do some; False once the loop is stopped."""
        with self._changed:
            self._changed.wait_for(self._has_work)
            if self._is_stopped:
                return False
            calls = [*self._calls]
            self._calls.clear()
        for call in calls:
            call.run()
        if not calls:
            self._decode_part()
        return True

    def _has_work(self) -> bool:
        has_rows = bool(self._waiting) or not self._is_idle
        return self._is_stopped or bool(self._calls) or (
            has_rows and self._pause != PauseMode.KEEP
        )  # fmt: skip

    def _decode_part(self) -> None:
        try:
            self._fill()
            pool = self._pool
            if pool is not None and pool.is_busy:
                decoder = self.weights.decoder(pool.name)
                version = self.weights.version_of(pool.name)
                for row in pool.advance(decoder, version):
                    row.job.settle()
        except Exception as error:  # such as no memory: the next request may fit
            self._fail_rows(error)
        with self._changed:
            self._is_idle = self._pool is None or not self._pool.is_busy
            self._changed.notify_all()

    def _fill(self) -> None:
        """Start rows in the free slots, in their order."""
        while True:
            with self._changed:
                if not self._waiting:
                    return
                row = self._waiting[0]
            if self._pool is None or not self._pool.takes(row):
                if self._pool is not None and self._pool.is_busy:
                    return
                self._make_pool(row)
            assert self._pool is not None
            if not self._pool.has_room:
                return
            with self._changed:
                self._waiting.popleft()
                self._is_idle = False
            self._pool.place(self.weights.decoder(self._pool.name), row)

    def _make_pool(self, row: ServedRow) -> None:
        """Make slots for a row's model and options; those before are freed."""
        self._pool, request = None, row.job.request
        self._release_adapters()
        decoder = self.weights.decoder(request.model)
        self._pool = SlotPool(request.model, request.options, self._shape, decoder)

    def _release_adapters(self) -> None:
        """Free adapters that are unloaded and that no row needs."""
        with self._changed:
            needed = {row.job.request.model for row in (*self._waiting, *self._held)}
        if self._pool is not None:
            needed.add(self._pool.name)
        self.weights.release(needed)

    def _end_rows(self, is_ended: Callable[[ServedRow], bool]) -> None:
        """End rows early; they keep the tokens that they have."""
        with self._changed:
            pool = [] if self._pool is None else self._pool.rows
            rows = [row for row in pool if row is not None and is_ended(row)]
            for queue in (self._waiting, self._held):
                rows += filter(is_ended, queue)
                kept = list(itertools.filterfalse(is_ended, queue))
                queue.clear()
                queue.extend(kept)
        if self._pool is not None:
            self._pool.drop(rows)
        for row in rows:
            row.finish = row.finish or "abort"
            row.job.settle()
        with self._changed:
            self._is_idle = self._pool is None or not self._pool.is_busy
            self._changed.notify_all()

    def _forget_keys(self) -> None:
        """Take rows out of their slots; they are the next to take one."""
        if self._pool is None:
            return
        rows = [row for row in self._pool.rows if row is not None]
        self._pool.forget_prompt()
        self._pool.drop(rows)
        with self._changed:
            self._waiting.extendleft(reversed(rows))

    def _fail_rows(self, error: Exception) -> None:
        """End the rows in slots, and the next one, by an error of the device."""
        reason = f"{type(error).__name__}: {messages.cut(str(error))}"
        print(f"jaxmem: decoding failed: {reason}", file=sys.stderr, flush=True)
        failed = RequestError(
            f"decoding failed: {reason}", HTTPStatus.INTERNAL_SERVER_ERROR
        )
        pool, self._pool = self._pool, None
        rows = [] if pool is None else [row for row in pool.rows if row is not None]
        with self._changed:
            rows += [*self._waiting][:1] if not rows else []
            jobs = {row.job for row in rows}
            for queue in (self._waiting, self._held):
                kept = [row for row in queue if row.job not in jobs]
                queue.clear()
                queue.extend(kept)
        for job in jobs:
            job.fail(failed)

    def _end(self, error: RequestError) -> None:
        with self._changed:
            rows = [*self._waiting, *self._held]
            calls = [*self._calls]
            self._waiting.clear()
            self._held.clear()
            self._changed.notify_all()
        rows += [] if self._pool is None else filter(None, self._pool.rows)
        for row in rows:
            row.job.fail(error)
        for call in calls:
            call.fail(error)


def _stopping() -> RequestError:
    return RequestError("the server is stopping", HTTPStatus.SERVICE_UNAVAILABLE)
