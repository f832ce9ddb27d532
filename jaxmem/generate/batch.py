"""Completes a file of prompts, and goes on after a kill."""

import dataclasses
import functools
import hashlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from jaxmem.base import locks, messages
from jaxmem.base.stopping import Stop
from jaxmem.data.records import DataError, RawRecord, read_records
from jaxmem.data.source_files import find_files
from jaxmem.generate.completions import Completion, EncodedPrompt, Generator, unreached
from jaxmem.score.fingerprint import update_with_files
from jaxmem.score.journal import Journal
from jaxmem.train.output.progress import Progress

_COLUMNS = ("completion", "tokens", "finish", "stop")  # of the output


class _Result(NamedTuple):
    """A completion with the columns of its prompt; a `ScoreResult` of the journal."""

    fields: dict[str, Any]  # of the input
    completion: Completion

    def record(self) -> dict[str, Any]:
        done = self.completion
        values = done.text, len(done.ids), done.finish, done.stop
        return {**self.fields, **dict(zip(_COLUMNS, values, strict=True))}


def generate_file(
    generator: Generator, source: str, out: str, console: Console | None = None
) -> None:
    """Complete the prompts of a file, or go on where a killed process stopped.

    Each line of the output has the columns of its prompt, and "completion", "tokens",
    "finish" ("eos", "stop" or "length") and "stop", the stop string that was reached.

    Args:
        generator: model and options.
        source: path of a .jsonl, .json or .parquet file of prompts, of any form of
            `jaxmem.data.forms`.
        out: path of the .jsonl file to create.
        console: receives progress; by default a new rich console.

    Raises:
        ValueError: a prompt cannot be completed, the output exists, or the journal
            beside it belongs to other inputs or options.
        WriteError: the disk is full; recorded completions are not computed again.
        KeyboardInterrupt, SystemExit: after a signal, once the batch is recorded.
    """
    console = console or Console(stderr=True, force_terminal=sys.stderr.isatty())
    target = Path(out).expanduser()
    if target.suffix != ".jsonl":
        raise ValueError(f"--out must be a .jsonl file, got {target}")
    paths = find_files(source, "--in")
    records = [r for path in paths for r in read_records(path, "--in")]
    if not records:
        raise DataError(f"{source}: no prompts")
    reader = generator.model.reader
    with reader.whole_pass():
        prompts = [_prompt(generator, record, i) for i, record in enumerate(records)]
    for line in reader.lines():
        _log(console, line)
    lock = target.with_name(target.name + ".lock")
    log = functools.partial(_log, console)
    with Stop() as stop, locks.exclusive(lock, f"--out {target}", log):
        _complete(generator, records, prompts, target, console, stop)


def _prompt(generator: Generator, record: RawRecord, number: int) -> EncodedPrompt:
    taken = [name for name in _COLUMNS if name in record.fields]
    if taken:
        raise DataError(
            f"{record.where}: the output has a column {taken[0]!r} of its own; rename "
            "that of the input"
        )
    for name, value in record.fields.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            subject = f"{record.where}: the column {messages.short(name)}"
            expected = (
                "what JSON can hold, because --out repeats it; convert or drop it"
            )
            raise DataError(messages.must_be(subject, expected, value)) from error
    return generator.prompt_of(record, number)


def _complete(
    generator: Generator,
    records: Sequence[RawRecord],
    prompts: Sequence[EncodedPrompt],
    out: Path,
    console: Console,
    stop: Stop,
) -> None:
    size, total = generator.config.batch_size, len(prompts)
    starts = range(0, total, size)
    fingerprint = _fingerprint(generator, records, prompts)
    with Journal(out, fingerprint, "", [*starts, total]) as journal:
        if journal.done:
            _log(console, f"resuming after prompt {journal.done:,}")
        started = time.perf_counter()
        with (
            stop.deferred(),
            Progress(console, "prompts", total, journal.done) as report,
        ):
            for start in range(journal.done, total, size):
                if stop.signal:
                    break
                completions = generator.complete(prompts[start : start + size])
                fields = (record.fields for record in records[start:])
                journal.append(map(_Result, fields, completions))
                report.update(journal.done, sum(len(x.ids) for x in completions))
        if stop.signal:
            _log(
                console,
                f"stopped by {stop.name} after prompt {journal.done:,} of {total:,}: "
                "the same command goes on from there",
            )
        stop.raise_if_requested()
        _summarise(generator, journal, console, time.perf_counter() - started)
        journal.finish()
    _log(console, f"saved in {out}")


def _summarise(
    generator: Generator, journal: Journal, console: Console, seconds: float
) -> None:
    records = list(journal.records())
    tokens = sum(record["tokens"] for record in records)
    line = f"{len(records):,} completions, {tokens:,} tokens, in {seconds:,.1f} s"
    _log(console, line)
    ends = [record["finish"] for record in records]
    if (line := unreached(generator.config.stop, ends)) is not None:
        _log(console, line)


def _fingerprint(
    generator: Generator, records: Sequence[RawRecord], prompts: Sequence[EncodedPrompt]
) -> str:
    """Hash everything that the completions depend on."""
    options = json.dumps(dataclasses.asdict(generator.config))
    model = generator.model.decoder.config
    options += model.dtype + (model.base or "")
    digest = hashlib.sha256(options.encode())
    update_with_files(digest, generator.model.files)
    for record, prompt in zip(records, prompts, strict=True):
        columns = json.dumps([record.fields, prompt.ids])
        digest.update(columns.encode() + b"\n")
    return digest.hexdigest()[:24]


def _log(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)
