"""Scores documents under a checkpoint: encode, pack, run, record, summarise."""

import dataclasses
import functools
import glob
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console

from jaxmem import checkpoints
from jaxmem.base.command_options import by_flag
from jaxmem.data.documents import NO_LABEL, load_documents
from jaxmem.data.records import SUFFIXES, DataError, kind_of
from jaxmem.models.own_model import LanguageModel
from jaxmem.score.config import ScoreConfig
from jaxmem.score.document_scores import (
    Scores,
    check_parquet,
    check_suffix,
    write_parquet,
)
from jaxmem.score.document_windows import (
    DocumentWindow,
    EncodedDocument,
    by_micro_batch,
    check_lengths,
    cut,
    encode,
)
from jaxmem.score.fingerprint import Fingerprint, fingerprint_of
from jaxmem.score.journal import ResumableOutput
from jaxmem.score.opened_model import OpenedModel, opened
from jaxmem.score.summary import Summary, summarise
from jaxmem.score.teacher_columns import TeacherColumns, token_columns

# Number of micro-batches whose tokens are packed and recorded together: enough to waste
# few slots, and few enough to lose little work when the process is killed.
_GROUP = 32


def score(config: ScoreConfig, console: Console | None = None) -> Summary:
    """Score documents, or resume a run that was killed.

        logprob_t = ln p(token_t | tokens before),   entropy_t = -Σ_v p_v ln p_v

    Args:
        config: model, documents and options.
        console: receives progress; by default a new rich console.

    Returns:
        The summary over all documents, including those that earlier processes scored;
        `config.out` has the numbers of every token.

    Raises:
        ValueError: the data, the checkpoint or the output cannot be used; the message
            names the document, tensor or file, or the process that uses the output.
        WriteError: the disk is full; recorded documents are not scored again.
        FloatingPointError: a score is not finite.
        KeyboardInterrupt: after SIGINT, once the current group of documents is
            recorded.
        SystemExit: after SIGTERM, once the current group of documents is recorded.
    """
    if kind_of(Path(config.data)) not in SUFFIXES:
        raise ValueError(
            f"DATA must be a {', '.join(SUFFIXES)} file, also as .gz or .zst, got "
            f"{config.data}"
        )
    console = console or Console(force_terminal=sys.stdout.isatty())
    out = Path(config.out).expanduser()
    check_suffix(out)
    if out.suffix == ".parquet":
        check_parquet()
    output = ResumableOutput(out, "document", console)
    with output.locked(), opened(config, config.chat_template_kwargs) as model:
        return _score(config, model, output, console)


def _score(
    config: ScoreConfig, model: OpenedModel, output: ResumableOutput, console: Console
) -> Summary:
    described, vocabulary = model.described, model.vocabulary
    if config.eos and vocabulary.eos is None:
        raise ValueError(
            f"{described.path} names no end-of-sequence token, which --eos needs"
        )
    documents = _read_documents(config, model, output)
    length = min(config.max_tokens, described.max_positions)
    if config.stride is None:
        check_lengths(documents, length, described.max_positions)
    elif config.stride > length:
        raise ValueError(
            f"--stride must be at most {length}, the model's longest input, got "
            f"{config.stride}: tokens between two windows would not be scored"
        )
    shared = _shared_fields(config, described, vocabulary)
    groups = _group_documents(documents, _GROUP * config.max_tokens)
    prefix, names = _split_names(config.data, documents)
    fingerprint = _fingerprint(config, model, documents, names)
    ends = [0, *(end for _, end in groups)]
    with output.journal(fingerprint, prefix, ends) as journal:
        started, read = time.perf_counter(), 0
        if journal.done < len(documents):
            named = zip(documents, names, strict=True)
            documents = [d._replace(name=journal.source + n) for d, n in named]
            decoder = model.load()
            decoder.head.chunk = config.chunk
            work = _Work(config, decoder, length, documents, shared)
            read = output.record(journal, groups, work.scores)
        seconds = time.perf_counter() - started
        summary = summarise(journal.records())
        journal.finish(write_parquet if output.path.suffix == ".parquet" else None)
    console.print(summary.table(seconds, read))
    console.print(summary.bars())
    output.log(f"saved in {output.path}")
    return summary


def _read_documents(
    config: ScoreConfig, model: OpenedModel, output: ResumableOutput
) -> list[EncodedDocument]:
    """Read the documents as tokens; log the forms of their records."""
    reader = model.reader(config.stripped)
    documents = load_documents(config.data, "DATA", reader)
    for line in reader.lines():
        output.log(line)
    encoded = encode(documents, model.vocabulary, config.eos, config.everything)
    scored = [any(len(x.ids) > x.first for x in own) for own in encoded]
    if not all(scored):
        first = documents[scored.index(False)].name
        line = (
            f"{scored.count(False):,} of {len(scored):,} records have no scored token"
        )
        line = f"{line}; the first of them is {first}"
        if not any(scored):
            raise DataError(f"DATA: {line}; --all scores all tokens of a conversation")
        output.log(line)
    return [tokens for own in encoded for tokens in own]


def _split_names(
    data: str, documents: Sequence[EncodedDocument]
) -> tuple[str, list[str]]:
    """The beginning that all documents' names share, and the rest of each name.

    A name is a file and a line; the beginning is the file, or the directory of several
    files, and may be spelled differently on resume.
    """
    path, names = str(Path(data).expanduser()), [d.name for d in documents]
    files = [name.rpartition(":")[0] for name in names]
    if len({*files}) > 1 or (glob.has_magic(path) and not os.path.exists(path)):
        path = os.path.join(os.path.commonpath(map(os.path.dirname, files)), "")
        files = [path] * len(names)
    return path, [n.removeprefix(f) for n, f in zip(names, files, strict=True)]


def _group_documents(
    documents: Sequence[EncodedDocument], tokens: int
) -> list[tuple[int, int]]:
    """(start, stop) of groups of about `tokens` tokens; a function of the data only."""
    ends = np.cumsum([max(len(d.ids), 1) for d in documents])
    bounds = np.flatnonzero(np.diff(ends // tokens, prepend=0, append=-1)).tolist()
    bounds = sorted({0, *bounds, len(documents)})
    return list(zip(bounds[:-1], bounds[1:], strict=True))


class _Work(NamedTuple):
    """The documents to score."""

    config: ScoreConfig
    decoder: LanguageModel
    length: int  # maximum length of the model's inputs
    documents: Sequence[EncodedDocument]
    shared: dict[str, Any] | None  # fields of every document that a student reads

    def scores(self, start: int, stop: int) -> tuple[Iterator[Scores], int]:
        """Scores of a group of documents, and the number of tokens read."""
        config, length = self.config, self.length
        windows = [
            window
            for number in range(start, stop)
            for window in cut(number, self.documents[number], length, config.stride)
        ]
        run = functools.partial(_score_batch, self.decoder, config.columns, start)
        tokens = [window.tokens for window in windows]
        labels = [window.labels for window in windows]
        numbers = by_micro_batch(run, tokens, labels, config.max_tokens, length)
        read = sum(len(window.tokens) for window in windows)
        return _collect(self, start, stop, windows, numbers), read


def _score_batch(
    decoder: LanguageModel,
    columns: TeacherColumns,
    start: int,
    number: int,
    *inputs: Any,
) -> dict[str, Any]:
    """Scores [B, T, 2] of one micro-batch, and its columns [B, T, K].

    `start` is the index of the group's first document, `number` that of the micro-batch
    in the group.
    """
    key = columns.key(start, number) if columns.has_columns else None
    *numbers, teacher = token_columns(decoder, *inputs, key, columns)
    return {"scores": np.stack(jax.device_get(numbers), axis=-1), **teacher}


def _shared_fields(
    config: ScoreConfig,
    described: checkpoints.CheckpointConfig,
    vocabulary: checkpoints.Vocabulary,
) -> dict[str, Any] | None:
    """The fields of every document for a student; None if no columns are recorded."""
    size, columns = described.model.vocab_size, config.columns
    if not columns.has_columns:
        return None
    if columns.top_k is not None and size is not None and columns.top_k > size:
        raise ValueError(
            f"--top-k must be at most {size}, the entries of the vocabulary, got "
            f"{columns.top_k}"
        )
    digest = checkpoints.vocabulary_digest(vocabulary.tokenizer)
    return {"temperature": columns.temperature, "vocabulary": digest}


def _collect(
    work: _Work,
    start: int,
    stop: int,
    windows: Sequence[DocumentWindow],
    numbers: Sequence[dict[str, np.ndarray]],
) -> Iterator[Scores]:
    """Yield the scores of each document, joined from its windows."""
    parts: list[list[dict[str, np.ndarray]]] = [[] for _ in range(start, stop)]
    for window, rows in zip(windows, numbers, strict=True):
        live = window.labels != NO_LABEL
        parts[window.document - start].append({k: x[live] for k, x in rows.items()})
    for document, pieces in zip(work.documents[start:stop], parts, strict=True):
        nothing = np.zeros((0, 2), np.float32)
        scored = np.concatenate([nothing, *(piece["scores"] for piece in pieces)])
        if not np.isfinite(scored).all():
            raise FloatingPointError(
                f"{document.name}: a score is not finite; the checkpoint contains "
                "weights that are not finite, or needs a wider --dtype"
            )
        ids, teacher = document.ids[document.first :], None
        if work.shared is not None:
            prompt = {"prompt_ids": document.ids[: document.first]}
            teacher = prompt | _join_columns(work.config.columns, pieces) | work.shared
        yield Scores(document.name, ids, scored[:, 0], scored[:, 1], teacher)


def _join_columns(
    columns: TeacherColumns, pieces: Sequence[dict[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    """A document's columns [tokens, K] by name."""
    return {
        name: np.concatenate([np.zeros((0, width), dtype), *(p[name] for p in pieces)])
        for name, (width, dtype) in columns.shapes.items()
    }


def _fingerprint(
    config: ScoreConfig,
    model: OpenedModel,
    documents: Sequence[EncodedDocument],
    names: Sequence[str],
) -> Fingerprint:
    """Hash everything that the scores and their order depend on."""
    options: list[Any] = [config.max_tokens, config.stride, config.dtype, config.chunk]
    if config.base is not None:
        options.append(config.base)
    if config.columns.has_columns:
        options.append(dataclasses.asdict(config.columns))

    def inputs() -> Iterator[bytes]:
        for document, name in zip(documents, names, strict=True):
            name = name.removeprefix(":")  # so that unfinished runs of one file go on
            yield json.dumps([name, document.first]).encode()
            yield document.ids.tobytes()

    flags = by_flag(config, ("out", "trust_code"))
    return fingerprint_of(json.dumps(options), model.files, inputs(), flags)
