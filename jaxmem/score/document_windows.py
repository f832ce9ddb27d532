"""Splits documents into windows, so that each token is scored exactly once."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmem import packing
from jaxmem.checkpoints import Vocabulary
from jaxmem.data.documents import Document
from jaxmem.data.encoding import NO_LABEL, encode_ids, encode_rendered
from jaxmem.data.vocabulary import ends_turn, has_start

_NAMED = 5  # documents that an error message lists


class EncodedDocument(NamedTuple):
    """A document as ids."""

    name: str
    ids: np.ndarray  # int32: the tokenizer's start ids, prompt, text
    first: int  # index of the first id that is scored


class DocumentWindow(NamedTuple):
    """A part of a document, as the input of the decoder."""

    document: int  # index of the document
    tokens: np.ndarray  # int32 inputs
    labels: np.ndarray  # the next ids; -1 if not scored in this window


class TooLong(ValueError):
    """Documents do not fit in a micro-batch, and no stride is given."""


def encode(
    documents: Sequence[Document],
    vocabulary: Vocabulary,
    eos: bool,
    everything: bool = False,
) -> list[list[EncodedDocument]]:
    """Ids of each document: start, prompt, text and optionally the end of sequence.

    Without anything before it, a text is scored from its second token on. Of a rendered
    conversation each turn that the loss would count is a document of its own, and what
    is before the turn is its prompt; with `everything`, it is one document without one.
    """
    # Encode both separately, so that no token spans the end of the prompt.
    prompts = vocabulary.encode([d.prompt for d in documents])
    texts = vocabulary.encode([d.text for d in documents])
    encoded = []
    for document, prompt, text in zip(documents, prompts, texts, strict=True):
        if document.counted is not None:
            encoded.append(_split_turns(document, vocabulary, everything))
            continue
        start = [] if has_start(prompt or text, vocabulary.start) else vocabulary.start
        before = [*start, *prompt]
        ended = not eos or ends_turn(document.text, text, vocabulary.tokenizer)
        ids = np.array([*before, *text, *([] if ended else [vocabulary.eos])], np.int32)
        encoded.append([EncodedDocument(document.name, ids, max(len(before), 1))])
    return encoded


def _split_turns(
    document: Document, vocabulary: Vocabulary, everything: bool
) -> list[EncodedDocument]:
    """A document for each run of counted tokens, with all that precedes the run."""
    encoding = encode_rendered if document.ids is None else encode_ids
    tokens, labels = encoding(document, vocabulary.tokenizer)
    if everything:
        return [EncodedDocument(document.name, tokens, 1)]
    counted = np.append(False, labels[:-1] != NO_LABEL)
    edges = np.flatnonzero(np.diff(counted.astype(np.int8), prepend=0, append=0))
    runs = list(zip(edges[::2], edges[1::2], strict=True))
    names = [document.name] if len(runs) == 1 else [
        f"{document.name}, turn {i}" for i in range(1, len(runs) + 1)
    ]  # fmt: skip
    return [
        EncodedDocument(name, tokens[:stop], int(first))
        for name, (first, stop) in zip(names, runs, strict=True)
    ]


def check_lengths(tokens: Sequence[EncodedDocument], length: int, most: int) -> None:
    """Raise `TooLong`, which names the documents longer than a window, if any."""
    long = [(t.name, len(t.ids) - 1) for t in tokens if len(t.ids) - 1 > length]
    if not long:
        return
    named = ", ".join(f"{name} ({size:,} tokens)" for name, size in long[:_NAMED])
    more = f" and {len(long) - _NAMED} more" if len(long) > _NAMED else ""
    limit, advice = "--max-tokens", f"raise --max-tokens, to {most:,} at most, or "
    if length == most:
        limit, advice = "the model's longest input", ""
    raise TooLong(
        f"{len(long)} of {len(tokens)} documents are longer than {limit}, "
        f"{length:,} tokens: {named}{more}; {advice}score them in windows with --stride"
    )


def cut(
    document: int, tokens: EncodedDocument, length: int, stride: int | None
) -> list[DocumentWindow]:
    """Split a document into windows that overlap by length - stride.

    Each later window scores only the tokens that no earlier one has scored; one that
    would score nothing is left out. Without a stride one suffices.
    """
    inputs, labels = tokens.ids[:-1], tokens.ids[1:].copy()
    labels[: tokens.first - 1] = NO_LABEL
    windows, start, done = [], 0, 0
    while done < len(inputs):
        span = slice(start, start + length)
        unscored = labels[span].copy()
        unscored[: done - start] = NO_LABEL
        if np.any(unscored != NO_LABEL):
            windows.append(DocumentWindow(document, inputs[span], unscored))
        done = min(start + length, len(inputs))
        start += stride or length
    return windows


def by_micro_batch(
    run: Callable[..., Mapping[str, Any]],
    inputs: Sequence[np.ndarray],
    labels: Sequence[np.ndarray],
    max_tokens: int,
    length: int,
) -> list[dict[str, np.ndarray]]:
    """Run a function on packed micro-batches, and unpack its results by sequence.

    Args:
        run: (number of the micro-batch, tokens, labels, segment_ids, positions) ->
            arrays [B, T, ...] by name.
        inputs: ids of each sequence, at most `length`.
        labels: the ids that follow.
        max_tokens: slots of a micro-batch.
        length: of the longest sequence.

    Returns:
        For each sequence its arrays [tokens, ...] by name.
    """
    if not inputs:
        return []
    # Narrow rows cost less attention; at most three shapes are compiled.
    widths = packing.buckets(length) if length >= 64 else (length,)
    packed = packing.pack([*map(len, inputs)], max_tokens, row_lengths=widths)
    placed = packed.place(inputs), packed.place(labels, fill=NO_LABEL)
    results: list[Any] = []
    for batch, *ids in zip(packed.micro_batches, *placed, strict=True):
        operands = *ids, batch.segment_ids, batch.positions
        results.append(jax.device_get(run(len(results), *operands)))
    by_name = {name: packed.unpack([x[name] for x in results]) for name in results[0]}
    rows = zip(*by_name.values(), strict=True)
    return [dict(zip(by_name, values, strict=True)) for values in rows]
