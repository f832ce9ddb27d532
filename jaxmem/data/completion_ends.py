"""Tokens that end a completion, for every job and for `jaxmem generate`."""

from pathlib import Path
from typing import NamedTuple

from jaxmem import checkpoints
from jaxmem.data import vocabulary
from jaxmem.data.chat import ChatTemplate, read_template
from jaxmem.data.records import DataError
from jaxmem.data.rendering import Renderer


class Ends(NamedTuple):
    """Properties of a vocabulary that sampling needs."""

    size: int  # entries that the model needs
    eos_ids: tuple[int, ...]  # each ends a completion
    pad_id: int  # fills a row after its end


def of_checkpoint(
    checkpoint: str, stop: str | None = None, chat_template: str | None = None
) -> Ends:
    """The ends of a checkpoint's vocabulary.

    Args:
        checkpoint: its directory.
        stop: the only token that ends a completion; None: all of `end_ids`.
        chat_template: path of a template in place of the checkpoint's own.

    Raises:
        CheckpointError: the vocabulary has no token `stop`.
    """
    tokenizer = vocabulary.of_checkpoint(checkpoint)
    (eos,) = vocabulary.edges(tokenizer)[1]
    size = tokenizer.get_vocab_size()
    if stop is not None:
        only = tokenizer.token_to_id(stop)
        if only is None:
            raise checkpoints.CheckpointError(
                f"{checkpoint}: task.stop={stop!r} is not a token of tokenizer.json"
            )
        return Ends(size, (only,), only)
    special = vocabulary.special_tokens(tokenizer)
    try:
        template = read_template(checkpoint, chat_template, special)
    except DataError:  # a model without conversations
        template = None
    return Ends(size, end_ids(checkpoint, template), eos)


def end_ids(checkpoint: str | Path, template: ChatTemplate | None) -> tuple[int, ...]:
    """Every id that ends a completion: of the files, and of the template's turns."""
    ids = set(checkpoints.end_ids(checkpoint))
    end = None if template is None else Renderer(lambda: template).end_of_turn()
    if end is not None:
        tokenizer = checkpoints.load_vocabulary(checkpoint).tokenizer
        if (id_ := tokenizer.token_to_id(end)) is not None:
            ids.add(id_)
    return tuple(sorted(ids))
