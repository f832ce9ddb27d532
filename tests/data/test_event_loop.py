"""The event loop of a run: one for all calls, and what a coroutine may do to it."""

import asyncio
import threading
import time

import pytest

from jaxmem.base import guests
from jaxmem.data import event_loop


@pytest.fixture(autouse=True)
def _closed():
    with event_loop.closed_at_end():
        yield


async def _running():
    return asyncio.get_running_loop()


def test_of_process_is_one_loop_until_it_is_closed():
    first = event_loop.of_process()
    assert event_loop.of_process() is first
    loops = {first.run(_running()) for _ in range(3)}
    assert len(loops) == 1
    event_loop.close()
    assert loops.pop().is_closed() and not first.is_open
    assert event_loop.of_process().run(_running()).is_running()


def test_run_keeps_objects_that_belong_to_a_loop():
    gate = asyncio.Semaphore(1)

    async def wait():
        async with gate:
            await asyncio.sleep(0)

    async def both():
        await asyncio.gather(wait(), wait())  # the second one binds the semaphore

    for _ in range(3):
        event_loop.of_process().run(both())


def test_run_works_where_a_loop_is_running():
    async def notebook():
        return event_loop.of_process().run(_running()), asyncio.get_running_loop()

    inner, outer = asyncio.run(notebook())
    assert inner is not outer


@pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt,
                                  asyncio.CancelledError, TimeoutError])  # fmt: skip
def test_run_raises_coroutine_error_and_goes_on(kind):
    async def fail():
        raise kind("enough")

    async def leave_a_task_that_fails():
        asyncio.get_running_loop().create_task(fail()).add_done_callback(
            lambda task: task.cancelled() or task.exception()
        )
        await asyncio.sleep(0.01)

    loop = event_loop.of_process()
    with pytest.raises(kind):
        loop.run(fail(), 9.0)
    loop.run(leave_a_task_that_fails())
    assert loop.is_open and loop.run(_running()).is_running()


def test_run_is_late_after_its_timeout_and_cancels():
    ended = threading.Event()

    async def sleep():
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    start = time.monotonic()
    with pytest.raises(guests.Late):
        event_loop.of_process().run(sleep(), 0.05)
    assert time.monotonic() - start < 5 and ended.wait(5)


def test_run_is_late_where_a_coroutine_blocks_the_loop():
    release = threading.Event()

    async def block():
        release.wait(60)

    with pytest.raises(guests.Late):
        event_loop.of_process().run(block(), 0.05)
    release.set()
    assert event_loop.of_process().run(_running()).is_running()


def test_close_cancels_what_runs_and_ends_the_thread():
    ended = []

    async def sleep():
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    event_loop.of_process().start(sleep())
    event_loop.of_process().run(_running())
    event_loop.close()
    names = [thread.name for thread in threading.enumerate()]
    assert ended == [True] and "jaxmem-event-loop" not in names
