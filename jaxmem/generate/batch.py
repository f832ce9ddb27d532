"""Completes a file of prompts, and goes on after a kill."""

import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from rich.console import Console

from jaxmem.base import messages
from jaxmem.base.command_options import by_flag
from jaxmem.data.records import DataError, RawRecord, read_records
from jaxmem.data.source_files import find_files
from jaxmem.generate.completions import Completion, EncodedPrompt, Generator, unreached
from jaxmem.generate.grading import Grading
from jaxmem.score.fingerprint import Fingerprint, fingerprint_of
from jaxmem.score.journal import Journal, ResumableOutput, write_lines

_COLUMNS = ("completion", "tokens", "finish", "stop")  # of the output


class _Result(NamedTuple):
    """A completion with the columns of its prompt; a `ScoreResult` of the journal."""

    fields: dict[str, Any]  # of the input
    completion: Completion
    more: dict[str, Any]  # further columns of the output

    def record(self) -> dict[str, Any]:
        done = self.completion
        values = done.text, len(done.ids), done.finish, done.stop
        return {**self.fields, **dict(zip(_COLUMNS, values, strict=True)), **self.more}


def generate_file(
    generator: Generator,
    source: str,
    out: str,
    console: Console | None = None,
    grading: Grading | None = None,
) -> None:
    """Complete the prompts of a file, or go on where a killed process stopped.

    Each line of the output has the columns of its prompt, and "completion", "tokens",
    "finish" ("eos", "stop" or "length") and "stop", the stop string that was reached.
    Of several completions of a prompt each has its number in "sample", and with a
    reward function its "reward".

    Args:
        generator: model and options.
        source: path of a .jsonl, .json or .parquet file of prompts, of any form of
            `jaxmem.data.forms`.
        out: path of the .jsonl file to create.
        console: receives progress; by default a new rich console.
        grading: rewards, and the completions that are kept; None: no rewards.

    Raises:
        ValueError: a reward function cannot be used, a prompt cannot be completed, the
            output exists, or the journal beside it belongs to other inputs or options.
        WriteError: the disk is full; recorded completions are not computed again.
        KeyboardInterrupt, SystemExit: after a signal, once the batch is recorded.
    """
    target = Path(out).expanduser()
    if target.suffix != ".jsonl":
        raise ValueError(f"--out must be a .jsonl file, got {target}")
    paths = find_files(source, "--in")
    records = [r for path in paths for r in read_records(path, "--in")]
    if not records:
        raise DataError(f"{source}: no prompts")
    reader, grading = generator.model.reader, grading or Grading()
    job = _Job(generator, source, records, grading)
    output = ResumableOutput(target, job.noun, console)
    with reader.whole_pass():
        prompts = job.encode()
    for line in reader.lines():
        output.log(line)
    grading.check(source, records, reader)
    with output.locked():
        _complete(job, prompts, output)


class _Job(NamedTuple):
    """The records of a file, and how they are completed."""

    generator: Generator
    source: str  # of the records
    records: Sequence[RawRecord]
    grading: Grading

    @property
    def samples(self) -> int:
        """Completions of each record."""
        return self.generator.config.samples

    @property
    def columns(self) -> list[str]:
        """Names of the columns that the output adds."""
        more = {"sample": self.samples > 1, "reward": self.grading.reward is not None}
        return [*_COLUMNS, *(name for name, is_there in more.items() if is_there)]

    def encode(self) -> list[EncodedPrompt]:
        """The prompt of each completion; those of a record are in a row."""
        prompts = [
            _prompt(self, record, i * self.samples)
            for i, record in enumerate(self.records)
        ]
        return [
            prompt._replace(number=prompt.number + sample)
            for prompt in prompts
            for sample in range(self.samples)
        ]

    @property
    def noun(self) -> str:
        """A result, in messages."""
        return "prompt" if self.samples == 1 else "completion"

    def complete(self, prompts: Sequence[EncodedPrompt], start: int) -> list[_Result]:
        """Results of the prompts from the number `start` on, in a batch."""
        completions = self.generator.complete(prompts)
        numbers = range(start, start + len(prompts))
        records = [self.records[number // self.samples] for number in numbers]
        more: list[dict[str, Any]] = [{} for _ in numbers]
        if self.samples > 1:
            more = [{"sample": number % self.samples} for number in numbers]
        if self.grading.reward is not None:
            room = [prompt.room for prompt in prompts]
            reader = self.generator.model.reader
            rewards = self.grading.rewards(records, completions, room, reader)
            more = [
                own | {"reward": reward}
                for own, reward in zip(more, rewards, strict=True)
            ]
        fields = [record.fields for record in records]
        return list(map(_Result, fields, completions, more))


def _prompt(job: _Job, record: RawRecord, number: int) -> EncodedPrompt:
    taken = [name for name in job.columns if name in record.fields]
    if taken:
        raise DataError(
            f"{record.where}: the column {taken[0]!r} would be replaced by a column of "
            "the output; rename it in the input"
        )
    for name, value in record.fields.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            subject = f"{record.where}: the column {messages.short(name)}"
            expected = (
                "a JSON value, because --out repeats it; convert it or leave it out"
            )
            raise DataError(messages.must_be(subject, expected, value)) from error
    return job.generator.prompt_of(record, number)


def _complete(
    job: _Job, prompts: Sequence[EncodedPrompt], output: ResumableOutput
) -> None:
    size, total = job.generator.config.batch_size, len(prompts)
    starts = range(0, total, size)

    def results(start: int, stop: int) -> tuple[list[_Result], int]:
        made = job.complete(prompts[start:stop], start)
        return made, sum(len(result.completion.ids) for result in made)

    def write(file: BinaryIO, records: Iterator[dict[str, Any]]) -> None:
        write_lines(file, job.grading.kept(records, job.samples))

    with output.journal(_fingerprint(job, prompts), "", [*starts, total]) as journal:
        started = time.perf_counter()
        groups = ((start, min(start + size, total)) for start in starts)
        output.record(journal, groups, results)
        for line in _summary(job, journal, time.perf_counter() - started):
            output.log(line)
        journal.finish(write)
    output.log(f"saved in {output.path}")


def _summary(job: _Job, journal: Journal, seconds: float) -> Iterator[str]:
    records = list(journal.records())
    tokens = sum(record["tokens"] for record in records)
    yield f"{len(records):,} completions, {tokens:,} tokens, in {seconds:,.1f} s"
    ends = [record["finish"] for record in records]
    for line in (
        unreached(job.generator.config.stop, ends),
        job.grading.line(records, job.samples),
    ):
        if line is not None:
            yield line


def _fingerprint(job: _Job, prompts: Sequence[EncodedPrompt]) -> Fingerprint:
    """Hash everything that completions and rewards depend on."""
    config = dataclasses.asdict(job.generator.config)
    if job.samples == 1:  # as in journals from before there was a choice
        del config["samples"]
    generator = job.generator
    options = "".join(map(json.dumps, [config, *job.grading.digest()]))
    model = generator.model.decoder.config
    options += model.dtype + (model.base or "")
    firsts = zip(job.records, prompts[:: job.samples], strict=True)
    inputs = (
        json.dumps([record.fields, prompt.ids]).encode() + b"\n"
        for record, prompt in firsts
    )
    flags = by_flag(generator.config) | {
        "--in": job.source,
        "--reward": job.grading.reward,
        "--dtype": model.dtype,
        "--base": model.base,
    }
    return fingerprint_of(options, generator.model.files, inputs, flags)
