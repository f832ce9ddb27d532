"""Text to batches: documents, a byte-level vocabulary, packed rows that can resume.

    documents -> token ids -> pieces of <= T tokens -> shuffled, packed rows -> [B, T]

Only a document longer than a row is cut, and its pieces are all kept: one epoch holds
every token of every document exactly once.  Labels are shifted inside the document
before the cut, so the last token of a piece still predicts the first of the next.
"""

import dataclasses
import functools
import hashlib
import json
import os
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import grain
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxmem.core.fields import check_field
from jaxmem.data.vocabulary import SMALLEST, SPECIAL_TOKENS, edges

NO_LABEL = -1

# Rows that first-fit packing fills at a time: more rows waste fewer tokens on padding
# (0.8% of the standard library's text at 512 tokens a row) and delay the first batch.
_ROWS_OPEN = 256
# Documents tokenised at a time: enough to use every core, few enough that the
# library's verbose encodings (about 100 bytes a token) never exist all together.
_DOCUMENTS_AT_ONCE = 64


class DataError(ValueError):
    """The text that the configuration names cannot be used; the message says why."""


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What to read, how to cut it into tokens, and how to lay tokens out in rows."""

    source: str = "stdlib"  # "stdlib" (Python's own sources), or a .txt or .jsonl path
    vocab_size: int = 8192  # entries of the byte-level BPE vocabulary, with specials
    sequence_length: int = 256  # tokens in a row (T)
    batch_size: int = 8  # rows in a micro-batch (B)
    held_out: float = 0.0  # fraction of the documents kept from training, in [0, 1)
    seed: int = 0  # order of the documents; every epoch has an order of its own
    cache_dir: str = "~/.cache/jaxmem"  # directory that keeps trained vocabularies
    streams: int = 1  # parts of the documents, each a part of every batch's rows

    def __post_init__(self):
        for name in ("sequence_length", "batch_size"):
            check_field(self, name, getattr(self, name) >= 1, "at least 1")
        if self.streams < 1 or self.batch_size % self.streams:
            raise ValueError(
                "DataConfig.streams must divide batch_size, got "
                f"streams={self.streams} for batch_size={self.batch_size}"
            )
        if self.vocab_size < SMALLEST:
            raise ValueError(
                f"DataConfig.vocab_size must be at least {SMALLEST} (every "
                f"byte and {', '.join(SPECIAL_TOKENS)}), got {self.vocab_size}"
            )
        check_field(self, "held_out", 0 <= self.held_out < 1, "in [0, 1)")
        check_field(self, "seed", 0 <= self.seed < 2**31, "in [0, 2**31)")


class Document(NamedTuple):
    """One text; the loss counts `text`, never `prompt`."""

    name: str
    text: str
    prompt: str = ""


class Batch(NamedTuple):
    """Packed rows: int32 arrays, all `[B, T]`."""

    tokens: np.ndarray  # input ids
    labels: np.ndarray  # the token that follows; -1 where no loss is wanted
    segment_ids: np.ndarray  # 1, 2, ... per document in the row; 0 is padding
    positions: np.ndarray  # position within the segment, from 0


# ---------------------------------------------------------------- documents


def load_documents(source: str, argument: str = "data.source") -> list[Document]:
    """Read every document of `source`, in an order that is the same on every run.

    Args:
      source: `"stdlib"`, or the path of a `.txt` file (one document) or of a `.jsonl`
        file (one document a line: `{"text"}` or `{"prompt", "response"}`).
      argument: what an error calls the source.

    Returns:
      The documents, at least one.

    Raises:
      DataError: unknown source, missing file, malformed line (named by its number).
    """
    if source == "stdlib":
        return _stdlib_documents()
    path = Path(source).expanduser()
    if path.suffix not in (".txt", ".jsonl"):
        raise DataError(
            f'{argument} must be "stdlib" or the path of a .txt or .jsonl file, '
            f"got {source!r}"
        )
    if path.suffix == ".jsonl":
        documents = _jsonl_documents(path, argument)
    else:
        documents = [Document(path.name, _read_text(path, argument))]
    if not any(document.text for document in documents):
        raise DataError(f"{argument}: {path} holds no text")
    return documents


def split_documents(
    documents: Sequence[Document], held_out: float
) -> tuple[list[Document], list[Document]]:
    """Split into (training, evaluation) by content, whatever the documents' order.

    Equal documents are on one side: where the cut would part them, they are trained on.
    """
    digests = [_digest(document) for document in documents]
    first_trained = sorted(digests)[int(len(documents) * held_out)]
    training, evaluation = [], []
    for document, digest in zip(documents, digests, strict=True):
        (evaluation if digest < first_trained else training).append(document)
    return training, evaluation


def _stdlib_documents() -> list[Document]:
    """Top-level modules as they are, and the topics behind Python's `help()`."""
    from pydoc_data.topics import topics

    directory = Path(sysconfig.get_path("stdlib"))
    modules = [Document(p.name, _read_text(p)) for p in sorted(directory.glob("*.py"))]
    if not modules:
        raise DataError(
            f'data.source "stdlib": no Python sources in {directory}; name a .txt or '
            ".jsonl file instead"
        )
    return modules + [Document(f"help({t})", topics[t]) for t in sorted(topics)]


def _read_text(path: Path, argument: str = "data.source") -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"{argument}: cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{argument}: {path} is not UTF-8 text (byte {error.start})"
        ) from error


def _jsonl_documents(path: Path, argument: str) -> list[Document]:
    # Not str.splitlines, which would also cut at U+2028 inside a JSON string.
    lines = enumerate(_read_text(path, argument).split("\n"), start=1)
    return [_jsonl_document(f"{path}:{i}", line) for i, line in lines if line.strip()]


def _jsonl_document(where: str, line: str) -> Document:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where}: not valid JSON: {error.msg} (column {error.colno})"
        ) from error
    if not isinstance(record, dict):
        raise DataError(f"{where}: expected a JSON object, got {line.strip()[:60]}")
    keys = record.keys() & {"text", "prompt", "response"}
    if keys == {"text"}:
        return Document(where, _string(record, "text", where))
    if keys == {"prompt", "response"}:
        response = _string(record, "response", where)
        return Document(where, response, prompt=_string(record, "prompt", where))
    raise DataError(
        f'{where}: expected "text" alone, or "prompt" and "response"; got the keys '
        f"{', '.join(map(repr, sorted(record))) or '(none)'}"
    )


def _string(record: dict[str, Any], key: str, where: str) -> str:
    value = record[key]
    if not isinstance(value, str):
        raise DataError(f'{where}: "{key}" must be a string, got {value!r}')
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(f'{where}: "{key}" holds half of a surrogate pair') from error
    return value


def _digest(document: Document) -> bytes:
    """Identify the content; the name may hold a path, which may change."""
    content = json.dumps([document.prompt, document.text])
    return hashlib.sha256(content.encode()).digest()


# --------------------------------------------------------------- vocabulary


def load_tokenizer(
    config: DataConfig, cache_dir: str | os.PathLike[str] | None = None
) -> tokenizers.Tokenizer:
    """Return the vocabulary of the training documents, trained at the first call.

    The cache is keyed by the content that the vocabulary depends on, and written in
    one step: runs that start together agree and never read half a file.

    Args:
      config: names the text and the size of the vocabulary.
      cache_dir: where vocabularies are kept; `config.cache_dir` unless given.

    Returns:
      A byte-level BPE tokenizer: `decode(encode(text).ids)` is `text`, whatever it is.

    Raises:
      DataError: the text is unusable or too small for `config.vocab_size` entries.
    """
    documents, _ = split_documents(load_documents(config.source), config.held_out)
    directory = Path(config.cache_dir if cache_dir is None else cache_dir).expanduser()
    path = directory / f"vocabulary-{_vocabulary_key(config, documents)}.json"
    if not path.exists():
        _write_in_one_step(path, _train_vocabulary(config, documents).to_str())
    return _read_vocabulary(path)


def _vocabulary_key(config: DataConfig, documents: Iterable[Document]) -> str:
    # Another version of the library may merge differently.
    recipe = [tokenizers.__version__, config.vocab_size, SPECIAL_TOKENS]
    key = hashlib.sha256(json.dumps(recipe).encode())
    for document in documents:
        key.update(_digest(document))
    return key.hexdigest()[:24]


def _train_vocabulary(
    config: DataConfig, documents: Iterable[Document]
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
        raise DataError(
            f"data.vocab_size={config.vocab_size}: the text of {config.source!r} has "
            f"only enough for {size} entries; set data.vocab_size={size} or name more "
            "text"
        )
    return tokenizer


def _read_vocabulary(path: Path) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise DataError(
            f"cannot read the cached vocabulary {path} ({error}); delete the file and "
            "run again"
        ) from error
    # "<eos>" written in a document is text, not the end of the document.
    tokenizer.encode_special_tokens = True
    return tokenizer


def _write_in_one_step(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, unfinished = tempfile.mkstemp(dir=path.parent, prefix=".unfinished-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(content)
        os.replace(unfinished, path)
    except BaseException:
        os.unlink(unfinished)
        raise


# ------------------------------------------------------------------ batches


class BatchIterator(Iterator[Batch]):
    """A grain iterator of `Batch` whose state is plain JSON.

    The state carries a fingerprint of the tokens and of the settings that order them:
    a run never continues in the middle of other data.
    """

    def __init__(self, iterator: grain.DatasetIterator, fingerprint: str):
        self._iterator = iterator
        self._fingerprint = fingerprint

    def __next__(self) -> Batch:
        return next(self._iterator)

    def get_state(self) -> dict[str, Any]:
        """Return the position after the last batch, as JSON-able values."""
        return {
            "fingerprint": self._fingerprint,
            "position": self._iterator.get_state(),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from a position that `get_state` returned, in any process.

        Args:
          state: what `get_state` returned, or the same after a JSON round trip.

        Raises:
          DataError: the state belongs to other data or to other settings.
        """
        if state["fingerprint"] != self._fingerprint:
            raise DataError(
                "the saved position belongs to other data: the text of data.source "
                "(Python's own sources change with its version), its vocabulary, or a "
                "data.* setting is not what it was; restore it, or start a new run"
            )
        self._iterator.set_state(state["position"])


def batches(
    config: DataConfig,
    tokenizer: tokenizers.Tokenizer,
    *,
    split: Literal["train", "evaluation"] = "train",
    epochs: int | None = None,
    stream: int | None = None,
) -> BatchIterator:
    """Return packed batches, reshuffled each epoch; the same on every run.

    Args:
      config: what to read and how to lay it out.
      tokenizer: the vocabulary, from `load_tokenizer`.
      split: `"train"`, or `"evaluation"` for the documents held out.
      epochs: passes over the documents; `None` never ends.
      stream: every `config.streams`-th document, and its part of the rows; None: all.

    Returns:
      A `BatchIterator`.  If it ends, its last batch is filled up with padding.

    Raises:
      DataError: the text is unusable, or the split is empty.
    """
    if split not in ("train", "evaluation"):
        raise ValueError(f'split must be "train" or "evaluation", got {split!r}')
    every = load_documents(config.source)
    training, evaluation = split_documents(every, config.held_out)
    documents = training if split == "train" else evaluation
    if not documents:
        raise DataError(
            f"data.held_out={config.held_out} of the {len(every)} documents of "
            f"{config.source!r} leaves none for {split}; raise it or add documents"
        )
    if stream is not None:
        if len(documents) < config.streams:
            raise DataError(
                f"data.streams={config.streams} share {len(documents)} documents of "
                f"{config.source!r}; lower it or add documents"
            )
        documents, each = documents[stream :: config.streams], config.batch_size
        config = dataclasses.replace(
            config, batch_size=each // config.streams, streams=1
        )
    pieces = list(_pieces(documents, tokenizer, config.sequence_length))
    iterator = iter(_packed(pieces, config, epochs))
    return BatchIterator(iterator, _fingerprint(pieces, config))


def _pieces(
    documents: Sequence[Document], tokenizer: tokenizers.Tokenizer, length: int
) -> Iterator[dict[str, np.ndarray]]:
    """Yield each document, whole if it fits in a row, else in rows and a rest."""
    for start in range(0, len(documents), _DOCUMENTS_AT_ONCE):
        for tokens, labels in _encode(
            documents[start : start + _DOCUMENTS_AT_ONCE], tokenizer
        ):
            for cut in range(0, len(tokens), length):
                piece = slice(cut, cut + length)
                yield {"tokens": tokens[piece], "labels": labels[piece]}


def _encode(
    documents: Sequence[Document], tokenizer: tokenizers.Tokenizer
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield `<bos> prompt text <eos>` and, for each token, the next one or -1."""
    start, end = edges(tokenizer)
    encode = functools.partial(tokenizer.encode_batch_fast, add_special_tokens=False)
    # Apart, so that no token straddles the end of the prompt.
    prompts = encode([d.prompt for d in documents])
    texts = encode([d.text for d in documents])
    for prompt, text in zip(prompts, texts, strict=True):
        tokens = np.array([*start, *prompt.ids, *text.ids, *end], np.int32)
        labels = np.append(tokens[1:], np.int32(NO_LABEL))
        labels[: max(len(start) + len(prompt.ids) - 1, 0)] = NO_LABEL
        yield tokens, labels


def _packed(
    pieces: Sequence[dict[str, np.ndarray]], config: DataConfig, epochs: int | None
) -> grain.IterDataset:
    shuffled = grain.MapDataset.source(pieces).shuffle(seed=config.seed).repeat(epochs)
    # The tokens are in memory: threads would only contend for the interpreter's lock.
    in_memory = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    rows = grain.experimental.FirstFitPackIterDataset(
        shuffled.to_iter_dataset(in_memory),
        length_struct=dict.fromkeys(("tokens", "labels"), config.sequence_length),
        num_packing_bins=_ROWS_OPEN,
        seed=config.seed,
        meta_features=("labels",),
    )
    fill_up = functools.partial(
        grain.experimental.batch_and_pad, batch_size=config.batch_size
    )
    return rows.batch(config.batch_size, batch_fn=fill_up).map(_to_batch)


def _to_batch(packed: dict[str, np.ndarray]) -> Batch:
    segment_ids = packed["tokens_segment_ids"]
    return Batch(
        tokens=packed["tokens"],  # padded with 0, which is <pad>
        labels=np.where(segment_ids > 0, packed["labels"], np.int32(NO_LABEL)),
        segment_ids=segment_ids,
        positions=packed["tokens_positions"],
    )


def _fingerprint(pieces: Iterable[dict[str, np.ndarray]], config: DataConfig) -> str:
    layout = [config.sequence_length, config.batch_size, config.seed, _ROWS_OPEN]
    fingerprint = hashlib.sha256(json.dumps(layout).encode())
    for piece in pieces:
        fingerprint.update(piece["tokens"].tobytes())
        fingerprint.update(piece["labels"].tobytes())
    return fingerprint.hexdigest()[:24]
