"""Data that change during a run, directories of strangers, and files of others."""

import hashlib
import os
import pathlib
import shutil
import sys
from collections.abc import Callable, Iterator

import numpy as np

from tests.faults.jobs import (
    PAIRS,
    SIZES,
    Job,
    Row,
    Training,
    begin,
    finish,
    start,
    wait_for,
    write_lines,
)
from tests.helpers import texts

HEAD = 1 << 16  # bytes that a replaced file has in common with the one before
STREAM = (
    "data.source=stream.jsonl", "data.streaming=True", "data.vocab_size=300",
    "data.sequence_length=32", "data.batch_size=16", "data.shuffle_window=10",
    "data.ignored=('note',)", "run.steps=150", "run.checkpoint_every=5",
    "head.chunk=128",
)  # fmt: skip


def data(folder: pathlib.Path) -> Iterator[Row]:
    """A streamed file changes during a run, which says so, at once and on resume.

    With the file as it was, the same command resumes as if nothing had happened.
    """
    rng, letters = np.random.default_rng(7), np.array(list(texts.LETTERS))
    original = folder / "stream.jsonl"
    lines = ["".join(row) for row in rng.choice(letters, (2000, 60))]
    note = "x" * 2000  # which makes blocks, of 1 MiB, of few steps
    write_lines(original, [{"text": line, "note": note} for line in lines])
    sizes = [size for size in SIZES if not size.startswith("head.")]
    arguments = ("train", "stream.gin", *STREAM, *sizes, "data.cache_dir=cache")
    (folder / "stream.gin").write_text("")

    def job(place: pathlib.Path) -> Training:
        train = "run.out_dir={}", "{}/metrics.jsonl"
        return Training("stream", arguments, place, *train, lines=150)

    whole = job(folder).whole
    changes: dict[str, Callable[[pathlib.Path], None]] = {
        "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
        "emptied": lambda path: os.truncate(path, 0),
        "replaced by one of its size and head": _replace,
        "removed": lambda path: path.unlink(),
    }
    for name, change in changes.items():
        row, place = Row(f"a streamed file is {name}"), folder / f"stream_{name[:7]}"
        place.mkdir()
        shutil.copy(original, place)
        shutil.copy(folder / "stream.gin", place)
        shutil.copytree(folder / "cache", place / "cache")
        tried = job(place)
        process = start(tried, "run")
        wait_for(process, lambda tried=tried: tried.done("run") > 10)
        change(place / "stream.jsonl")
        first, again = finish(process), finish(start(tried, "run"))
        said = [each.line("jaxmem: error:") for each in (first, again)]
        right = first.returncode == again.returncode == 2
        right = right and all("stream.jsonl" in message for message in said)
        shutil.copy(original, place)
        right = finish(start(tried, "run")).returncode == 0 and right
        left = tried.results("run")
        lost = sum(left.get(k) != whole.get(k) for k in {*left, *whole})
        row.add(said[0] or first.said[-200:], right, lost)
        yield row


def _replace(path: pathlib.Path) -> None:
    content = path.read_bytes()
    other = content[HEAD:].translate(bytes.maketrans(b"cdefg", b"defgc"))
    made = path.with_suffix(".new")
    made.write_bytes(content[:HEAD] + other.replace(b'{"tfxt"', b'{"text"'))
    assert made.stat().st_size == len(content)
    os.replace(made, path)


def foreign_runs(folder: pathlib.Path) -> Iterator[Row]:
    """No command that reads a directory runs code which only the directory names."""
    commands = {
        "generate": ["generate", ".", "abc"],
        "score": ["score", ".", "../docs.jsonl"],
        "export": ["export", ".", "--out", "../exported"],
        "eval": [
            "eval", ".", "--tasks", "choices", "--include", "../tasks",
            "--out", "x.json",
        ],
    }  # fmt: skip
    if not (folder / "tasks").exists():
        del commands["eval"]
    for name, command in commands.items():
        row, place = (
            Row(f"code of a stranger's run, {name}"),
            folder / f"foreign_{name}",
        )
        (place / "checkpoints" / "1").mkdir(parents=True)
        shutil.copy(folder / "llama" / "tokenizer.json", place)
        (place / "evil.py").write_text("open(__file__ + '.ran', 'w')\n")
        (place / "operative.gin").write_text('model.factory = "evil.py:f"\n')
        full = [sys.executable, "-m", "jaxmem", *command]
        done = finish(begin(full, place, folder / f"foreign_{name}.log"))
        ran = (place / "evil.py.ran").exists()
        said = done.line("jaxmem: error:")
        named = "would run" in said
        row.add(said or done.said[-200:], done.returncode == 2 and named, int(ran))
        yield row


def directories(folder: pathlib.Path) -> Iterator[Row]:
    """Files of others in run.out_dir: refused before training, and nothing is lost."""
    sizes = [
        word for word in PAIRS if not word.startswith(("data.source", "model.lora"))
    ]
    sft = (
        "train",
        "sft_lora.gin",
        "data.source=words.jsonl",
        "model.lora_rank=0",
        *sizes,
    )
    train = "run.out_dir={}", "{}/metrics.jsonl"
    base = folder / "llama"

    def link(place: pathlib.Path) -> None:
        (place / "elsewhere").mkdir()
        (place / "elsewhere" / "mine.txt").write_text("mine")
        (place / "model").symlink_to(place / "elsewhere", target_is_directory=True)

    cases: dict[str, tuple[Callable[[pathlib.Path], object], str]] = {
        "a package called model": (_mine("model/mine.py"), "llama"),
        "a report": (_mine("report.html"), "llama"),
        "a summary and settings": (_mine("summary.json", "settings.gin"), "llama"),
        "a link called model": (link, "llama"),
        "the base model": (lambda place: shutil.copytree(base, place / "model"), ""),
    }
    for name, (fill, checkpoint) in cases.items():
        row, run = Row(f"run.out_dir with {name}"), f"others_{name.replace(' ', '_')}"
        place = folder / run
        place.mkdir()
        fill(place)
        before = _digests(place)
        job = Job("others", sft, folder, *train)
        model = f"model.checkpoint={checkpoint or f'{run}/model'}"
        done = finish(start(job, run, model))
        after = _digests(place)
        lost = sum(after.get(path) != digest for path, digest in before.items())
        said = done.line("jaxmem: error:")
        right = done.returncode == 2 and not job.path(run).exists() and bool(said)
        row.add(said or done.said[-200:], right, lost)
        yield row


def _mine(*names: str) -> Callable[[pathlib.Path], None]:
    def fill(place: pathlib.Path) -> None:
        for name in names:
            (place / name).parent.mkdir(exist_ok=True)
            (place / name).write_text("mine")

    return fill


def _digests(place: pathlib.Path) -> dict[str, str]:
    paths = [path for path in place.rglob("*") if path.is_file()]
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in paths}
