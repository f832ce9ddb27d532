"""Signals: once to stop where nothing is lost, twice to stop at once."""

import functools
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from jaxmem.base import stopping
from jaxmem.base.stopping import Stop

NOTICE = (
    "\njaxmem: {}: stopping after this step; send it again a second later to stop at "
    "once\n"
)


def send(number):
    os.kill(os.getpid(), number)


@pytest.fixture(autouse=True)
def as_it_was():
    numbers = signal.SIGTERM, signal.SIGINT
    before = [signal.getsignal(n) for n in numbers]
    yield
    assert [signal.getsignal(n) for n in numbers] == before
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.parametrize(
    "number, wanted, status",
    [(signal.SIGTERM, SystemExit, 143), (signal.SIGINT, KeyboardInterrupt, None)],
)
def test_signal_is_noted_while_it_is_postponed(number, wanted, status, capfd):
    steps = []
    with pytest.raises(wanted) as caught, Stop() as stop:
        with stop.deferred():
            for step in range(3):
                if step == 1:
                    send(number)
                    assert stop.signal == number
                steps.append(step)
        steps.append("saved")
        stop.raise_if_requested()
        steps.append("not reached")
    assert steps == [0, 1, 2, "saved"]
    assert getattr(caught.value, "code", None) == status
    name = signal.Signals(number).name
    assert capfd.readouterr().err == NOTICE.format(name)


def test_elsewhere_it_ends_the_work_at_once():
    with pytest.raises(SystemExit) as caught, Stop() as stop:
        send(signal.SIGTERM)
        raise AssertionError
    assert caught.value.code == 143 and stop.signal == signal.SIGTERM


def test_unpolled_signal_counts_at_the_end():
    with pytest.raises(SystemExit), Stop() as stop, stop.deferred():
        send(signal.SIGTERM)


def test_handlers_of_others_are_left_alone():
    seen = []
    before = signal.signal(signal.SIGTERM, lambda *_: seen.append("theirs"))
    try:
        with Stop() as stop:
            send(signal.SIGTERM)
        assert seen == ["theirs"] and not stop.signal
    finally:
        signal.signal(signal.SIGTERM, before)


def test_other_threads_do_without():
    done = []

    def work():
        with Stop() as stop, stop.deferred():
            done.append(stop.signal)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [0]


@pytest.mark.slow
def test_second_signal_ends_blocked_python():
    program = textwrap.dedent(
        """
        import hashlib, time
        from jaxmem.base.stopping import Stop

        with Stop() as stop, stop.deferred():
            print("ready", flush=True)
            hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # as deaf as a compiler
        """
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process.stdout as out, process.stderr as errors:
        assert out.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert errors.readline() + errors.readline() == NOTICE.format("SIGTERM")
        process.send_signal(signal.SIGINT)  # with the first, it is one
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=1.2)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 128 + signal.SIGINT


class _SlowPipe:
    """The pipe of signal numbers, to a thread that has to wait for a processor."""

    def __init__(self, pipe):
        self._pipe = pipe

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._pipe.close()

    def read(self, count):
        numbers = self._pipe.read(count)
        time.sleep(0.2)
        return numbers


def _slow_pipe(fdopen, *given, **options):
    return _SlowPipe(fdopen(*given, **options))


@pytest.mark.parametrize("one", [600.0, 0.0], ids=["soon", "after a second"])
@pytest.mark.parametrize("times, is_slow", [(1, False), (3, True)])
def test_signal_in_garbage_collection_is_raised_later(
    one, times, is_slow, monkeypatch, capsys
):
    """Python ignores what a callback of the collector raises, as jax's does."""
    ends = []
    monkeypatch.setattr(stopping, "_ONE", one)
    monkeypatch.setattr(stopping.os, "_exit", ends.append)
    if is_slow:
        slow_pipe = functools.partial(_slow_pipe, os.fdopen)
        monkeypatch.setattr(stopping.os, "fdopen", slow_pipe)
    lost = [signal.raise_signal] + [lambda number: time.sleep(0.05)] * (times - 1)

    def interrupt(phase, info):
        """Receive a signal, or the one that is sent again, and lose it."""
        if phase == "start":
            lose = lost.pop(0)
            if not lost:
                gc.callbacks.remove(interrupt)
            lose(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt), Stop():
        gc.callbacks.append(interrupt)
        for _ in range(times):
            gc.collect()
        for _ in range(1000):
            time.sleep(0.01)
        pytest.fail("the signal was lost")
    assert not ends  # the signal that is sent again is no second one
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_two_signals_within_a_second_are_one(second, capfd):
    """Wrappers forward the signal that the terminal has sent to all."""
    steps = []
    with pytest.raises(SystemExit) as caught, Stop() as stop, stop.deferred():
        for number in (signal.SIGTERM, second, second):
            send(number)
            steps.append(stop.signal)
            time.sleep(0.05)
    assert caught.value.code == 143 and steps == 3 * [signal.SIGTERM]
    assert capfd.readouterr().err == NOTICE.format("SIGTERM")


def test_second_signal_leaves_first_exit_undisturbed():
    cleaned = []
    with pytest.raises(SystemExit), Stop():
        try:
            send(signal.SIGTERM)
        finally:
            send(signal.SIGTERM)
            cleaned.append(True)
    assert cleaned
