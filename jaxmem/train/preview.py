"""Prints records of the data as tokens: which the loss counts, and their packing."""

from collections.abc import Iterator, Sequence

import numpy as np
import tokenizers
from rich.console import Console
from rich.text import Text

from jaxmem.data import documents as data, pairs, teacher_streams
from jaxmem.data.blocks import Blocks
from jaxmem.data.chat import Templates
from jaxmem.data.documents import DataConfig
from jaxmem.train import starting
from jaxmem.train.config import JobConfig
from jaxmem.train.jobs import teachers
from jaxmem.train.jobs.config import (
    Config,
    DistillJobConfig,
    DpoJobConfig,
    GrpoJobConfig,
)
from jaxmem.train.jobs.questions import OwnPrompts, task_of

_COUNTED, _OTHER = "bold green", "dim"
_MOST = 400  # maximum tokens shown per record


def show(config: JobConfig, count: int, console: Console) -> None:
    """Print the first records as tokens, and statistics of all.

    Tokens that the loss counts are green; without colours they are enclosed in ⟦ ⟧.

    Args:
        config: of the job.
        count: number of records.
        console: where to print.

    Raises:
        DataError: the data cannot be used.
    """
    if isinstance(config, GrpoJobConfig) or (
        isinstance(config, DistillJobConfig) and config.is_on_policy
    ):
        lines = _prompts(config, count)
    elif isinstance(config, DpoJobConfig):
        lines = _pairs(config, count, console)
    else:
        lines = _documents(config, count, console)
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _documents(
    config: Config | DistillJobConfig, count: int, console: Console
) -> Iterator[str | Text]:
    model = config.model
    if isinstance(config, DistillJobConfig):
        model = teachers.reading(config)
        if config.distill.mode == "offline":
            yield from _file(config)
            return
    tokenizer = starting.load_tokenizer(config.data, model)
    template = starting.load_template(config.data, model, tokenizer)
    documents = _read(config.data, template)
    encoded = list(data.encode_documents(documents, tokenizer))
    for document, (tokens, labels) in zip(documents[:count], encoded, strict=False):
        yield from _record(document.name, tokens, labels, tokenizer, console)
    lengths = np.array([len(tokens) for tokens, _ in encoded])
    counted = sum(int((labels >= 0).sum()) for _, labels in encoded)
    length = config.data.sequence_length
    first = "documents of the first block" if config.data.streaming else "documents"
    yield _lengths(first, lengths, counted)
    yield (
        f"{int((lengths > length).sum()):,} are longer than data.sequence_length="
        f"{length} and are cut into rows"
    )
    if config.data.streaming:
        return
    batches = data.batches(config.data, tokenizer, epochs=1, template=template)
    filled = [batch.segment_ids > 0 for batch in batches]
    tokens = sum(int(x.sum()) for x in filled)
    rows = sum(int(x.any(axis=1).sum()) for x in filled)
    yield (
        f"an epoch packs {tokens:,} tokens into {rows:,} rows of {length}, "
        f"{1 - tokens / (rows * length):.1%} padding: {len(filled):,} micro-batches of "
        f"{config.data.batch_size}"
    )


def _file(config: DistillJobConfig) -> Iterator[str]:
    file = teacher_streams.opened(config.data)
    kind = "drawn" if file.logprobs is None else "most likely"
    which = "documents of the first row group" if config.data.streaming else "documents"
    yield (
        f"{len(file.documents):,} {which}, of which a teacher's {file.ids.shape[1]} "
        f"{kind} ids are known for {len(file.ids):,} tokens, at temperature "
        f"{file.temperature:g}"
    )


def _read(config: DataConfig, template: Templates | None) -> list[data.Document]:
    """All documents; where they are streamed, those of the first block."""
    if not config.streaming:
        return data.load_documents(config.source, template=template)
    records = Blocks(config.source, "data.source").records(0)
    return [data.document_of(record, template) for record in records]


def _pairs(config: DpoJobConfig, count: int, console: Console) -> Iterator[str | Text]:
    config = starting.resolved(config)
    tokenizer = starting.load_tokenizer(config.data, config.model)
    template = starting.load_template(config.data, config.model, tokenizer)
    training, held_out = pairs.load_pairs(
        config.data, tokenizer, template, config.dpo.drop_long
    )
    for pair in training[:count]:
        for name, sequence in (("chosen", pair.chosen), ("rejected", pair.rejected)):
            yield from _record(f"{pair.where} {name}", *sequence, tokenizer, console)
    sequences = [s for pair in training for s in (pair.chosen, pair.rejected)]
    lengths = np.array([len(tokens) for tokens, _ in sequences])
    counted = sum(int((labels >= 0).sum()) for _, labels in sequences)
    yield _lengths("answers", lengths, counted)
    slots = len(sequences) * config.data.sequence_length
    yield (
        f"{len(training):,} pairs to train on, {len(held_out):,} held out; "
        f"{1 - lengths.sum() / slots:.1%} of the rows is padding"
    )


def _prompts(config: GrpoJobConfig | DistillJobConfig, count: int) -> Iterator[str]:
    task = task_of(config)
    if not isinstance(task, OwnPrompts):
        raise data.DataError("task.source='arithmetic' has no records: set a file")
    asked, held_out = task.ask(0, len(task)), task.held_out()
    for item in asked.items[:count]:
        yield f"{item.where}: {len(item.ids)} tokens, columns {', '.join(item.columns)}"
        yield task.text(item.ids)
    lengths = asked.lengths
    yield (
        f"{len(task):,} prompts to train on, {len(held_out.items) if held_out else 0:,}"
        f" held out; {lengths.min():,} to {lengths.max():,} tokens, of at most "
        f"task.max_prompt_tokens={config.task.max_prompt_tokens}"
    )


def _record(
    name: str,
    tokens: np.ndarray,
    labels: np.ndarray,
    tokenizer: tokenizers.Tokenizer,
    console: Console,
) -> Iterator[str | Text]:
    counted = np.append(False, labels[:-1] >= 0)
    yield f"{name}: {len(tokens):,} tokens, the loss counts {int(counted.sum()):,}"
    yield _colored(tokens[:_MOST], counted[:_MOST], tokenizer, console)


def _colored(
    tokens: np.ndarray,
    counted: np.ndarray,
    tokenizer: tokenizers.Tokenizer,
    console: Console,
) -> Text:
    """Runs of tokens of one kind, decoded together: a character may take several."""
    colored, plain = Text(), console.color_system is None
    starts = [0, *(np.flatnonzero(counted[1:] != counted[:-1]) + 1), len(tokens)]
    for start, stop in zip(starts, starts[1:], strict=False):
        ids = [int(i) for i in tokens[start:stop]]
        text = tokenizer.decode(ids, skip_special_tokens=False)
        if plain and len(ids) and counted[start]:
            text = f"⟦{text}⟧"
        colored.append(text, _COUNTED if len(ids) and counted[start] else _OTHER)
    return colored


def _lengths(what: str, lengths: Sequence[int] | np.ndarray, counted: int) -> str:
    lengths = np.asarray(lengths)
    return (
        f"{len(lengths):,} {what}, {lengths.sum():,} tokens, of which the loss counts "
        f"{counted / lengths.sum():.1%}; {lengths.min():,} to {lengths.max():,} tokens "
        f"each, median {int(np.median(lengths)):,}"
    )
