"""Prompts of reinforcement learning: strings or conversations, as token ids."""

import functools
import hashlib
import itertools
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tokenizers

from jaxmem.base import processes
from jaxmem.data.environments import Environments
from jaxmem.data.record_reader import RecordReader
from jaxmem.data.records import DataError, RawRecord, held, read_records
from jaxmem.data.rewards import RewardError
from jaxmem.data.source_files import held_out_files, numbered_files
from jaxmem.data.tasks import TaskConfig
from jaxmem.data.texts import split_all
from jaxmem.data.vocabulary import edges, has_start


class PromptRecord(NamedTuple):
    """One record of the data."""

    where: str
    prompt: Any  # a string, or a list of messages
    columns: dict[str, Any]  # the other fields
    ids: np.ndarray  # int32, input of the model
    source: int = 0  # number of its entry in `task.source`


# A checkpoint's tokenizer and the reader of its prompts.
Reader = tuple[tokenizers.Tokenizer, RecordReader]


def load_prompts(
    config: TaskConfig, read: Reader, environments: Environments | None = None
) -> tuple[list[PromptRecord], list[PromptRecord]]:
    """Read the prompts of `task.source`, and return (training, held-out) ones.

    With environments, their `reset` returns the prompts of records.

    Raises:
        DataError: a file cannot be read, a record has no prompt, or one longer than
            `task.max_prompt_tokens`.
    """
    paths = numbered_files(config.source, "task.source")
    held_out = held_out_files(config.source, "task.source")
    records, counts = [], []
    for _, path in (*paths, *held_out):
        with held(path, "task.source"):
            records += read_records(path, "task.source")
        counts.append(len(records) - sum(counts))
    if not records:
        raise DataError(f"task.source: {paths[0][1]} contains no prompt")
    numbers = [number for number, _ in (*paths, *held_out)]
    sources = np.repeat(numbers, counts).tolist()
    columns = [dict(record.fields) for record in records]
    if environments is not None:
        tools = {"tools": environments.tools} if environments.tools else {}
        where = [record.where for record in records]

        # One process calls the environments, and all get the prompts.
        reset = functools.partial(environments.prompts, columns, where)
        reset_prompts = processes.by_first(reset, RewardError)
        records = [
            record._replace(fields={"prompt": prompt} | tools)
            for record, prompt in zip(records, reset_prompts, strict=True)
        ]
    with read[1].whole_pass():
        prompts = [
            _prompt(config, record, *read)._replace(source=source)
            for source, record in zip(sources, records, strict=True)
        ]
    if environments is not None:
        prompts = [
            prompt._replace(columns=own)
            for prompt, own in zip(prompts, columns, strict=True)
        ]
    keys = [_digest(prompt) for prompt in prompts]
    if environments is None:
        _check_columns(prompts, counts)
        prompts = _with_all_columns(prompts)
    if held_out:
        return _split_by_file(prompts, paths, counts)
    return split_all(prompts, keys, config.held_out, "task.held_out", "prompts")


def _split_by_file(
    prompts: list[PromptRecord], paths: Sequence[Any], counts: Sequence[int]
) -> tuple[list[PromptRecord], list[PromptRecord]]:
    """(training, held-out) prompts of files of which the first ones are trained on."""
    training = sum(counts[: len(paths)])
    for noun, part in (("train", prompts[:training]), ("hold out", prompts[training:])):
        if not part:
            raise DataError(f"task.source: its files to {noun} contain no prompt")
    return prompts[:training], prompts[training:]


def _prompt(
    config: TaskConfig,
    record: RawRecord,
    tokenizer: tokenizers.Tokenizer,
    reader: RecordReader,
) -> PromptRecord:
    asked, columns = reader.prompt(record)
    ids = tokenizer.encode(asked.text, add_special_tokens=False).ids
    start = edges(tokenizer)[0]
    if not asked.rendered and not has_start(ids, start):
        ids = [*start, *ids]
    if not ids:
        raise DataError(f"{record.where}: the prompt has no token")
    if len(ids) > config.max_prompt_tokens:
        raise DataError(
            f"{record.where}: the prompt has {len(ids)} tokens; raise "
            f"task.max_prompt_tokens={config.max_prompt_tokens}, or shorten the prompt"
        )
    return PromptRecord(record.where, asked.prompt, columns, np.array(ids, np.int32))


def _check_columns(prompts: Sequence[PromptRecord], counts: Sequence[int]) -> None:
    """Raise unless the prompts of each file have equal columns; files have `counts`."""
    ends = itertools.accumulate(counts)
    for count, end in zip(counts, ends, strict=True):
        of_file = prompts[end - count : end]
        for prompt in of_file:
            first = of_file[0]
            differing = prompt.columns.keys() ^ first.columns.keys()
            if differing:
                name = min(differing)
                has, lacks = first, prompt
                if name in prompt.columns:
                    has, lacks = prompt, first
                raise DataError(
                    f'{lacks.where}: the record has no "{name}", but {has.where} has; '
                    "write null in records without a value"
                )


def _with_all_columns(prompts: Sequence[PromptRecord]) -> list[PromptRecord]:
    """Prompts with the columns of all files, None where their own file has none."""
    absent = dict.fromkeys(name for prompt in prompts for name in prompt.columns)
    return [prompt._replace(columns=absent | prompt.columns) for prompt in prompts]


def _digest(prompt: PromptRecord) -> bytes:
    content = json.dumps([prompt.prompt, prompt.columns], sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).digest()


def fingerprint(prompts: Sequence[PromptRecord]) -> str:
    """Identify prompts, columns and their order, but not their files."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(_digest(prompt) + prompt.ids.tobytes())
    return digest.hexdigest()[:24]
