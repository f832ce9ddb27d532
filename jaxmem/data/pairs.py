"""Pairs of answers, a chosen and a rejected one per prompt, as padded rows."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers

from jaxmem.data import mixing
from jaxmem.data.documents import NO_LABEL, DataConfig, encode_documents
from jaxmem.data.record_reader import RecordReader
from jaxmem.data.records import DataError, held, read_records
from jaxmem.data.source_files import held_out_files, numbered_files
from jaxmem.data.texts import split_all
from jaxmem.head.maths.random_streams import Stream


class Pair(NamedTuple):
    """Tokens and labels of two sequences; a label is the next token, or -1."""

    where: str
    chosen: tuple[np.ndarray, np.ndarray]
    rejected: tuple[np.ndarray, np.ndarray]
    source: int = 0  # number of its entry in `data.source`

    @property
    def length(self) -> int:
        """Tokens of the longer one."""
        return max(len(self.chosen[0]), len(self.rejected[0]))


class PairBatch(NamedTuple):
    """Rows [2 B, T]: chosen and rejected alternate, one sequence per row."""

    tokens: Any  # input ids
    labels: Any  # the next token; -1 where masked
    segment_ids: Any  # 1; 0 is padding
    positions: Any
    # ln p of the whole sequence under the reference, in the first column of its row
    reference: Any


def load_pairs(
    config: DataConfig,
    tokenizer: tokenizers.Tokenizer,
    reader: RecordReader | None = None,
    drop_long: bool = False,
) -> tuple[list[Pair], list[Pair]]:
    """Read pairs, and return (training pairs, held-out pairs).

    A record has `chosen` and `rejected`, with or without `prompt`: strings, or lists of
    messages. The common start of both lists is the prompt.

    Raises:
        DataError: a record is malformed, or a pair is too long.
    """
    reader = reader or RecordReader(None, config.columns, config.ignored)
    held_out = held_out_files(config.source, "data.source")
    with reader.whole_pass():
        pairs, evaluation = (
            list(_read_pairs(paths, reader, tokenizer))
            for paths in (numbered_files(config.source, "data.source"), held_out)
        )
    fitting = _fitting(config, pairs, reader, drop_long)
    if held_out:
        return fitting, _fitting(config, evaluation, reader, drop_long)
    keys = [_digest(pair) for pair in fitting]
    return split_all(fitting, keys, config.held_out, "data.held_out", "pairs")


def _read_pairs(
    paths: Sequence[tuple[int, Path]],
    reader: RecordReader,
    tokenizer: tokenizers.Tokenizer,
) -> Iterator[Pair]:
    for number, path in paths:
        with held(path, "data.source"):
            for record in read_records(path, "data.source"):
                chosen, rejected = encode_documents(reader.answers(record), tokenizer)
                yield Pair(record.where, chosen, rejected, number)


def _fitting(
    config: DataConfig, pairs: list[Pair], reader: RecordReader, drop_long: bool
) -> list[Pair]:
    """The pairs that fit in rows; others are noted, or an error without `drop_long`."""
    fitting = [pair for pair in pairs if pair.length <= config.sequence_length]
    if not fitting or (len(fitting) < len(pairs) and not drop_long):
        raise DataError(_unfit(config, pairs))
    for pair in pairs:
        if pair.length > config.sequence_length:
            reader.notes.add("pairs longer than a row are left out", pair.where)
    return fitting


def _unfit(config: DataConfig, pairs: Sequence[Pair]) -> str:
    if not pairs:
        return f"data.source: {config.source!r} contains no pair"
    longest = max(pairs, key=lambda pair: pair.length)
    count = sum(pair.length > config.sequence_length for pair in pairs)
    return (
        f"{longest.where}: the pair has {longest.length} tokens, and {count} of "
        f"{len(pairs)} pairs are longer than data.sequence_length="
        f"{config.sequence_length}; raise it, or set dpo.drop_long=True"
    )


def _digest(pair: Pair) -> bytes:
    digest = hashlib.sha256()
    for tokens, labels in (pair.chosen, pair.rejected):
        digest.update(len(tokens).to_bytes(8, "little"))
        digest.update(tokens.tobytes() + labels.tobytes())
    return digest.digest()


def fingerprint(pairs: Sequence[Pair]) -> str:
    """Identify pairs and their order."""
    digest = hashlib.sha256(b"".join(map(_digest, pairs)))
    return digest.hexdigest()[:24]


def batch_of(
    pairs: Sequence[Pair], reference: np.ndarray, config: DataConfig
) -> PairBatch:
    """The batch of B pairs as padded rows, with their `reference` log-probs [B, 2]."""
    shape = 2 * len(pairs), config.sequence_length
    tokens, segments = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    labels, first = np.full(shape, NO_LABEL, np.int32), np.zeros(shape, np.float32)
    first[:, 0] = reference.reshape(-1)
    rows = [row for pair in pairs for row in (pair.chosen, pair.rejected)]
    for i, (ids, following) in enumerate(rows):
        tokens[i, : len(ids)], labels[i, : len(ids)] = ids, following
        segments[i, : len(ids)] = 1
    positions = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    return PairBatch(tokens, labels, segments, positions * segments, first)


class PairBatches(Iterator[PairBatch]):
    """Endless micro-batches, in the order of `mixing.order`; resumable."""

    def __init__(
        self, pairs: Sequence[Pair], reference: np.ndarray, config: DataConfig
    ):
        self._pairs, self._reference, self._config = pairs, reference, config
        self._fingerprint = fingerprint(pairs)
        self._next = 0  # number of the next pair
        sources = [pair.source for pair in pairs]
        self._order = mixing.order(
            sources, config.weights, config.seed, Stream.PAIRS, config.shuffle
        )

    def __next__(self) -> PairBatch:
        numbers = range(self._next, self._next + self._config.batch_size)
        chosen = [self._order[number] for number in numbers]
        self._next = numbers.stop
        pairs = [self._pairs[i] for i in chosen]
        return batch_of(pairs, self._reference[chosen], self._config)

    def get_state(self) -> dict[str, Any]:
        """Return the position after the last batch, as JSON-able values."""
        return {"next_pair": self._next, "fingerprint": self._fingerprint}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of `get_state`, of the same pairs."""
        if state["fingerprint"] != self._fingerprint:
            raise DataError(
                "the saved position belongs to other pairs than data.source contains "
                "now; restore them, or start a new run"
            )
        self._next = state["next_pair"]
