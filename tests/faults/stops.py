"""Kills and signals at any moment of a command, and the same command again."""

import functools
import signal
import socket
import time
from collections.abc import Iterator

import numpy as np

from tests.faults.jobs import Job, Row, Training, finish, start, wait_for


def kills(job: Job, count: int) -> Iterator[Row]:
    """One run, killed at some moment and resumed, that many times.

    Every third process has no compilation cache.
    """
    assert job.whole
    row, run = Row(f"kill -9, {job.name}"), f"killed_{job.name}"
    rng = np.random.default_rng(count)
    # Lines between two kills, at most. A run that has ended is followed by another.
    more = max(3, int(1.5 * job.lines / (count + 4)))
    for number in range(3 * count):
        if row.tries == count:
            break
        if job.lines:
            process = start(job, run, cached=number % 3 != 1)
            alive = _wait_at_work(job, run, process, number, rng, more)
        else:
            process = start(job, run)
            alive = _wait_in_command(job, run, process, number, rng)
        process.kill()
        done = finish(process)
        row.wrong += job.is_half(run)
        row.message = done.line("resuming") or row.message
        if alive and done.returncode == -signal.SIGKILL:
            row.add("", True)
        elif done.returncode:
            row.add(done.said[-200:], False)
            break
        if job.is_there(run):  # the kill came after the work: the next is of another
            row.lost += job.lost(run)
            run = f"{run}_"
    row.wrong += row.tries < count
    done = finish(start(job, run))
    row.message = done.line("resuming") or row.message or done.line("saved in")
    row.lost += job.lost(run)
    row.wrong += done.returncode != 0
    yield row


def _wait_at_work(job, run, process, number, rng, more) -> bool:
    """Wait until the file has grown by fewer lines than `more`.

    Every third one is a moment before that, or early in it.
    """
    goal = job.done(run) + int(rng.integers(1, more))
    if number % 3:
        alive = wait_for(process, lambda: job.done(run) >= goal)
    else:
        alive = wait_for(process, lambda: job.is_started(run))
    time.sleep(rng.uniform(0, 0.03 if number % 3 else 2))
    return alive


def _wait_in_command(job, run, process, number, rng) -> bool:
    """Wait for a moment of a command without a file that grows.

    Every other one is that in which the output begins to be written.
    """
    if number % 2:
        alive = wait_for(process, lambda: job.is_started(run))
        time.sleep(rng.uniform(0, 0.02))
        return alive
    end = time.monotonic() + rng.uniform(0.1, 1) * job.seconds
    return wait_for(process, lambda: time.monotonic() > end)


def signals(job: Job, count: int) -> Iterator[Row]:
    """While the work goes on."""
    row = Row(f"signal while working, {job.name}")
    for i in range(count):
        when = 3 + 7 * (i // 2)
        after = lambda run, when=when: job.done(run) > when  # noqa: E731
        _signalled(row, job, (signal.SIGTERM, signal.SIGINT)[i % 2], after)
    yield row


def other_signals(sft: Job) -> Iterator[Row]:
    """Before the first step, without checkpoints, two at once, to one of two."""
    row = Row("signal while compiling, sft")
    for number in (signal.SIGTERM, signal.SIGINT):
        _signalled(row, sft, number, sft.is_started)
    yield row
    row = Row("signal without checkpoints, sft")
    late = functools.partial(_signalled, row, sft, signal.SIGTERM)
    late(lambda run: sft.done(run) > 3, "run.checkpoint_every=None", "run.steps=9999")
    yield row
    yield _signal_to_one_of_two(sft)
    row = Row("two signals within a second, sft")
    for number in (signal.SIGTERM, signal.SIGINT):
        after = lambda run: sft.done(run) > 3  # noqa: E731
        _signalled(row, sft, number, after, again=signal.SIGTERM)
    yield row


def _signalled(row, job, number, when, *more, again=None) -> None:
    run = f"{job.name}_{number}_{row.tries}_" + "_".join(row.fault.split()[1:3])
    process = start(job, run.rstrip(","), *more)
    run = run.rstrip(",")
    wait_for(process, lambda: when(run))
    process.send_signal(number)
    if again is not None:  # as a wrapper forwards it
        time.sleep(0.05)
        process.send_signal(again)
    done = finish(process)
    said = done.line("stopped by")
    right = done.returncode == 128 + number and bool(said)
    if isinstance(job, Training) and not more:
        right = right and (newest(job, run) == job.done(run))
    if more:
        right = right and "not saved because of" in said
    resumed = finish(start(job, run)).returncode == 0
    row.add(said or done.said[-200:], right and resumed, job.lost(run))


def newest(job: Job, run: str) -> int:
    """Number of the newest checkpoint."""
    folder = job.folder / run / "checkpoints"
    names = [path.name for path in folder.glob("*")]
    return max((int(name) for name in names if name.isdigit()), default=0)


def _signal_to_one_of_two(job: Job) -> Row:
    """Both processes of a run stop after the same step; one process resumes it."""
    row, run = Row("signal to one of two processes, sft"), "two"
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    where = ["mesh.data=2", f"--coordinator=127.0.0.1:{port}", "--processes=2"]
    pair = [
        start(job, run, *where, f"--process-id={i}", output=job.folder / f"two{i}.log")
        for i in range(2)
    ]
    wait_for(pair[0], lambda: job.done(run) > 3)
    pair[1].send_signal(signal.SIGTERM)
    first, second = (finish(process) for process in pair)
    right = first.returncode == second.returncode == 143
    done = job.done(run)
    right = right and done == newest(job, run)
    right = right and finish(start(job, run)).returncode == 0
    # A sum over two devices rounds in another way than one over rows.
    lost = abs(job.done(run) - job.lines)
    row.add(first.line("stopped by") or first.said[-200:], right, lost)
    return row
