"""Text to batches: documents, a byte-level vocabulary, packed rows that can resume.

    documents -> token ids -> pieces of <= T tokens -> shuffled, packed rows -> [B, T]

Only a document longer than a row is cut, and its pieces are all kept: each epoch holds
every token of every document exactly once, in rows of its own.  Labels are shifted
inside the document before the cut, so the last token of a piece still predicts the
first of the next.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import grain
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxmem.base import caches, files, json_files
from jaxmem.data import block_files, packed
from jaxmem.data.block_files import IN_THIS_THREAD, FileBlocks
from jaxmem.data.config import DataConfig as DataConfig
from jaxmem.data.encoding import NO_LABEL as NO_LABEL, encode_documents
from jaxmem.data.packed import Batch as Batch, BatchIterator as BatchIterator
from jaxmem.data.record_reader import RecordReader
from jaxmem.data.texts import (
    DataError as DataError,
    Document as Document,
    digest,
    load_documents as load_documents,
    load_splits,
    split_documents as split_documents,
)
from jaxmem.data.vocabulary import SPECIAL_TOKENS

# Documents tokenised at a time: enough to use every core, few enough that the
# library's verbose encodings (about 100 bytes a token) never exist all together.
_DOCUMENTS_AT_ONCE = 64
# Blocks of streamed data that a vocabulary is trained on.
_VOCABULARY_BLOCKS = 64


# --------------------------------------------------------------- vocabulary


def load_tokenizer(config: DataConfig) -> tokenizers.Tokenizer:
    """Return the vocabulary of the training documents, trained at the first call.

    With `config.streaming` it is trained on 64 of their blocks. The cache is keyed by
    the content that the vocabulary depends on, and written in one step: runs that start
    together agree and never read half a file.

    Returns:
      A byte-level BPE tokenizer: `decode(encode(text).ids)` is `text` for any text.

    Raises:
      DataError: the text is unusable or too small for `config.vocab_size` entries.
    """
    reader = RecordReader(None, config.columns, config.ignored)
    if config.streaming:
        blocks = FileBlocks(config.source, "data.source")
        numbers = blocks.split(config.held_out)[0][:_VOCABULARY_BLOCKS]
        documents = [reader.document(r) for i in numbers for r in blocks.records(i)]
    else:
        every = load_documents(config.source, reader=reader)
        documents, _ = split_documents(every, config.held_out)
    name = f"vocabulary-{_vocabulary_key(config, documents)}.json"
    with caches.errors(config.cache_dir):
        path = caches.directory(config.cache_dir) / name
        if not path.exists():
            vocabulary = _train_vocabulary(config, documents).to_str()
            with files.unfinished(path) as unfinished:
                unfinished.write_text(json.dumps(_with_digest(vocabulary)), "utf-8")
    return _read_vocabulary(path)


def _with_digest(vocabulary: str) -> dict[str, str]:
    digest = hashlib.sha256(vocabulary.encode()).hexdigest()
    return {"sha256": digest, "vocabulary": vocabulary}


def _vocabulary_key(config: DataConfig, documents: Iterable[Document]) -> str:
    # Another version of the library may merge differently. Files of format 1 are
    # without a digest, and are not read.
    recipe = [2, tokenizers.__version__, config.vocab_size, SPECIAL_TOKENS]
    key = hashlib.sha256(json.dumps(recipe).encode())
    for document in documents:
        key.update(digest(document))
    return key.hexdigest()[:24]


def _train_vocabulary(
    config: DataConfig, documents: Sequence[Document]
) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (text for d in documents for text in (d.prompt, d.text))
    tokenizer.train_from_iterator(texts, trainer)
    size = tokenizer.get_vocab_size()
    if size < config.vocab_size:
        for document in documents:
            if document.ids:
                raise DataError(
                    f"{document.name}: input_ids has {document.ids[0]}. Without a "
                    "checkpoint, jaxmem trains a vocabulary on the text of "
                    f"{config.source!r}, which is enough for only {size} of "
                    f"data.vocab_size={config.vocab_size} entries; set "
                    "model.checkpoint to the model whose tokenizer wrote the ids"
                )
        raise DataError(
            f"data.vocab_size={config.vocab_size}: the text of {config.source!r} is "
            f"enough for only {size} entries; set data.vocab_size={size} or name more "
            "text"
        )
    return tokenizer


def _read_vocabulary(path: Path) -> tokenizers.Tokenizer:
    try:
        kept = json_files.read_object(path)
        if kept != _with_digest(str(kept.get("vocabulary"))):
            raise ValueError("its digest does not match its content")
        tokenizer = tokenizers.Tokenizer.from_str(kept["vocabulary"])
    except Exception as error:  # the library raises nothing narrower
        raise DataError(
            f"cannot read the cached vocabulary {path} ({error}); delete the file and "
            "run again"
        ) from error
    # "<eos>" written in a document is text, not the end of the document.
    tokenizer.encode_special_tokens = True
    return tokenizer


# ------------------------------------------------------------------ batches


def batches(
    config: DataConfig,
    tokenizer: tokenizers.Tokenizer,
    *,
    split: Literal["train", "evaluation"] = "train",
    epochs: int | None = None,
    stream: int | None = None,
    reader: RecordReader | None = None,
) -> BatchIterator:
    """Return packed batches, shuffled as `config` says; the same on every run.

    Args:
      config: sources, and layout of the rows.
      tokenizer: the vocabulary, from `load_tokenizer`.
      split: `"train"`, or `"evaluation"` for the documents held out.
      epochs: passes over the documents; `None` never ends.
      stream: every `config.streams`-th document, and its part of the rows; None: all.
      reader: reads records; None: one without a chat template.

    Returns:
      A `BatchIterator`.  If it ends, its last batch is filled up with padding.

    Raises:
      DataError: the text is unusable, or the split is empty.
    """
    if split not in ("train", "evaluation"):
        raise ValueError(f'split must be "train" or "evaluation", got {split!r}')
    if config.streaming:
        return _streamed_batches(config, tokenizer, split, epochs, stream, reader)
    training, evaluation = load_splits(config.source, config.held_out, reader)
    documents = training if split == "train" else evaluation
    if not documents:
        every = training + evaluation
        raise DataError(_empty_split_message(config, split, every))
    if stream is not None:
        if len(documents) < config.streams:
            raise DataError(
                f"data.streams={config.streams} is above the {len(documents)} "
                f"documents of {config.source!r}; lower it or add documents"
            )
        documents = documents[stream :: config.streams]
        config = _of_one_stream(config)
    numbered = list(_pieces(documents, tokenizer, config.sequence_length))
    pieces, sources = (
        [piece for _, piece in numbered],
        [source for source, _ in numbered],
    )
    batches = packed_batches(pieces, config, epochs, sources)
    if stream is None:
        tokens = sum(int((piece["labels"] >= 0).sum()) for piece in pieces)
        batches.counted = len(documents), tokens
    return batches


def packed_batches(
    pieces: Sequence[dict[str, np.ndarray]],
    config: DataConfig,
    epochs: int | None,
    sources: Sequence[int],
    salt: bytes = b"",
) -> BatchIterator:
    """Shuffle pieces of documents each epoch, and pack them into rows.

    With `config.shuffle=False` they keep their order, in the rows as well. Endless
    epochs (None) heed `config.weights` of the pieces' sources. The fingerprint covers
    `salt`, which identifies further data of the pieces.
    """

    def shuffled(numbers: np.ndarray) -> Callable[[int], grain.IterDataset]:
        own = [pieces[number] for number in numbers]

        def of_epoch(epoch: int) -> grain.IterDataset:
            whole = grain.MapDataset.source(own)
            if config.shuffle:
                whole = whole.shuffle(seed=config.seed + epoch)
            return whole.to_iter_dataset(IN_THIS_THREAD)

        return of_epoch

    rows = packed.rows_by_source(sources, shuffled, config, epochs)
    fingerprint = packed.fingerprint(pieces, config, salt)
    return BatchIterator(rows, config.batch_size, fingerprint)


def _of_one_stream(config: DataConfig) -> DataConfig:
    each = config.batch_size // config.streams
    return dataclasses.replace(config, batch_size=each, streams=1)


def _streamed_batches(
    config: DataConfig,
    tokenizer: tokenizers.Tokenizer,
    split: str,
    epochs: int | None,
    stream: int | None,
    reader: RecordReader | None,
) -> BatchIterator:
    """Batches of streamed files: memory holds a block, a window and the open rows."""
    blocks, numbers = block_files.opened_split(config, split, stream)
    if stream is not None:
        config = _of_one_stream(config)
    reads, length = reader or RecordReader(), config.sequence_length

    def read(number: int) -> list[dict[str, np.ndarray]]:
        documents = [reads.document(record) for record in blocks.records(number)]
        return [piece for _, piece in _pieces(documents, tokenizer, length)]

    rows = block_files.packed_rows(numbers, blocks, read, config, epochs)
    salt = tokenizer.to_str().encode()
    files = blocks.fingerprints()
    fingerprint = streamed_fingerprint(files, config, [split, stream], salt)
    return BatchIterator(rows, config.batch_size, fingerprint, files=files)


def streamed_fingerprint(
    files: Mapping[str, str],
    config: DataConfig,
    chosen: Sequence[Any],
    salt: bytes = b"",
) -> str:
    """Identify the content and the order of streamed batches by digests of files."""
    layout = [config.fixed(), *chosen, block_files.BLOCK_BYTES, packed.ROWS_OPEN]
    fingerprint = hashlib.sha256(json.dumps([*layout, *files.values()]).encode())
    fingerprint.update(salt)
    return fingerprint.hexdigest()[:24]


def _empty_split_message(
    config: DataConfig, split: str, documents: Sequence[Document]
) -> str:
    """The message that a split is empty, with its reason and remedy."""
    held_out, count = config.held_out, len(documents)
    distinct = len(set(map(digest, documents)))
    if distinct == 1:
        return (
            f"data.held_out={held_out}: {config.source!r} is one document, which "
            "jaxmem does not divide; set data.held_out=0, or name a .jsonl file of "
            "several documents, one a line"
        )
    return (
        f"data.held_out={held_out} of the {count} documents of {config.source!r} "
        f"({distinct} distinct) leaves no document for {split}; change it or add "
        "documents"
    )


def _pieces(
    documents: Sequence[Document], tokenizer: tokenizers.Tokenizer, length: int
) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """Yield (source, piece) of documents: one that exceeds a row is cut into pieces."""
    for start in range(0, len(documents), _DOCUMENTS_AT_ONCE):
        part = documents[start : start + _DOCUMENTS_AT_ONCE]
        encoded = encode_documents(part, tokenizer)
        for document, (tokens, labels) in zip(part, encoded, strict=True):
            for cut in range(0, len(tokens), length):
                span = slice(cut, cut + length)
                yield document.source, {"tokens": tokens[span], "labels": labels[span]}
