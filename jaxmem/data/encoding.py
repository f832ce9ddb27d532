"""Documents to tokens and labels: the next token, or -1 where the loss counts none."""

import contextlib
import functools
from collections.abc import Iterator, Sequence

import numpy as np
import tokenizers

from jaxmem.base import messages
from jaxmem.data.forms import Document
from jaxmem.data.records import DataError
from jaxmem.data.vocabulary import edges, ends_turn, has_start

NO_LABEL = -1


def encode_documents(
    documents: Sequence[Document], tokenizer: tokenizers.Tokenizer
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the tokens `<bos> prompt text <eos>` and the labels of each document.

    A text that a chat template rendered gets no `<bos>` and `<eos>`, nor does one that
    has them already.
    """
    start, end = edges(tokenizer)
    encode = functools.partial(tokenizer.encode_batch_fast, add_special_tokens=False)
    # Encode both separately, so that no token spans the end of the prompt.
    with _failures(documents):
        prompts = encode([d.prompt for d in documents])
        texts = encode([d.text for d in documents])
    for document, prompt, text in zip(documents, prompts, texts, strict=True):
        if document.ids is not None:
            yield encode_ids(document, tokenizer)
            continue
        if document.counted is not None:
            yield encode_rendered(document, tokenizer)
            continue
        before = prompt.ids if has_start(prompt.ids or text.ids, start) else [
            *start, *prompt.ids]  # fmt: skip
        after = [] if ends_turn(document.text, text.ids, tokenizer) else end
        tokens = np.array([*before, *text.ids, *after], np.int32)
        labels = np.append(tokens[1:], np.int32(NO_LABEL))
        labels[: max(len(before) - 1, 0)] = NO_LABEL
        yield tokens, labels


@contextlib.contextmanager
def _failures(documents: Sequence[Document]) -> Iterator[None]:
    """A context in which an error of the tokenizer names the texts' first record.

    Rust's panics, as of a pattern that has no end, are no `Exception`.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and "Panic" not in type(error).__name__:
            raise
        raise DataError(
            f"tokenizer.json of model.checkpoint fails at {documents[0].name}, or at a "
            f"record soon after it: {messages.reason(error)}"
        ) from error


def encode_ids(
    document: Document, tokenizer: tokenizers.Tokenizer
) -> tuple[np.ndarray, np.ndarray]:
    """The tokens and labels of a record of tokens.

    Raises:
        DataError: an id is outside the tokenizer's vocabulary.
    """
    tokens, labels = (np.array(x, np.int64) for x in (document.ids, document.labels))
    size = tokenizer.get_vocab_size()
    if tokens.min() < 0 or tokens.max() >= size:
        wrong = tokens[(tokens < 0) | (tokens >= size)][0]
        raise DataError(
            f"{document.name}: input_ids has {wrong}, but the vocabulary of "
            "model.checkpoint (without a checkpoint, of data.vocab_size) has only "
            f"{size} entries; set model.checkpoint to the model whose tokenizer wrote "
            "the ids"
        )
    return tokens.astype(np.int32), labels.astype(np.int32)


def encode_rendered(
    document: Document, tokenizer: tokenizers.Tokenizer
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of a rendered conversation; labels where they overlap a counted span."""
    with _failures([document]):
        encoded = tokenizer.encode(document.text, add_special_tokens=False)
    offsets = np.array(encoded.offsets, np.int64).reshape(-1, 2)
    counted = np.zeros(len(offsets), bool)
    for first, last in document.counted or ():
        counted |= (offsets[:, 1] > first) & (offsets[:, 0] < last)
    tokens = np.array(encoded.ids, np.int32)
    labels = np.where(counted, tokens, np.int32(NO_LABEL))
    return tokens, np.append(labels[1:], np.int32(NO_LABEL))
