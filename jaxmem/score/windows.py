"""Documents to the pieces that a model reads, each token of them scored once."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxmem.checkpoints import Vocabulary
from jaxmem.data.documents import NO_LABEL, Document

_NAMED = 5  # documents in an error message


class Tokens(NamedTuple):
    """A document as ids."""

    name: str
    ids: np.ndarray  # int32: what the tokenizer starts with, prompt, text
    first: int  # index of the first id that is scored


class Window(NamedTuple):
    """A piece of a document, as the decoder gets it."""

    document: int  # index among all
    tokens: np.ndarray  # int32 inputs
    labels: np.ndarray  # the ids that follow; -1 where not scored, here or at all


class TooLong(ValueError):
    """Documents do not fit in a micro-batch, and are not to be cut."""


def encode(
    documents: Sequence[Document], vocabulary: Vocabulary, eos: bool
) -> list[Tokens]:
    """Ids of documents: start, prompt, text and, if wanted, the end of sequence.

    A text is scored from its second token on where nothing comes before it.

    Args:
      documents: texts, and prompts that are read but not scored.
      vocabulary: of the checkpoint.
      eos: whether the end of sequence is scored too.
    """
    # Apart, so that no token straddles the end of the prompt.
    prompts = vocabulary.encode([d.prompt for d in documents])
    texts = vocabulary.encode([d.text for d in documents])
    ends = [vocabulary.eos] if eos else []
    made = []
    for document, prompt, text in zip(documents, prompts, texts, strict=True):
        before = [*vocabulary.start, *prompt]
        ids = np.array([*before, *text, *ends], np.int32)
        made.append(Tokens(document.name, ids, max(len(before), 1)))
    return made


def check_lengths(tokens: Sequence[Tokens], length: int) -> None:
    """Refuse documents that are longer than a window, by name."""
    long = [(t.name, len(t.ids) - 1) for t in tokens if len(t.ids) - 1 > length]
    if not long:
        return
    named = ", ".join(f"{name} ({size:,} tokens)" for name, size in long[:_NAMED])
    more = f" and {len(long) - _NAMED} more" if len(long) > _NAMED else ""
    raise TooLong(
        f"{len(long)} of {len(tokens)} documents are longer than the {length:,} tokens "
        f"of a micro-batch: {named}{more}; raise --max-tokens (at most what the model "
        "was made for), or score them in windows with --stride"
    )


def cut(document: int, tokens: Tokens, length: int, stride: int | None) -> list[Window]:
    """Windows that overlap by length - stride; the later ones score what is new.

    Args:
      document: index of the document.
      tokens: of it.
      length: inputs of a window.
      stride: between the starts of two windows; None where one is enough.
    """
    inputs, labels = tokens.ids[:-1], tokens.ids[1:].copy()
    labels[: tokens.first - 1] = NO_LABEL
    windows, start, done = [], 0, 0
    while done < len(inputs):
        here = slice(start, start + length)
        mine = labels[here].copy()
        mine[: done - start] = NO_LABEL
        if np.any(mine != NO_LABEL):
            windows.append(Window(document, inputs[here], mine))
        done = min(start + length, len(inputs))
        start += stride or length
    return windows
