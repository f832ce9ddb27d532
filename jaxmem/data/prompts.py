"""Prompts of reinforcement learning: strings or conversations, as token ids."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tokenizers

from jaxmem.core import messages
from jaxmem.data.chat import Templates
from jaxmem.data.environments import Environments
from jaxmem.data.records import DataError, Record, find_files, read_records
from jaxmem.data.tasks import TaskConfig
from jaxmem.data.texts import conversation_of, split
from jaxmem.data.vocabulary import edges


class Prompt(NamedTuple):
    """One record of the data."""

    where: str
    prompt: Any  # a string, or a list of messages
    columns: dict[str, Any]  # the other fields
    ids: np.ndarray  # int32, input of the model


Reader = tuple[tokenizers.Tokenizer, Templates]  # of a checkpoint, for its prompts


def load_prompts(
    config: TaskConfig, read: Reader, environments: Environments | None = None
) -> tuple[list[Prompt], list[Prompt]]:
    """Read the prompts of `task.source`.

    Args:
        config: of the task.
        read: the checkpoint's tokenizer, and what returns the template for messages.
        environments: whose `reset` makes the prompts of records; None: `prompt` is one.

    Returns:
        Prompts for training, and held-out prompts.

    Raises:
        DataError: a file cannot be read, a record has no `prompt`, or a prompt is
            longer than `task.max_prompt_tokens`.
    """
    paths = find_files(config.source, "task.source")
    records = [r for path in paths for r in read_records(path, "task.source")]
    if not records:
        raise DataError(f"task.source: {paths[0]} holds no prompt")
    columns = [dict(record.fields) for record in records]
    if environments is None:
        said = [
            _own_prompt(record, own)
            for record, own in zip(records, columns, strict=True)
        ]
    else:
        opened = environments.open(columns, [record.where for record in records])
        said = [conversation.prompt for conversation in opened]
    prompts = [
        _prompt(config, record._replace(fields={"prompt": prompt}), own, read)
        for record, prompt, own in zip(records, said, columns, strict=True)
    ]
    if environments is None:
        _check_columns(prompts)
    keys = [_digest(prompt) for prompt in prompts]
    training, held_out = split(prompts, keys, config.held_out)
    if config.held_out and not held_out:
        raise DataError(
            f"task.held_out={config.held_out} of the {len(prompts)} prompts leaves "
            "none for evaluation; raise it or add prompts"
        )
    return training, held_out


def _own_prompt(record: Record, columns: dict[str, Any]) -> Any:
    """Take the prompt out of a record's columns."""
    if "prompt" not in columns:
        raise DataError(
            f'{record.where}: expected "prompt", got the keys '
            f"{messages.listing(sorted(columns)) or '(none)'}"
        )
    return columns.pop("prompt")


def _prompt(
    config: TaskConfig, record: Record, columns: dict[str, Any], read: Reader
) -> Prompt:
    prompt, ids = record.fields["prompt"], _ids(record, *read)
    if not ids:
        raise DataError(f"{record.where}: the prompt has no token")
    if len(ids) > config.max_prompt_tokens:
        raise DataError(
            f"{record.where}: the prompt has {len(ids)} tokens; raise "
            f"task.max_prompt_tokens={config.max_prompt_tokens}, or shorten it"
        )
    return Prompt(record.where, prompt, columns, np.array(ids, np.int32))


def _ids(
    record: Record, tokenizer: tokenizers.Tokenizer, template: Templates
) -> list[int]:
    prompt = record.fields["prompt"]
    if isinstance(prompt, str):
        start = edges(tokenizer)[0]
        return [*start, *tokenizer.encode(prompt, add_special_tokens=False).ids]
    turns, chat_template = conversation_of(record, "prompt"), template()
    try:
        text = chat_template.render(turns, add_generation_prompt=True)
    except DataError as error:
        raise DataError(f"{record.where}: {error}") from error
    return tokenizer.encode(text, add_special_tokens=False).ids


def _check_columns(prompts: Sequence[Prompt]) -> None:
    """Raise unless all prompts have the same columns, for reward functions."""
    first = prompts[0]
    for prompt in prompts:
        differing = prompt.columns.keys() ^ first.columns.keys()
        if differing:
            name = min(differing)
            has, lacks = first, prompt
            if name in prompt.columns:
                has, lacks = prompt, first
            raise DataError(f'{lacks.where}: no "{name}", which {has.where} has')


def _digest(prompt: Prompt) -> bytes:
    content = json.dumps([prompt.prompt, prompt.columns], sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).digest()


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """Identify prompts, columns and their order, but not their files."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(_digest(prompt) + prompt.ids.tobytes())
    return digest.hexdigest()[:24]
