"""Rows of tokens that both sides of a benchmark of whole steps train on.

full    one document of random ids fills each row; every step has the same rows
chat    documents as long as the conversations of `chat_lengths.txt`, of random ids,
        packed into rows as `jaxmem.data` packs text; every step has the next rows
"""

import itertools
import pathlib
from collections.abc import Sequence

import numpy as np

from benchmarks.run_long_step import batch_of
from jaxmem.data import documents
from jaxmem.data.documents import NO_LABEL, Batch

LENGTHS = pathlib.Path(__file__).parent / "chat_lengths.txt"


def batches(config, lengths: str) -> list[Batch]:
    """A batch [1, B, T] for each step of the run; lengths is "full" or "chat"."""
    vocabulary, steps = config.model.vocab_size, config.run.steps
    if lengths == "full":
        return [batch_of(config, vocabulary)] * steps
    pieces = chat_pieces(vocabulary, config.data.sequence_length)
    packed = documents.packed_batches(pieces, config.data, None, [0] * len(pieces))
    return [
        Batch(*(each[None] for each in batch))
        for batch in itertools.islice(packed, steps)
    ]


def chat_lengths() -> list[int]:
    """Tokens of each conversation, in the order of the file."""
    lines = LENGTHS.read_text("utf-8").splitlines()
    return [int(line) for line in lines if not line.startswith("#")]


def chat_pieces(vocabulary: int, length: int) -> list[dict[str, np.ndarray]]:
    """Conversations of random ids; one that is longer than a row is cut into pieces."""
    rng, pieces = np.random.default_rng(0), []
    for size in chat_lengths():
        tokens = rng.integers(0, vocabulary, size, dtype=np.int32)
        labels = np.append(tokens[1:], np.int32(NO_LABEL))
        for cut in range(0, size, length):
            span = slice(cut, cut + length)
            pieces.append({"tokens": tokens[span], "labels": labels[span]})
    return pieces


def columns(taken: Sequence[Batch], ends: Sequence[float]) -> dict[str, float]:
    """Columns: rows of a step, share of padding, seconds, predicted tokens/s.

    Args:
        taken: the batch of each step.
        ends: when each step ended, in seconds; the first two steps warm up.
    """
    seconds = np.diff(ends)[1:]
    predicted = np.mean([np.sum(batch.labels >= 0) for batch in taken[2:]])
    median = float(np.median(seconds))
    return {
        "rows": taken[0].tokens.shape[-2],
        "padding": round(float(np.mean([*map(_padding, taken[2:])])), 4),
        "seconds": round(median, 4),
        "spread": round(float(np.ptp(seconds)) / median, 4),  # of the steps' seconds
        "tokens_per_second": round(float(predicted) / median),
    }


def _padding(batch):
    return 0.0 if batch.segment_ids is None else np.mean(batch.segment_ids == 0)
