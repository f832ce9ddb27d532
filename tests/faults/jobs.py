"""Commands that are disturbed, and what each leaves when nothing disturbs it."""

import dataclasses
import functools
import hashlib
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tests.helpers import texts

ROOT = pathlib.Path(__file__).parents[2]
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
CHOICES = """
task: choices
dataset_path: json
dataset_kwargs: {data_files: {test: choices.json}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}} "
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
"""
CLOCKS = ("second", "gib")  # in names of metrics that differ from run to run


@dataclasses.dataclass(frozen=True)
class Job:
    """A command, what it writes, and what it would have written undisturbed."""

    name: str
    arguments: tuple[str, ...]
    folder: pathlib.Path  # with the data
    out: str  # arguments that name the output; "{}" for the run's name
    growing: str  # file that grows with the work, likewise
    lines: int = 0  # that it has in the end
    needs: "Job | None" = None  # a job whose output it reads
    lock: Any = dataclasses.field(  # of `whole`, which several sections want
        default_factory=threading.RLock, compare=False, repr=False
    )

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
        """True if a process has begun to write."""
        return any(self.path(run).parent.glob("*lock"))

    def results(self, run: str) -> dict[str, Any]:
        """The parts of the output by name, without times."""
        raise NotImplementedError

    def is_there(self, run: str) -> bool:
        """True if the output is under its own name."""
        raise NotImplementedError

    def is_half(self, run: str) -> bool:
        """True if the output is under its own name and not whole."""
        try:
            return self.is_there(run) and self.results(run) != self.whole
        except ValueError:  # no JSON, of which the end is missing
            return True

    @property
    def whole(self) -> dict[str, Any]:
        """The results of a run that nothing disturbs."""
        with self.lock:
            return self._whole

    @functools.cached_property
    def _whole(self) -> dict[str, Any]:
        if self.needs is not None:
            assert self.needs.whole
        run = f"whole_{self.name}"
        done = finish(start(self, run))
        assert done.returncode == 0, done.said
        return self.results(run)

    @functools.cached_property
    def seconds(self) -> float:
        """The time of the command, once its programs are compiled."""
        assert self.whole
        began = time.monotonic()
        done = finish(start(self, f"timed_{self.name}"))
        assert done.returncode == 0, done.said
        return time.monotonic() - began

    def lost(self, run: str) -> int:
        """Steps, documents, arrays and files that are missing or not the same."""
        try:
            left = self.results(run)
        except OSError:
            return len(self.whole)
        names = {*left, *self.whole}
        return sum(left.get(name) != self.whole.get(name) for name in names)


class Training(Job):
    """`jaxmem train`: steps, and every array of the weights that it saves."""

    def steps(self, run: str) -> list[dict[str, Any]]:
        """Metrics, without times."""
        lines = self.path(run).read_text().splitlines()
        return [
            {k: v for k, v in step.items() if not any(c in k for c in CLOCKS)}
            for step in map(json.loads, lines)
        ]

    def results(self, run: str) -> dict[str, Any]:
        steps = {f"step {i}": step for i, step in enumerate(self.steps(run))}
        return steps | self._arrays(run)

    def is_there(self, run: str) -> bool:
        folder = self.path(run).parent
        return any((folder / name).exists() for name in ("model", "adapter"))

    def is_half(self, run: str) -> bool:
        arrays = {k: v for k, v in self.whole.items() if not k.startswith("step ")}
        return self.is_there(run) and self._arrays(run) != arrays

    def _arrays(self, run: str) -> dict[str, Any]:
        folder = self.path(run).parent
        return {
            f"{path.parent.name}/{name}": value
            for kind in ("model", "adapter")
            for path in sorted((folder / kind).glob("*.safetensors"))
            for name, value in arrays_of(path).items()
        }


class Lines(Job):
    """`jaxmem score` and `jaxmem generate --in`: a line for each document or prompt."""

    def results(self, run: str) -> dict[str, Any]:
        lines = (self.folder / f"{run}.jsonl").read_text().splitlines()
        return {f"line {i}": line for i, line in enumerate(lines)}

    def is_started(self, run: str) -> bool:
        return (self.folder / f"{run}.jsonl.lock").exists()

    def is_there(self, run: str) -> bool:
        return (self.folder / f"{run}.jsonl").exists()


class Directory(Job):
    """`jaxmem export`: a directory of files."""

    def results(self, run: str) -> dict[str, Any]:
        folder = self.folder / run
        files = [path for path in folder.rglob("*") if path.is_file()]
        return {
            str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in files
        }

    def is_started(self, run: str) -> bool:
        return any(self.folder.glob(f".{run}-*"))

    def is_there(self, run: str) -> bool:
        return (self.folder / run).exists()


class Evaluation(Job):
    """`jaxmem eval`: a JSON file of results."""

    def results(self, run: str) -> dict[str, Any]:
        text = (self.folder / f"{run}.json").read_text()
        return json.loads(text)["results"]

    def is_started(self, run: str) -> bool:
        """True if the table has been printed, after which the file is written."""
        log = self.folder / f"{run}.log"
        return "|choices|" in log.read_text().split("\n$ jaxmem\n")[-1]

    def is_there(self, run: str) -> bool:
        return (self.folder / f"{run}.json").exists()


def arrays_of(path: pathlib.Path) -> dict[str, tuple[Any, ...]]:
    """Type, shape and a digest of the bytes of each array of a safetensors file."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header.pop("__metadata__", None)
    return {
        name: (
            entry["dtype"],
            *entry["shape"],
            hashlib.sha256(content[start + a : start + b]).hexdigest(),
        )
        for name, entry in header.items()
        for a, b in [entry["data_offsets"]]
    }


def jobs(folder: pathlib.Path) -> dict[str, Job]:
    """The jobs by name, after the files that they read have been written."""
    rng = np.random.default_rng(0)
    letters = np.array(list(texts.LETTERS))
    write = functools.partial(_write, folder, rng, letters)
    write("words.jsonl", 200, 60)
    write("docs.jsonl", 2000, 14)
    rows = [{"prompt": w, "chosen": w + "aa", "rejected": "bb" + w} for w in WORDS]
    write_lines(folder / "pairs.jsonl", rows)
    questions = [{"prompt": a + b} for a in WORDS for b in WORDS[:10]]
    write_lines(folder / "questions.jsonl", questions)
    (folder / "sft.gin").write_text(GIN)
    model = texts.checkpoint("llama", folder)
    student = ("train", "distill_stdlib.gin", *SIZES, *STUDENT)
    train = {"out": "run.out_dir={}", "growing": "{}/metrics.jsonl", "folder": folder}
    lora = ("train", "dpo_lora.gin", f"model.checkpoint={model}", *PAIRS)
    sft = Training("sft", ("train", "sft.gin", *SFT, *SIZES), lines=300, **train)
    grpo = ("train", "grpo_arithmetic.gin", *SIZES, *GRPO)
    lines = {
        "folder": folder, "out": "--out {}.jsonl", "growing": "{}.jsonl.unfinished"
    }  # fmt: skip
    score = ("score", str(model), "docs.jsonl", "--max-tokens=16")
    generate = (
        "generate", str(model), "--in", "questions.jsonl", "--max-new-tokens=4",
        "--batch-size=2",
    )  # fmt: skip
    export = ("export", "whole_sft")
    made: list[Job] = [
        sft,
        Training("grpo", grpo, lines=120, **train),
        Training("dpo", lora, lines=60, **train),
        Training("distill", student, lines=60, **train),
        Lines("score", score, lines=2000, **lines),
        Lines("generate", generate, lines=len(questions), **lines),
        Directory("export", export, folder, "--out {}", "{}", needs=sft),
    ]
    if importlib.util.find_spec("lm_eval") is not None:
        (folder / "tasks").mkdir()
        (folder / "tasks" / "choices.yaml").write_text(CHOICES)
        choices = ["left", "right"]
        asked = [{"question": w, "choices": choices, "answer": 0} for w in WORDS]
        write_lines(folder / "choices.json", asked)
        words = ("eval", str(model), "--tasks", "choices", "--include", "tasks")
        made.append(Evaluation("eval", words, folder, "--out {}.json", "{}.json"))
    return {job.name: job for job in made}


def write_lines(path: pathlib.Path, rows: list[dict[str, Any]]) -> None:
    """Write a JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _write(folder, rng, letters, name, count, length):
    words = [
        "".join(rng.choice(letters, rng.integers(1, length))) for _ in range(count)
    ]
    write_lines(folder / name, [{"text": word} for word in words])


@dataclasses.dataclass
class Done:
    """The words of a process, and how it ended."""

    returncode: int
    said: str

    def line(self, part: str) -> str:
        """The first line with that in it; "" if there is none."""
        return next((x for x in self.said.splitlines() if part in x), "")


def environment() -> dict[str, str]:
    """The environment variables of each process."""
    return os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "COLUMNS": "300",
        "PYTHONUNBUFFERED": "1",  # what is printed is seen at once
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
    }


def start(job: Job, run: str, *more: str, output=None, cached=True) -> subprocess.Popen:
    """Start a job's process; `output` is the file of what it says."""
    compiled = {} if cached else {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    log = output or job.folder / f"{run}.log"
    return begin(job.command(run, *more), job.folder, log, compiled)


def begin(
    command: list[str],
    folder: pathlib.Path,
    output: pathlib.Path,
    variables: Mapping[str, str] | None = None,
) -> subprocess.Popen:
    """Start a process in a folder, and append what it says to a file."""
    with open(output, "ab") as log:
        log.write(b"\n$ jaxmem\n")
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment() | dict(variables or {}),
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    process.log = pathlib.Path(log.name)  # type: ignore[attr-defined]
    return process


def finish(process: subprocess.Popen) -> Done:
    """Wait for a process, which is killed after `TIMEOUT` seconds."""
    try:
        process.wait(TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    said = process.log.read_text().split("\n$ jaxmem\n")[-1]  # type: ignore[attr-defined]
    return Done(process.returncode, said)


def wait_for(process: subprocess.Popen, event: Callable[[], bool]) -> bool:
    """Wait until it happens; False if the process has ended before."""
    deadline = time.monotonic() + TIMEOUT
    while process.poll() is None and time.monotonic() < deadline:
        if event():
            return True
        time.sleep(0.001)
    return False


@dataclasses.dataclass
class Row:
    """A fault that was tried some times, and its outcomes."""

    fault: str
    tries: int = 0
    lost: int = 0  # steps, documents, arrays of weights and files
    wrong: int = 0  # exit statuses and messages that are not as promised
    message: str = ""

    def add(self, said: str, right: bool, lost: int = 0) -> None:
        self.tries += 1
        self.lost += lost
        self.wrong += not right or "Traceback" in said
        self.message = self.message or said.strip()
