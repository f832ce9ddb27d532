"""Kills, signals, full disks, second processes and states that look healthy, for real.

    python -m tests.faults
    python -m tests.faults --kills 20 --signals 4
    python -m tests.faults --only 'signals_(dpo|score)'

Every try is of `jaxmem` in processes of its own, and what it leaves in the end is
compared, bit by bit, with what one leaves that nothing disturbed. It takes about
twenty minutes on two cores, prints what was lost and what was said, and writes that to
benchmarks/results/faults_cpu.csv. Mounting a disk to fill it needs root, and is skipped
by name elsewhere. Tries without the compilation cache compile as a new machine does.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np

from benchmarks import results
from tests.checkpoints import texts
from tests.train.test_loop import DAMAGES

ROOT = pathlib.Path(__file__).parent.parent
WORDS = [a + b for a in "cdefg" for b in "rstuvwxy"]
TIMEOUT = 300  # seconds that a process may take on a busy machine
SIZES = (
    "model.layers=1", "model.hidden=16", "model.ff=16", "model.heads=2",
    "model.kv_heads=1", "model.head_dim=8", "head.chunk=16", "optimizer.warmup_steps=2",
    "run.compare_heads=False", "run.log_every=10",
)  # fmt: skip
SFT = (
    "data.source=words.jsonl", "data.vocab_size=300", "data.sequence_length=16",
    "data.batch_size=2", "data.streams=2", "data.cache_dir=cache",
)  # fmt: skip
GIN = "run.steps = 300\nrun.checkpoint_every = 5\n"  # what some tries override
GRPO = (
    "grpo.prompts=8", "grpo.group_size=4", "grpo.max_tokens_train=256",
    "grpo.max_tokens_forward=256", "run.steps=120", "run.checkpoint_every=5",
)  # fmt: skip
PAIRS = (
    "data.source=pairs.jsonl", "data.sequence_length=16", "data.batch_size=2",
    "head.chunk=16", "run.steps=60", "run.checkpoint_every=5", "run.accumulate=1",
    "model.dtype=float32", "model.param_dtype=float32", "eval.every=None",
    "model.lora_rank=2", "run.compare_heads=False", "run.log_every=10",
)  # fmt: skip
STUDENT = (
    "data.source=words.jsonl", "data.sequence_length=16", "data.batch_size=2",
    "distill.teacher=llama", "run.steps=60", "run.checkpoint_every=5",
    "data.held_out=0.0", "eval.every=None",
)  # fmt: skip
OWN = (
    "task.source=prompts.jsonl", "task.max_prompt_tokens=12", "grpo.prompts=2",
    "grpo.group_size=4", "grpo.max_tokens_train=128", "grpo.max_tokens_forward=128",
    "sampling.max_new_tokens=4", "head.chunk=32", "run.steps=40", "run.log_every=10",
    "run.checkpoint_every=5", "run.compare_heads=False", "model.dtype=float32",
    "model.param_dtype=float32", "eval.every=None", "task.held_out=0.0",
)  # fmt: skip
REWARDS = """
import multiprocessing, os, pathlib, sys, time

def score(completions, **_):
    return [c.count("a") / 4 for c in completions]

def leaving(completions, run, **_):
    path = pathlib.Path(run[0], "metrics.jsonl")
    if not pathlib.Path("stay").exists() and path.exists():
        if path.read_text().count("\\n") == 7:
            sys.exit(0)
    return score(completions)

def forking(completions, run, **_):
    if not pathlib.Path("forked").exists():
        child = os.fork()
        if not child:
            os.setsid()
            time.sleep(600)
        pathlib.Path("forked").write_text(str(child))
    return score(completions)
"""
CLOCKS = ("second", "gib")  # in names of metrics that differ from run to run


# ---------------------------------------------------------------------- jobs


@dataclasses.dataclass(frozen=True)
class Job:
    """A command, what it writes, and what it would have written undisturbed."""

    name: str
    arguments: tuple[str, ...]
    folder: pathlib.Path  # with the data
    out: str  # "{}" for the run's name
    growing: str  # file that grows with the work, likewise

    def command(self, run: str, *more: str) -> list[str]:
        program = [sys.executable, "-m", "jaxmem", *self.arguments]
        return [*program, *self.out.format(run).split(), *more]

    def path(self, run: str) -> pathlib.Path:
        return self.folder / self.growing.format(run)

    def done(self, run: str) -> int:
        """Lines of the file that grows."""
        path = self.path(run)
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def is_started(self, run: str) -> bool:
        """Whether a process is at it."""
        return any(self.path(run).parent.glob("*lock"))

    def left(self, run: str) -> list:
        """What the work comes to, without times."""
        if self.name == "score":
            return (self.folder / f"{run}.jsonl").read_text().splitlines()
        steps = [json.loads(line) for line in self.path(run).read_text().splitlines()]
        return [
            {k: v for k, v in step.items() if not any(c in k for c in CLOCKS)}
            for step in steps
        ]

    @functools.cached_property
    def whole(self) -> list:
        run = f"whole_{self.name}"
        done = finish(start(self, run))
        assert done.returncode == 0, done.said
        return self.left(run)

    def lost(self, run: str) -> int:
        """Steps or documents that are missing, twice there or not the same."""
        try:
            left = self.left(run)
        except OSError:
            return len(self.whole)
        same = sum(a == b for a, b in zip(left, self.whole, strict=False))
        return max(len(left), len(self.whole)) - same


def jobs(folder: pathlib.Path) -> dict[str, Job]:
    rng = np.random.default_rng(0)
    letters = np.array(list(texts.LETTERS))
    write = functools.partial(_write, folder, rng, letters)
    write("words.jsonl", 200, 60)
    write("docs.jsonl", 2000, 14)
    rows = [{"prompt": w, "chosen": w + "aa", "rejected": "bb" + w} for w in WORDS]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (folder / "sft.gin").write_text(GIN)
    (folder / "rewards.py").write_text(REWARDS)
    model = texts.checkpoint("llama", folder)
    student = ("train", "distill_stdlib.gin", *SIZES, *STUDENT)
    train = "run.out_dir={}", "{}/metrics.jsonl"
    lora = ("train", "dpo_lora.gin", f"model.checkpoint={model}", *PAIRS)
    made = [
        Job("sft", ("train", "sft.gin", *SFT, *SIZES), folder, *train),
        Job("grpo", ("train", "grpo_arithmetic.gin", *SIZES, *GRPO), folder, *train),
        Job("dpo", lora, folder, *train),
        Job("distill", student, folder, *train),
        Job(
            "score",
            ("score", str(model), "docs.jsonl", "--max-tokens=16"),
            folder,
            "--out {}.jsonl",
            "{}.jsonl.unfinished",
        ),
    ]
    return {job.name: job for job in made}


def _write(folder, rng, letters, name, count, length):
    words = [
        "".join(rng.choice(letters, rng.integers(1, length))) for _ in range(count)
    ]
    lines = [json.dumps({"text": word}) + "\n" for word in words]
    (folder / name).write_text("".join(lines))


@dataclasses.dataclass
class Done:
    """What a process said, and how it ended."""

    returncode: int
    said: str

    def line(self, part: str) -> str:
        """The first line with that in it; "" if there is none."""
        return next((x for x in self.said.splitlines() if part in x), "")


def start(job: Job, run: str, *more: str, output=None, cached=True) -> subprocess.Popen:
    compiled = {} if cached else {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    environment = (
        os.environ
        | compiled
        | {
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": "1",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "COLUMNS": "300",
        }
    )
    with open(output or job.folder / f"{run}.log", "ab") as log:
        log.write(b"\n$ jaxmem\n")
        process = subprocess.Popen(
            job.command(run, *more),
            cwd=job.folder,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    process.log = pathlib.Path(log.name)  # type: ignore[attr-defined]
    return process


def finish(process: subprocess.Popen) -> Done:
    try:
        process.wait(TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    said = process.log.read_text().split("\n$ jaxmem\n")[-1]  # type: ignore[attr-defined]
    return Done(process.returncode, said)


def wait_for(process: subprocess.Popen, event: Callable[[], bool]) -> bool:
    """Until it happens; False if the process has ended before."""
    deadline = time.monotonic() + TIMEOUT
    while process.poll() is None and time.monotonic() < deadline:
        if event():
            return True
        time.sleep(0.001)
    return False


# -------------------------------------------------------------------- faults


@dataclasses.dataclass
class Row:
    """What came of a fault, tried some times."""

    fault: str
    tries: int = 0
    lost: int = 0  # steps or documents
    wrong: int = 0  # exit statuses and messages that are not as promised
    message: str = ""

    def add(self, said: str, right: bool, lost: int = 0) -> None:
        self.tries += 1
        self.lost += lost
        self.wrong += not right or "Traceback" in said
        self.message = self.message or said.strip()


def kills(job: Job, count: int) -> Iterator[Row]:
    """One run, killed at some moment and resumed, that many times.

    Every third process has no compilation cache.
    """
    row, run = Row(f"kill -9, {job.name}"), f"killed_{job.name}"
    rng = np.random.default_rng(count)
    # Lines between two kills, at most, of fewer than the job writes in all.
    more = {"score": 2000 // count, "dpo": 4, "distill": 4}.get(job.name, 12)
    while row.tries < count:
        goal = job.done(run) + int(rng.integers(1, more))
        process = start(job, run, cached=row.tries % 3 != 1)
        if row.tries % 3:  # at work
            alive = wait_for(process, lambda goal=goal: job.done(run) >= goal)
        else:  # before that, or early in it
            alive = wait_for(process, lambda: job.is_started(run))
        time.sleep(rng.uniform(0, 0.03 if row.tries % 3 else 2))
        process.kill()
        done = finish(process)
        if not alive or done.returncode != -signal.SIGKILL:
            row.add(done.said[-200:], False)  # it has ended by itself
            break
        row.add("", True)
    done = finish(start(job, run))
    row.message = done.line("resuming")
    row.lost, row.wrong = job.lost(run), row.wrong + (done.returncode != 0)
    yield row


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
    if job.name != "score" and not more:
        right = right and (_newest(job, run) == job.done(run))
    if more:
        right = right and "does not let us save" in said
    resumed = finish(start(job, run)).returncode == 0
    row.add(said or done.said[-200:], right and resumed, job.lost(run))


def _newest(job: Job, run: str) -> int:
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
    right = right and done == _newest(job, run)
    right = right and finish(start(job, run)).returncode == 0
    # A sum over two devices rounds in another way than one over rows.
    lost = abs(len(job.left(run)) - len(job.whole))
    row.add(first.line("stopped by") or first.said[-200:], right, lost)
    return row


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
        action(job.folder / run / "checkpoints" / str(_newest(job, run)))
        done = finish(start(job, run))
        said = done.line("renamed to")
        right = done.returncode == 0 and fault in said and "resuming" in done.said
        row.add(said or done.said[-200:], right, job.lost(run))
        yield row


def healthy(job: Job) -> Iterator[Row]:
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
    before = _newest(job, run)
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
    step = job.folder / run / "checkpoints" / str(_newest(job, run))
    (step / "SHA256SUMS").unlink()
    (step / part).write_text(text)
    done = finish(start(job, run))
    said = done.line("renamed to")
    row.add(
        said or done.said[-200:], done.returncode == 0 and bool(said), job.lost(run)
    )
    return row


def _removed(job: Job) -> Row:
    """The run's directory, while it trains; steps from then on are there."""
    row, run = Row("a directory that is removed"), "removed"
    process = start(job, run)
    wait_for(process, lambda: job.done(run) > 10)
    shutil.rmtree(job.folder / run, ignore_errors=True)
    done = finish(process)
    said = done.line("is made anew")
    right = done.returncode == 0 and bool(said)
    right = right and job.left(run) == job.whole[-len(job.left(run)) :]
    right = right and finish(start(job, run)).returncode == 0
    row.add(said or done.said[-200:], right)
    return row


def guests(folder: pathlib.Path) -> Iterator[Row]:
    """Reward functions that end the process, and that fork before it is killed."""
    rows = [{"prompt": word, "run": "leaving"} for word in WORDS]
    train = "run.out_dir={}", "{}/metrics.jsonl"

    def job(name: str, function: str) -> Job:
        prompts = folder / f"{name}.jsonl"
        lines = [json.dumps({**row, "run": name}) + "\n" for row in rows]
        prompts.write_text("".join(lines))
        words = "grpo_checkpoint.gin", "model.checkpoint=llama", *OWN
        named = f"task.source={name}.jsonl", f"task.reward=rewards.py:{function}"
        words = [w for w in words if not w.startswith("task.source")]
        return Job("own", ("train", *words, *named), folder, *train)

    leaving = job("leaving", "leaving")
    row = Row("a reward that exits with 0")
    done = finish(start(leaving, "leaving"))
    said = done.line("SystemExit")
    right = done.returncode == 2 and _newest(leaving, "leaving") == 7
    (folder / "stay").touch()
    right = right and finish(start(leaving, "leaving")).returncode == 0
    row.add(said or done.said[-200:], right, 40 - len(leaving.left("leaving")))
    yield row

    forking, row = job("forking", "forking"), Row("kill -9 of a run whose reward forks")
    process = start(forking, "forking")
    wait_for(process, lambda: forking.done("forking") > 6)
    process.kill()
    finish(process)
    child = int((folder / "forked").read_text())
    os.kill(child, 0)  # it is alive
    done = finish(start(forking, "forking"))
    os.kill(child, signal.SIGKILL)
    lost = 40 - len(forking.left("forking"))
    row.add(done.line("resuming") or done.said[-200:], done.returncode == 0, lost)
    yield row


# ---------------------------------------------------------------------- main


def sections(
    work: dict[str, Job], killed: int, signalled: int
) -> dict[str, Callable[[], Iterator[Row]]]:
    named: dict[str, Callable[[], Iterator[Row]]] = {
        f"kills_{name}": functools.partial(kills, job, killed)
        for name, job in work.items()
    }
    for name, job in work.items():
        named[f"signals_{name}"] = functools.partial(signals, job, signalled)
    named["signals_others"] = functools.partial(other_signals, work["sft"])
    named["disks"] = functools.partial(full_disks, work)
    named["second"] = functools.partial(second_processes, work)
    named["damages"] = functools.partial(damages, work["sft"])
    named["healthy"] = functools.partial(healthy, work["sft"])
    named["guests"] = functools.partial(guests, work["sft"].folder)
    return named


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="sections, a pattern of names")
    parser.add_argument("--kills", type=int, default=10, help="of each job")
    parser.add_argument("--signals", type=int, default=2, help="to each job at work")
    parser.add_argument("--at-once", type=int, default=2, help="sections side by side")
    parser.add_argument("--out", default="faults_cpu.csv")
    arguments = parser.parse_args()
    # A shell ignores SIGINT for what it starts in the background, and for its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", f"{folder}/compiled")
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        work, rows, writing = jobs(pathlib.Path(folder)), [], threading.Lock()
        for job in work.values() if arguments.at_once > 1 else ():
            assert job.whole  # before two sections want it

        def carry_out(section: Callable[[], Iterator[Row]]) -> None:
            for row in section():
                row.message = row.message.replace(f"{folder}/", "")
                counts = f"{row.tries:3} tries {row.lost:3} lost {row.wrong} wrong"
                print(f"{row.fault:42} {counts}\n    {row.message}", flush=True)
                made = dataclasses.asdict(row) | results.provenance()
                with writing:
                    rows.append(row)
                    results.merge(arguments.out, [made], ["fault"])

        named = sections(work, arguments.kills, arguments.signals)
        chosen = [f for name, f in named.items() if re.search(arguments.only, name)]
        with concurrent.futures.ThreadPoolExecutor(arguments.at_once) as pool:
            list(pool.map(carry_out, chosen))
    print(f"{time.monotonic() - began:.0f} seconds")
    return int(any(row.lost or row.wrong for row in rows))


if __name__ == "__main__":
    sys.exit(main())
