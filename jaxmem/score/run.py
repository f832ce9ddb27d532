"""Scores documents under a checkpoint: encode, pack, run, record, summarise."""

import dataclasses
import functools
import glob
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from rich.console import Console

from jaxmem import checkpoints
from jaxmem.base import locks, ranges
from jaxmem.base.stopping import Stop
from jaxmem.data.chat import read_template
from jaxmem.data.documents import NO_LABEL, load_documents
from jaxmem.data.record_reader import RecordReader
from jaxmem.data.records import SUFFIXES, DataError, kind_of
from jaxmem.data.vocabulary import special_tokens
from jaxmem.models.own_model import LanguageModel
from jaxmem.score.document_windows import (
    DocumentWindow,
    EncodedDocument,
    by_micro_batch,
    check_lengths,
    cut,
    encode,
)
from jaxmem.score.fingerprint import files_of, update_with_files
from jaxmem.score.journal import Journal, Scores, check_parquet, check_suffix
from jaxmem.score.summary import Summary, summarise
from jaxmem.score.teacher_columns import (
    TeacherColumns,
    check as check_columns,
    token_columns,
)
from jaxmem.train import saved
from jaxmem.train.output.progress import Progress
from jaxmem.train.saved import Saved

# Number of micro-batches whose tokens are packed and recorded together: enough to waste
# few slots, and few enough to lose little work when the process is killed.
_GROUP = 32


@dataclasses.dataclass(frozen=True)
class ScoreConfig:
    """The model, the documents, and the options of a scoring run."""

    model: str  # directory of a checkpoint, an adapter or a run, or model of the Hub
    data: str  # records of supervised training, in .jsonl, .json or .parquet
    out: str = "scores.jsonl"  # or .parquet
    max_tokens: int = 4096  # slots of a micro-batch; longest document, in tokens
    stride: int | None = None  # between windows of longer ones; None: refuse them
    dtype: str | None = None  # of weights and activations; None: the checkpoint's
    chunk: int | Literal["auto"] = "auto"  # tokens whose logits may be alive at once
    eos: bool = False  # score the end of sequence after each document
    adapter: str | None = None  # directory of a LoRA adapter, in PEFT's layout
    top_k: int | None = None  # most likely ids of each token to record for a student
    sample_ids: int | None = None  # or ids to draw from each token's distribution
    temperature: float = 1.0  # divides the logits that these come from
    seed: int = 0  # of the draws
    everything: bool = False  # score all of a conversation, not only what is learned
    chat_template_kwargs: Mapping[str, Any] | None = None  # variables of the template
    # treatment of a turn of which the template leaves out text, as data.stripped
    stripped: Literal["raise", "mask", "count"] = "raise"
    factory: str | None = None  # of a run of model.factory: the code of its model
    trust_code: bool = False  # True if the code that the run names may be run
    # matrices of blocks are coded as they are read; None: they are as stored
    base: Literal["nf4", "int8"] | None = None

    def __post_init__(self):
        ranges.check("--max-tokens", self.max_tokens, ranges.integers(1))
        if self.stride is not None and not 1 <= self.stride <= self.max_tokens:
            raise ValueError(
                f"--stride must be from 1 to --max-tokens={self.max_tokens}, got "
                f"{self.stride}"
            )
        if self.chunk != "auto" and self.chunk < 1:
            raise ValueError(f"--chunk must be at least 1, or auto, got {self.chunk}")
        if kind_of(Path(self.data)) not in SUFFIXES:
            raise ValueError(
                f"DATA must be a {', '.join(SUFFIXES)} file, also as .gz or .zst, got "
                f"{self.data}"
            )
        check_columns(self.columns)

    @property
    def columns(self) -> TeacherColumns:
        """The columns that are recorded for a student."""
        return TeacherColumns(self.top_k, self.sample_ids, self.temperature, self.seed)


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
    console = console or Console(force_terminal=sys.stdout.isatty())
    out = Path(config.out).expanduser()
    check_suffix(out)
    if out.suffix == ".parquet":
        check_parquet()
    lock = out.with_name(out.name + ".lock")
    code = saved.Code(config.factory, config.trust_code)
    with (
        Stop() as stop,
        locks.exclusive(lock, f"--out {out}", functools.partial(_log, console)),
        saved.opened(config.model, config.adapter, config.dtype, code) as source,
    ):
        return _score(config, source, out, console, stop)


def _log(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def _score(
    config: ScoreConfig, source: Saved, out: Path, console: Console, stop: Stop
) -> Summary:
    described = checkpoints.read_config(source.directory)
    vocabulary = checkpoints.load_vocabulary(source.directory)
    if config.eos and vocabulary.eos is None:
        raise ValueError(
            f"{described.path} names no end-of-sequence token, which --eos needs"
        )
    documents = _read_documents(config, source, vocabulary, console)
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
    fingerprint = _fingerprint(config, source, documents, names)
    ends = [0, *(end for _, end in groups)]
    with Journal(out, fingerprint, prefix, ends) as journal:
        started, read = time.perf_counter(), 0
        if journal.done:
            _log(console, f"resuming after document {journal.done:,}")
        try:
            if journal.done < len(documents):
                named = zip(documents, names, strict=True)
                documents = [d._replace(name=journal.source + n) for d, n in named]
                work = _Work(config, source, length, documents, groups, shared)
                read = _score_rest(work, journal, console, stop)
        finally:
            if stop.signal:
                _log(console, _stop_message(stop, journal, len(documents)))
        seconds = time.perf_counter() - started
        summary = summarise(journal.records())
        journal.finish()
    console.print(summary.table(seconds, read))
    console.print(summary.bars())
    _log(console, f"saved in {out}")
    return summary


def _read_documents(
    config: ScoreConfig,
    source: Saved,
    vocabulary: checkpoints.Vocabulary,
    console: Console,
) -> list[EncodedDocument]:
    """Read the documents as tokens; log the forms of their records."""
    special = special_tokens(vocabulary.tokenizer)
    template = functools.partial(
        read_template, source.directory, source.chat_template, special,
        config.chat_template_kwargs,
    )  # fmt: skip
    reader = RecordReader(
        template, absent=vocabulary.absent, stripped=config.stripped, section=None
    )
    documents = load_documents(config.data, "DATA", reader)
    for line in reader.lines():
        _log(console, line)
    encoded = encode(documents, vocabulary, config.eos, config.everything)
    scored = [any(len(x.ids) > x.first for x in own) for own in encoded]
    if not all(scored):
        first = documents[scored.index(False)].name
        line = (
            f"{scored.count(False):,} of {len(scored):,} records have no scored token"
        )
        line = f"{line}; the first of them is {first}"
        if not any(scored):
            raise DataError(f"DATA: {line}; --all scores all tokens of a conversation")
        _log(console, line)
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
    """The documents to score, in groups."""

    config: ScoreConfig
    source: Saved  # of the model
    length: int  # maximum length of the model's inputs
    documents: Sequence[EncodedDocument]
    groups: Sequence[tuple[int, int]]  # (start, stop) of documents
    shared: dict[str, Any] | None  # fields of every document that a student reads


def _score_rest(work: _Work, journal: Journal, console: Console, stop: Stop) -> int:
    """Score the remaining groups, and return the number of tokens read."""
    config, documents, length = work.config, work.documents, work.length
    decoder = work.source.load(config.dtype, config.base)
    decoder.head.chunk = config.chunk
    with (
        stop.deferred(),
        Progress(console, "documents", len(documents), journal.done) as report,
    ):
        for start, end in work.groups:
            if start < journal.done:
                continue
            if stop.signal:
                break
            windows = [
                window
                for number in range(start, end)
                for window in cut(number, documents[number], length, config.stride)
            ]
            run = functools.partial(_score_batch, decoder, config.columns, start)
            tokens = [window.tokens for window in windows]
            labels = [window.labels for window in windows]
            numbers = by_micro_batch(run, tokens, labels, config.max_tokens, length)
            journal.append(_collect(work, start, end, windows, numbers))
            report.update(end, sum(len(window.tokens) for window in windows))
    stop.raise_if_requested()
    return report.read


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
    key = columns.key(start, number) if columns else None
    *numbers, teacher = token_columns(decoder, *inputs, key, columns)
    return {"scores": np.stack(jax.device_get(numbers), axis=-1), **teacher}


def _stop_message(stop: Stop, journal: Journal, documents: int) -> str:
    """The message that a signal has stopped the run, and how to resume it."""
    return (
        f"stopped by {stop.name} after document {journal.done:,} of {documents:,}, all "
        f"recorded in {journal.path}; run the same command again to continue"
    )


def _shared_fields(
    config: ScoreConfig,
    described: checkpoints.CheckpointConfig,
    vocabulary: checkpoints.Vocabulary,
) -> dict[str, Any] | None:
    """The fields of every document for a student; None if no columns are recorded."""
    size, columns = described.model.vocab_size, config.columns
    if not columns:
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
    source: Saved,
    documents: Sequence[EncodedDocument],
    names: Sequence[str],
) -> str:
    """Hash everything that the scores and their order depend on."""
    options: list[Any] = [config.max_tokens, config.stride, config.dtype, config.chunk]
    if config.base is not None:
        options.append(config.base)
    if config.columns:
        options.append(dataclasses.asdict(config.columns))
    digest = hashlib.sha256(json.dumps(options).encode())
    update_with_files(digest, files_of(source))
    for document, name in zip(documents, names, strict=True):
        name = name.removeprefix(":")  # so that unfinished runs of one file go on
        digest.update(json.dumps([name, document.first]).encode())
        digest.update(document.ids.tobytes())
    return digest.hexdigest()[:24]
