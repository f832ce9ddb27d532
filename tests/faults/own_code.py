"""Code of the user: rewards and environments, in one process and in two."""

import collections
import json
import os
import pathlib
import shutil
import signal
import sys
from collections.abc import Iterator

from tests.faults.jobs import (
    OWN,
    WORDS,
    Row,
    Training,
    begin,
    finish,
    start,
    wait_for,
    write_lines,
)
from tests.faults.stops import newest
from tests.helpers import grpo_processes as two
from tests.helpers.processes import free_port

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
ENVIRONMENTS = """
import os, pathlib

def note(*words):
    with open(pathlib.Path(__file__).with_suffix(".log"), "a") as file:
        print(*words, file=file)

class Tool:
    made = 0

    def reset(self, record):
        Tool.made += 1
        self.name = f"{type(self).__name__}-{os.getpid()}-{Tool.made}"
        note("opened", self.name)
        return record["prompt"]

    def step(self, said):
        return "ab", said.count("a") / 4, False

    def close(self):
        note("closed", self.name)

class Failing(Tool):
    def step(self, said):
        if Tool.made > 100:
            raise OSError("the tool is away")
        return super().step(said)

class Unreachable(Tool):
    def reset(self, record):
        prompt = super().reset(record)
        if Tool.made > 100:
            raise OSError("the tool is away")
        return prompt
"""


def own_job(folder: pathlib.Path, name: str, *more: str) -> Training:
    """A GRPO job of prompts, with a reward or an environment of the user."""
    write_lines(
        folder / f"{name}.jsonl", [{"prompt": word, "run": name} for word in WORDS]
    )
    words = "model.checkpoint=llama", *OWN, f"task.source={name}.jsonl", *more
    by_key = {word.partition("=")[0]: word for word in words}  # the last one counts
    return Training(
        name, ("train", "grpo_checkpoint.gin", *by_key.values()), folder,
        "run.out_dir={}", "{}/metrics.jsonl", lines=40,
    )  # fmt: skip


def guests(folder: pathlib.Path) -> Iterator[Row]:
    """Reward functions that end the process, and that fork before it is killed."""
    (folder / "rewards.py").write_text(REWARDS)
    leaving = own_job(folder, "leaving", "task.reward=rewards.py:leaving")
    row = Row("a reward that exits with 0")
    done = finish(start(leaving, "leaving"))
    said = done.line("SystemExit")
    right = done.returncode == 2 and newest(leaving, "leaving") == 7
    (folder / "stay").touch()
    right = right and finish(start(leaving, "leaving")).returncode == 0
    row.add(said or done.said[-200:], right, leaving.lines - leaving.done("leaving"))
    yield row

    forking = own_job(folder, "forking", "task.reward=rewards.py:forking")
    row = Row("kill -9 of a run whose reward forks")
    process = start(forking, "forking")
    wait_for(process, lambda: forking.done("forking") > 6)
    process.kill()
    finish(process)
    child = int((folder / "forked").read_text())
    os.kill(child, 0)  # it is alive
    done = finish(start(forking, "forking"))
    os.kill(child, signal.SIGKILL)
    lost = forking.lines - forking.done("forking")
    row.add(done.line("resuming") or done.said[-200:], done.returncode == 0, lost)
    yield row


def environments(folder: pathlib.Path) -> Iterator[Row]:
    """Environments are closed, however their conversations end."""
    for name, kind, more, status in (
        ("the run's end", "Tool", (), 0),
        ("SIGTERM", "Tool", ("run.steps=9999",), 143),
        ("a failed step", "Failing", (), 2),
        ("a failed step, which ends", "Failing", ("task.environment_errors=end",), 0),
        ("a failed reset", "Unreachable", (), 2),
    ):
        key = name.replace(" ", "_").replace(",", "").replace("'", "")
        (folder / f"tools_{key}.py").write_text(ENVIRONMENTS)
        job = own_job(
            folder, f"tools_{key}", f"task.environment=tools_{key}.py:{kind}",
            "task.max_turns=2", "task.max_reply_tokens=4", "task.reward=None",
            "grpo.max_tokens_train=256", "grpo.max_tokens_forward=256", *more,
        )  # fmt: skip
        row, run = Row(f"environments closed after {name}"), f"tools_{key}_run"
        process = start(job, run)
        if status == 143:
            wait_for(process, lambda job=job, run=run: job.done(run) > 3)
            process.send_signal(signal.SIGTERM)
        done = finish(process)
        log = folder / f"tools_{key}.log"
        counts: dict[str, collections.Counter[str]] = collections.defaultdict(
            collections.Counter
        )
        for line in log.read_text().splitlines() if log.exists() else ():
            what, tool = line.split()
            counts[tool][what] += 1
        lost = sum(each != {"opened": 1, "closed": 1} for each in counts.values())
        last = done.said.strip().splitlines()[-1:]
        row.add("".join(last), done.returncode == status and bool(counts), lost)
        yield row


def two_processes(folder: pathlib.Path) -> Iterator[Row]:
    """Both learn from the same rewards and replies, which one of them asked for."""
    for name, more, calls in (
        ("random rewards", ("task.reward=own.py:chance",), "rewards"),
        ("random environments", two.ENVIRONMENT, "steps"),
        (
            "random decisions to sample again",
            ("task.reward=own.py:rarely", "grpo.resample=5", "run.steps=3"),
            "rewards",
        ),
    ):
        row, place = Row(f"two processes, {name}"), folder / name.replace(" ", "_")
        place.mkdir()
        shutil.copytree(folder / "llama", place / "llama")
        named = {"eos_token": "</s>", "bos_token": "<s>"}
        (place / "llama" / "tokenizer_config.json").write_text(json.dumps(named))
        write_lines(
            place / "prompts.jsonl", [{"prompt": a + b} for a in "ab" for b in "xyz"]
        )
        for file, text in (
            ("own.py", two.OWN), ("grpo.gin", two.GIN), ("program.py", two.PROGRAM)
        ):  # fmt: skip
            (place / file).write_text(text)
        command = [sys.executable, "program.py", "train", "grpo.gin", *more]
        command += [f"--coordinator=127.0.0.1:{free_port()}", "--processes=2"]
        pair = [
            begin([*command, f"--process-id={i}"], place, place / f"{i}.log")
            for i in range(2)
        ]
        first, second = (finish(process) for process in pair)
        learned = [
            (place / f"learned-{i}.jsonl").read_text().splitlines()
            if (place / f"learned-{i}.jsonl").exists()
            else []
            for i in range(2)
        ]
        told = (place / f"{calls}.jsonl").read_text().splitlines()
        askers = {json.loads(line)[0] for line in told}
        right = first.returncode == second.returncode == 0 and len(askers) == 1
        lost = sum(a != b for a, b in zip(*learned, strict=False))
        lost += abs(len(learned[0]) - len(learned[1])) + (not learned[0])
        last = first.said.strip().splitlines()[-1:]
        said = f"{len(told)} {calls} in one process, {len(learned[0])} steps in both"
        row.add(said if right else "".join(last), right, lost)
        yield row
