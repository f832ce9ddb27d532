"""The vocabulary of a run: trained on its text, a task's, or a checkpoint's."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from jaxmem import checkpoints
from jaxmem.data import tasks

PAD, BOS, EOS = SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
# Every byte has an entry, so that any text can be encoded.
SMALLEST = 256 + len(SPECIAL_TOKENS)


def edges(tokenizer: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """Ids that start and end a document.

    A tokenizer trained here has its own ids; a checkpoint's are defined by its
    template, with the end that `of_checkpoint` adds.
    """
    bos, eos = tokenizer.token_to_id(BOS), tokenizer.token_to_id(EOS)
    if tokenizer.post_processor is None and bos is not None and eos is not None:
        return [bos], [eos]
    encoding = _encoded_word(tokenizer)
    text = encoding.special_tokens_mask.index(0)
    after = text + encoding.special_tokens_mask[text:].count(0)
    return encoding.ids[:text], encoding.ids[after:]


def _encoded_word(tokenizer: tokenizers.Tokenizer) -> tokenizers.Encoding:
    """The encoding of a text that has tokens: "a", or a word of the vocabulary.

    Raises:
        CheckpointError: neither has any.
    """
    special = special_tokens(tokenizer)
    words = (word for word in tokenizer.get_vocab() if word not in special)
    for text in ("a", next(words, "a")):
        try:
            encoding = tokenizer.encode(text, add_special_tokens=True)
        except Exception:  # tokenizers raises it for words that a vocabulary lacks
            continue
        if 0 in encoding.special_tokens_mask:
            return encoding
    raise checkpoints.CheckpointError(
        "the tokenizer returns no token for the text 'a', so jaxmem cannot read "
        "its template; its normalizer or model drops letters"
    )


def special_tokens(tokenizer: tokenizers.Tokenizer) -> list[str]:
    """Tokens that stand for no text of their own."""
    added = tokenizer.get_added_tokens_decoder().values()
    return [token.content for token in added if token.special]


def has_start(ids: Sequence[int], start: Sequence[int]) -> bool:
    """True if `ids` begin with `start`, the ids that start every text."""
    return bool(start) and list(ids[: len(start)]) == list(start)


def ends_turn(text: str, ids: Sequence[int], tokenizer: tokenizers.Tokenizer) -> bool:
    """True if a text ends with a special token, with or without spaces after it."""
    special = {id_ for id_, token in tokenizer.get_added_tokens_decoder().items()
               if token.special}  # fmt: skip
    last = next((id_ for id_ in reversed(ids[-4:]) if id_ in special), None)
    if last is None or tokenizer.encode_special_tokens:
        return False
    name = tokenizer.id_to_token(last)
    return name is not None and text.rstrip().endswith(name)


def of_checkpoint(directory: str) -> tokenizers.Tokenizer:
    """A checkpoint's tokenizer, whose template also ends documents.

    Raises:
        CheckpointError: there is none, or no token ends a sequence.
    """
    vocabulary = checkpoints.load_vocabulary(directory)
    tokenizer, eos = vocabulary.tokenizer, vocabulary.eos
    if eos is None:
        raise checkpoints.CheckpointError(
            f"{directory}: training needs the token that ends a sequence, and neither "
            "tokenizer_config.json nor config.json names it"
        )
    start = vocabulary.start
    names = {id_: tokenizer.id_to_token(id_) for id_ in (*start, eos)}
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*(names[id_] for id_ in start), "$A", names[eos]],
        special_tokens=[(name, id_) for id_, name in names.items()],
    )
    return tokenizer


def of_words() -> tokenizers.Tokenizer:
    """A tokenizer of the arithmetic task's words, one character each."""
    ids = {word: id_ for id_, word in enumerate(tasks.VOCABULARY)}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(ids, unk_token=""))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([tasks.VOCABULARY[i] for i in (0, 1)])
    return tokenizer


class Spelling(NamedTuple):
    """A task's words as token ids of a model."""

    ids: np.ndarray  # int32, of `tasks.VOCABULARY`
    size: int  # entries that the model needs

    def write(self, words: np.ndarray) -> np.ndarray:
        """Convert numbers of the task's words to the model's ids."""
        return self.ids[words]

    def read(self, ids: np.ndarray) -> np.ndarray:
        """Convert ids to numbers of words; other ids get a number that no word has."""
        words = np.full(np.shape(ids), len(self.ids), np.int32)
        for word, id_ in enumerate(self.ids):
            words = np.where(ids == id_, np.int32(word), words)  # the end comes last
        return words


def spelling(checkpoint: str | None) -> Spelling:
    """One token per word: the task's own ids, or a checkpoint's.

    Raises:
        CheckpointError: a word is not a token of the checkpoint's tokenizer.
    """
    if checkpoint is None:
        size = len(tasks.VOCABULARY)
        return Spelling(np.arange(size, dtype=np.int32), size)
    tokenizer = of_checkpoint(checkpoint)
    (end,) = edges(tokenizer)[1]
    # Padding may have the id of the end, which comes last and so is read as the end.
    ids = {"<pad>": end, "<eos>": end}
    for word in tasks.VOCABULARY[2:]:
        id_ = tokenizer.token_to_id(word)
        if id_ is None:
            raise checkpoints.CheckpointError(
                f"{checkpoint}: the task needs the token {word!r}, which "
                "tokenizer.json does not have"
            )
        ids[word] = id_
    word_ids = np.array([ids[word] for word in tasks.VOCABULARY], np.int32)
    return Spelling(word_ids, int(word_ids.max()) + 1)
