"""Data of a job: its records as tokens, its epochs, and the labels of the loss."""

import abc
import dataclasses
import datetime
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers

from jaxmem.base.messages import counted
from jaxmem.data import (
    documents,
    mixing,
    pairs,
    source_files,
    streams,
    teacher_files,
    teacher_streams,
    vocabulary,
)
from jaxmem.data.block_files import FileBlocks
from jaxmem.data.documents import Batch, DataConfig, DataError
from jaxmem.data.record_reader import RecordReader
from jaxmem.models.decoder import ModelConfig
from jaxmem.train.jobs import passes
from jaxmem.train.jobs.passes import SourceSize
from jaxmem.train.settings import RunConfig

NOTHING_COUNTED = (
    "no token that the loss counts: every token belongs to a prompt or has weight 0"
)


class TokenRecord(NamedTuple):
    """A record as the model reads it."""

    name: str  # where it is, such as data.jsonl:3
    tokens: np.ndarray  # [N]
    labels: np.ndarray | None = None  # [N] next tokens, negative where none is learned
    about: str = ""  # a further note


class DataSize(NamedTuple):
    """The records that a run trains on; fields are None where they are not known."""

    records: int
    noun: str  # what a record is, in the plural
    tokens: int | None = None  # of a pass, that the loss counts
    per_step: int | None = None  # records of a step, where no token is counted


class Reading(abc.ABC):
    """The data of a job, opened at the first use.

    Attributes:
        longest: tokens of the longest sequence that is trained on.
        chat_template: path of a template that replaces the checkpoint's, or None.
        tokenizer: of the records, kept in the run's directory; None: it is the
            checkpoint's, or the task has words of its own.
        today: when the run started, for templates that write the date; None: now.
    """

    longest: int
    chat_template: str | None
    tokenizer: Any = None
    today: datetime.datetime | None = None

    @abc.abstractmethod
    def fixed(self) -> dict[str, dict[str, Any]]:
        """Settings, by section, that a resumed run must share with the saved one."""

    @abc.abstractmethod
    def epochs(self, count: int) -> list[float]:
        """Numbers of micro-batches, or rollouts, of each of the first `count` epochs.

        They are fractions where a micro-batch may have records of two epochs.
        """

    def sources(self) -> list[SourceSize] | None:
        """The sizes of the sources that weights mix; None without weights."""
        return None

    @property
    def size(self) -> DataSize | None:
        """The size of the data once they are open; None where it is not known."""
        return None

    def seen(self, run: RunConfig) -> str | None:
        """A sentence on how often each record is seen; None if data have no end."""
        if (sources := self.sources()) is not None:
            return passes.of_sources(run, self.epochs(1)[0], sources)
        return passes.of_all(run, lambda: self.epochs(1)[0])

    @abc.abstractmethod
    def records(self, count: int) -> Iterator[TokenRecord | str]:
        """Yield the first `count` records, and lines about all of them."""

    @abc.abstractmethod
    def text(self, ids: np.ndarray) -> str:
        """The text of tokens, special ones included."""

    def lines(self) -> list[str]:
        """Lines on the form in which records were read, and on unused columns."""
        return []

    def end_of_turn(self) -> str | None:
        """The token that ends the turns of conversations; None where none was read."""
        return None

    def template_text(self) -> str | None:
        """The text of `chat_template`; None without one."""
        if self.chat_template is None:
            return None
        return Path(self.chat_template).expanduser().read_text("utf-8")


class Documents(Reading):
    """Documents in packed rows."""

    def __init__(self, config: DataConfig, model: ModelConfig):
        self.config, self._checkpoint = config, model.checkpoint
        self.longest, self.chat_template = config.sequence_length, config.chat_template

    @functools.cached_property
    def tokenizer(self) -> tokenizers.Tokenizer:
        """The tokenizer of the checkpoint, or one trained on the text."""
        if self._checkpoint is not None:
            return vocabulary.of_checkpoint(self._checkpoint)
        return documents.load_tokenizer(self.config)

    @functools.cached_property
    def reader(self) -> RecordReader:
        """The reader of the records."""
        return RecordReader.for_job(
            self.config, self._checkpoint, self.tokenizer, self.today,
            self.config.stripped,
        )  # fmt: skip

    def lines(self) -> list[str]:
        """See `Reading`; for a stream, the first block of each source is read."""
        where = ""
        if self.config.streaming:
            self._load_documents()
            where = "first block of each source: "
        lines = [where + line for line in self.reader.lines()]
        named = source_files.lines(self.config, "data")
        return [*named, *lines, *mixing.lines(self.config, "data")]

    def end_of_turn(self) -> str | None:
        """See `Reading`; for a stream, the first block of each source is read."""
        if "reader" not in vars(self):  # no record was read
            return None
        if self.config.streaming:
            self._load_documents()
        return self.reader.end_of_turn()

    def batches(self, rows: Sequence[int]) -> Any:
        """Micro-batches without end; this process reads only `rows` of each."""
        batches = streams.batches(self.config, self.tokenizer, rows, self.reader)
        self._counted = getattr(batches, "counted", None)
        return batches

    @property
    def size(self) -> DataSize | None:
        """See `Reading`; not known of a stream, or where processes share documents."""
        if (counted := getattr(self, "_counted", None)) is None:
            return None
        documents, tokens = counted
        return DataSize(documents, "documents", tokens)

    @property
    def holds_out(self) -> bool:
        """True if a fraction of the records, or a file of a folder, is held out."""
        config = self.config
        files = source_files.held_out_files(config.source, "data.source")
        return bool(config.held_out or files)

    def held_out(self) -> Callable[[], Any] | None:
        """A function that returns the held-out batches from their start, or None.

        Raises:
            DataError: no record is held out, or the loss counts no token of them.
        """
        if not self.holds_out:
            return None
        first = self._one_epoch("evaluation")
        start = first.get_state()
        if not any(map(loss_counts, first)):
            held_out = f"data.held_out={self.config.held_out}"
            if not self.config.held_out:
                held_out = "the held-out file of data.source"
            raise DataError(
                f"{held_out} keeps {NOTHING_COUNTED}; add documents, or hold none out"
            )

        def again() -> documents.BatchIterator:
            first.set_state(start)
            return first

        return again

    def _one_epoch(self, split: Any = "train") -> documents.BatchIterator:
        return documents.batches(
            self.config, self.tokenizer, split=split, epochs=1, reader=self.reader
        )

    def fixed(self) -> dict[str, dict[str, Any]]:
        return {"data": self.config.fixed()}

    def sources(self) -> list[SourceSize] | None:
        config = self.config
        if config.weights is None or config.streaming:
            return None
        config = dataclasses.replace(config, streams=1)
        batches = documents.batches(config, self.tokenizer, reader=self.reader)
        return passes.sizes(config, batches.rows.sizes())

    def seen(self, run: RunConfig) -> str | None:
        """See `Reading`; a stream would have to be read whole, and is not."""
        mixed = self.config.weights is not None
        if not self.config.streaming or (run.epochs is not None and not mixed):
            return super().seen(run)
        said, hint = f"run.steps={run.steps:,}", "; run.epochs sets this number"
        if run.epochs is not None:
            said = f"run.epochs={run.epochs:g}"
        if mixed:  # each source has epochs of its own
            hint = " by data.weights"
        return (
            "data.streaming: jaxmem would have to read all data to count how often "
            f"{said} trains on a record{hint}"
        )

    def epochs(self, count: int) -> list[float]:
        return streams.lengths(self.config, self.tokenizer, self.reader, count)

    def text(self, ids: np.ndarray) -> str:
        return self.tokenizer.decode(ids.tolist(), skip_special_tokens=False)

    def records(self, count: int) -> Iterator[TokenRecord | str]:
        read, length = self._load_documents(), self.config.sequence_length
        self.held_out()  # for its errors, which training would raise
        encoded = list(documents.encode_documents(read, self.tokenizer))
        for document, (tokens, labels) in zip(read[:count], encoded, strict=False):
            yield TokenRecord(document.name, tokens, labels)
        streaming = self.config.streaming
        yield statistics(f"documents{' of first blocks' if streaming else ''}", encoded)
        long = sum(len(tokens) > length for tokens, _ in encoded)
        yield (
            f"{long:,} {'is' if long == 1 else 'are'} longer than data.sequence_length="
            f"{length} and {'is' if long == 1 else 'are'} cut into rows"
        )
        if streaming:
            yield from self.lines()
            return
        tokens = sum(int((batch.segment_ids > 0).sum()) for batch in self._one_epoch())
        batches, size = self.epochs(1)[0], self.config.batch_size
        rows = round(batches * size)  # with rows that fill streams up
        yield (
            f"an epoch packs {tokens:,} tokens into {counted(rows, 'row')} of "
            f"{length}, {1 - tokens / (rows * length):.1%} padding: "
            f"{counted(math.ceil(batches), 'micro-batch')} of {size}{self._kept()}"
        )
        yield from self.lines()

    def _kept(self) -> str:
        """The number of documents that training does not read, for a line; or ""."""
        config = self.config
        _, kept = documents.load_splits(config.source, config.held_out, self.reader)
        return f"; {counted(len(kept), 'document')} held out" if kept else ""

    def _load_documents(self) -> list[documents.Document]:
        """All documents; of a stream, those of the first block of each source."""
        source = self.config.source
        if not self.config.streaming:
            return documents.load_documents(source, reader=self.reader)
        blocks = FileBlocks(source, "data.source")
        firsts = {blocks.source(i): i for i in reversed(range(len(blocks)))}
        with self.reader.whole_pass():
            return [
                self.reader.document(record)
                for number in sorted(firsts.values())
                for record in blocks.records(number)
            ]


class AnswerPairs(Documents):
    """Pairs of answers, each answer in a row with its prompt."""

    def __init__(self, config: DataConfig, model: ModelConfig, drop_long: bool):
        super().__init__(config, model)
        self._drop_long = drop_long

    @functools.cached_property
    def pairs(self) -> tuple[list[pairs.Pair], list[pairs.Pair]]:
        """(training pairs, held-out pairs)."""
        return pairs.load_pairs(
            self.config, self.tokenizer, self.reader, self._drop_long
        )

    def sources(self) -> list[SourceSize] | None:
        return passes.of_items(self.config, [pair.source for pair in self.pairs[0]])

    def epochs(self, count: int) -> list[float]:
        return [len(self.pairs[0]) / self.config.batch_size] * count

    def records(self, count: int) -> Iterator[TokenRecord | str]:
        training, held_out = self.pairs
        for pair in training[:count]:
            yield TokenRecord(f"{pair.where} chosen", *pair.chosen)
            yield TokenRecord(f"{pair.where} rejected", *pair.rejected)
        answers = [x for pair in training for x in (pair.chosen, pair.rejected)]
        yield statistics("answers", answers)
        filled = sum(len(tokens) for tokens, _ in answers)
        slots = len(answers) * self.config.sequence_length
        yield (
            f"{len(training):,} pairs to train on, {len(held_out):,} held out; "
            f"{1 - filled / slots:.1%} of the rows is padding"
        )
        yield from self.lines()

    @property
    def size(self) -> DataSize:
        tokens = sum(
            int((labels >= 0).sum())
            for pair in self.pairs[0]
            for _, labels in (pair.chosen, pair.rejected)
        )
        return DataSize(len(self.pairs[0]), "pairs", tokens)


class TeacherRows(Documents):
    """Rows of a file that `jaxmem score` wrote, with a teacher's columns."""

    def lines(self) -> list[str]:
        return mixing.lines(self.config, "data")

    def end_of_turn(self) -> str | None:
        """See `Reading`; None, because the file has tokens and no text."""
        return None

    def held_out(self) -> Callable[[], Any] | None:
        """See `Documents`; rows with the teacher's columns."""
        if not self.config.held_out:
            return None
        evaluation = functools.partial(
            teacher_streams.examples, self.file, self.config, "evaluation", 1
        )
        evaluation()  # raises now if it cannot be read
        return evaluation

    @functools.cached_property
    def file(self) -> teacher_files.TeacherFile:
        """The teacher's file; of a stream, its first part."""
        return teacher_streams.opened(self.config)

    def sources(self) -> list[SourceSize] | None:
        if self.config.weights is None or self.config.streaming:
            return None
        examples = teacher_streams.examples(self.file, self.config)
        return passes.sizes(self.config, examples.sizes())

    def epochs(self, count: int) -> list[float]:
        examples = teacher_streams.examples(self.file, self.config, epochs=count)
        size = self.config.batch_size
        return [rows / size for rows in examples.rows_of_epochs()]

    def records(self, count: int) -> Iterator[TokenRecord | str]:
        file = self.file
        self.held_out()  # as in `Documents.records`
        for i, (ids, prompt) in enumerate(file.documents[:count]):
            labels = np.append(ids[1:], documents.NO_LABEL)
            labels[: max(prompt - 1, 0)] = documents.NO_LABEL
            yield TokenRecord(f"document {i}", ids, labels)
        kind = "drawn" if file.logprobs is None else "most likely"
        streaming = self.config.streaming
        noun = "documents of the first row group" if streaming else "documents"
        yield (
            f"{len(file.documents):,} {noun}; the file has a teacher's "
            f"{file.ids.shape[1]} {kind} ids for {len(file.ids):,} tokens, at "
            f"temperature {file.temperature:g}"
        )


def loss_counts(batch: Batch) -> bool:
    """True if the loss counts a token of the rows that this process has read."""
    return bool(np.any((batch.labels >= 0) & (batch.segment_ids > 0)))


def statistics(what: str, encoded: list[tuple[np.ndarray, np.ndarray]]) -> str:
    """Number and lengths of tokens and labels, in a line."""
    lengths = np.array([len(tokens) for tokens, _ in encoded])
    counted = sum(int((labels >= 0).sum()) for _, labels in encoded)
    return (
        f"{len(lengths):,} {what}, {lengths.sum():,} tokens; the loss counts "
        f"{counted / lengths.sum():.1%} of them; {lengths.min():,} to "
        f"{lengths.max():,} tokens each, median {int(np.median(lengths)):,}"
    )
