"""Full disks, second processes, and damaged checkpoints and directories."""

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator

from tests.faults.jobs import Job, Row, Training, finish, start, wait_for
from tests.faults.stops import newest
from tests.helpers.damages import DAMAGES


def full_disks(work: dict[str, Job]) -> Iterator[Row]:
    """Each disk is full at some place, and larger when the command comes again."""
    if os.geteuid():
        for name in ("metrics", "checkpoint", "journal", "scores"):
            yield Row(f"disk full: {name}", message="skipped: mounting needs root")
        return
    sft, score = work["sft"], work["score"]
    yield _metrics_on_a_full_disk(sft)
    yield _full(sft, "checkpoint", 700, "cannot be written: No space left")
    size = (score.folder / "whole_score.jsonl").stat().st_size // 1024
    yield _full(score, "journal", size // 2, ".unfinished: cannot be written: No space")
    yield _full(
        score, "scores", size * 3 // 2, ".jsonl: cannot be written: No space le"
    )


@contextlib.contextmanager
def disk(job: Job, name: str, kib: int) -> Iterator[Callable[[int], None]]:
    """A mounted disk of that size; what it yields changes it."""
    place = job.folder / name
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o"]
    subprocess.run([*mount, f"size={kib}k", "none", str(place)], check=True)
    try:
        yield lambda kib: subprocess.run(
            ["mount", "-o", f"remount,size={kib}k", str(place)], check=True
        )
    finally:
        subprocess.run(["umount", str(place)], check=True)


def _full(job: Job, name: str, kib: int, part: str) -> Row:
    row, run = Row(f"disk full: {name}"), f"disk_{name}/run"
    log = job.folder / f"disk_{name}.log"
    with disk(job, f"disk_{name}", kib) as resize:
        done = finish(start(job, run, output=log))
        said = done.line(part)
        right = done.returncode == 2 and bool(said)
        resize(50_000)
        again = finish(start(job, run, output=log))
        right = right and again.returncode == 0 and "resuming" in again.said
        row.add(said or done.said[-200:], right, job.lost(run))
    return row


def _metrics_on_a_full_disk(job: Job) -> Row:
    """The run goes on, and its metrics are written once there is room."""
    row, run = Row("disk full: metrics"), "disk_metrics/run"
    log = job.folder / "disk_metrics.log"
    with disk(job, "disk_metrics", 60) as resize:
        process = start(job, run, "run.checkpoint_every=None", output=log)
        found = wait_for(process, lambda: "cannot be written" in log.read_text())
        process.send_signal(signal.SIGSTOP)
        resize(50_000)
        process.send_signal(signal.SIGCONT)
        done = finish(process)
        right = found and done.returncode == 0 and "written again" in done.said
        row.add(done.line("cannot be written"), right, job.lost(run))
    return row


def second_processes(work: dict[str, Job]) -> Iterator[Row]:
    """Two on one directory, or one file: the second is told so, and nothing is lost."""
    sft, score = work["sft"], work["score"]
    for name, job, when in (
        ("at the same moment", sft, None),
        ("while it compiles", sft, sft.is_started),
        ("while it trains", sft, lambda run: sft.done(run) > 20),
        ("while it scores", score, lambda run: score.done(run) > 20),
    ):
        row, run = Row(f"a second process {name}"), f"second_{name.split()[-1]}"
        more = [] if when else ["run.checkpoint_every=2"]  # which takes longer
        first = start(job, run, *more)
        if when is not None:  # then the first one waits for the second to end
            wait_for(first, lambda when=when, run=run: when(run))
            first.send_signal(signal.SIGSTOP)
        second = start(job, run, *more, output=job.folder / f"{run}_second.log")
        try:
            ended = [finish(second)]
        finally:
            first.send_signal(signal.SIGCONT)
        ended.append(finish(first))
        loser = max(ended, key=lambda done: done.returncode)
        said = loser.line("is in use by another process")
        right = sorted(done.returncode for done in ended) == [0, 2] and bool(said)
        row.add(said or loser.said[-200:], right, job.lost(run))
        yield row


def damages(job: Job) -> Iterator[Row]:
    """The newest checkpoint of a finished run, in nine ways."""
    assert job.whole
    for name, (action, fault) in DAMAGES.items():
        row, run = (
            Row(f"damaged checkpoint: {name}"),
            f"damaged_{name.replace(' ', '_')}",
        )
        shutil.copytree(job.folder / "whole_sft", job.folder / run)
        action(job.folder / run / "checkpoints" / str(newest(job, run)))
        done = finish(start(job, run))
        said = done.line("renamed to")
        right = done.returncode == 0 and fault in said and "resuming" in done.said
        row.add(said or done.said[-200:], right, job.lost(run))
        yield row


def healthy(job: Training) -> Iterator[Row]:
    """States that look healthy; `job` is supervised."""
    assert job.whole
    yield _poisoned(job)
    yield _bracket(job)
    for part, text in (("state/_METADATA", '{"x": 1}'), ("config/metadata", "5")):
        yield _without_sums(job, part, text)
    yield _removed(job)


def _cut(job: Job, run: str, steps: int) -> None:
    """A run that a signal has stopped after so many steps, which are saved."""
    process = start(job, run, "run.checkpoint_every=5", "run.keep=1")
    wait_for(process, lambda: job.done(run) >= steps)
    process.send_signal(signal.SIGTERM)
    finish(process)


RUINOUS = "optimizer.learning_rate=1e30", "run.checkpoint_every=1", "run.keep=1"


def _poisoned(job: Job) -> Row:
    """A learning rate that ruins the weights in the step that is saved."""
    row, run = Row("a step that ruins the weights"), "poisoned"
    _cut(job, run, 10)
    before = newest(job, run)
    ruined = finish(start(job, run, *RUINOUS))
    said = ruined.line("is renamed to")
    right = ruined.returncode == 2 and f"resumes the run after step {before}" in said
    again = finish(start(job, run))  # as the message advises
    right = right and again.returncode == 0
    row.add(said or ruined.said[-200:], right, job.lost(run))
    return row


def _bracket(job: Job) -> Row:
    """A directory that orbax cannot read back."""
    row, run = Row("a directory with a bracket"), "lr[1e-3]"
    done = finish(start(job, run, output=job.folder / "bracket.log"))
    said = done.line("no checkpoint can be saved there")
    row.add(said or done.said[-200:], done.returncode == 2 and not job.done(run))
    return row


def _without_sums(job: Job, part: str, text: str) -> Row:
    row, run = Row(f"without checksums, damaged: {part}"), f"unsummed_{len(text)}"
    shutil.copytree(job.folder / "whole_sft", job.folder / run)
    step = job.folder / run / "checkpoints" / str(newest(job, run))
    (step / "SHA256SUMS").unlink()
    (step / part).write_text(text)
    done = finish(start(job, run))
    said = done.line("renamed to")
    row.add(
        said or done.said[-200:], done.returncode == 0 and bool(said), job.lost(run)
    )
    return row


def _removed(job: Training) -> Row:
    """The run's directory, while it trains; steps from then on are there."""
    row, run = Row("a directory that is removed"), "removed"
    process = start(job, run)
    wait_for(process, lambda: job.done(run) > 10)
    shutil.rmtree(job.folder / run, ignore_errors=True)
    done = finish(process)
    said = done.line("jaxmem creates it again")
    right = done.returncode == 0 and bool(said)
    steps = job.steps(run)
    right = right and steps == job.steps(f"whole_{job.name}")[-len(steps) :]
    right = right and finish(start(job, run)).returncode == 0
    row.add(said or done.said[-200:], right)
    return row
