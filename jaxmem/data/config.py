"""The configuration of supervised data and of pairs."""

import dataclasses
from typing import Any, Literal

from jaxmem.base.fields import check_field, check_numbers
from jaxmem.base.ranges import integers, reals
from jaxmem.data.mixing import check_weights
from jaxmem.data.vocabulary import SMALLEST, SPECIAL_TOKENS

_SLOTS = 2**31  # of a batch, which int32 indices number
_RANGES = {
    "vocab_size": integers(high=2**24),
    "sequence_length": integers(1, limit=2**24),  # T² entries of a mask fit 64 bits
    "batch_size": integers(1),
    "held_out": reals(0, below=1),
    "seed": integers(0, below=2**31),
    "streams": integers(1),
    "shuffle_window": integers(1, limit=2**24),
}


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Sources of supervised data, and the layout of their tokens in rows."""

    # training data: "stdlib" (Python's own sources), or paths and globs of .txt,
    # .jsonl, .csv, .parquet and other files, or folders of such files or of
    # `save_to_disk`
    source: str | tuple[str, ...] = "stdlib"
    # share of each entry of data.source in the training data. Each entry is repeated as
    # often as needed, in a new order each time. None: an epoch contains each document
    # once
    weights: tuple[float, ...] | None = None
    # entries of the byte-level BPE vocabulary that is trained on the data, special
    # tokens included
    vocab_size: int = 8192
    sequence_length: int = 256  # tokens per row (T)
    batch_size: int = 8  # rows per micro-batch (B), on all devices together
    # fraction of the documents, in [0, 1), that is kept out of training for evaluation.
    # 0.0: if the source is a folder, its files named validation, valid, val or dev, or
    # else test, are held out
    held_out: float = 0.0
    # True: each epoch has a new order. False: documents keep the order of the files,
    # and rows are filled one after the other
    shuffle: bool = True
    seed: int = 0  # seed of the orders
    # directory in which trained vocabularies are kept. None: $XDG_CACHE_HOME/jaxmem, or
    # ~/.cache/jaxmem, or a directory of temporary files
    cache_dir: str | None = None
    # number of parts into which documents are divided. Each part fills its share of the
    # rows of every batch, so that a process reads only its own parts
    streams: int = 1
    # path of a Jinja template for messages. None: the checkpoint's template
    chat_template: str | None = None
    # variables of the chat template, as in {"enable_thinking": False}
    chat_template_kwargs: dict[str, Any] | None = None
    # names of the data's columns, as in {"prompt": "my_question"}
    columns: dict[str, str] | None = None
    ignored: tuple[str, ...] = ()  # columns, and keys of messages, that are ignored
    # if the chat template leaves out text that the loss should count: "raise" stops
    # with an error, "mask" takes the whole turn out of the loss, "count" counts the
    # rest of the turn
    stripped: Literal["raise", "mask", "count"] = "raise"
    # read .jsonl, .parquet and .arrow files block by block, for data that do not fit
    # into memory
    streaming: bool = False
    # with data.streaming, number of pieces of documents that are shuffled together
    shuffle_window: int = 4096

    def __post_init__(self):
        check_numbers(self, _RANGES)
        check_weights(self)
        kinds = "raise", "mask", "count"
        check_field(self, "stripped", self.stripped in kinds, f"one of {kinds}")
        if self.sequence_length * self.batch_size >= _SLOTS:
            raise ValueError(
                f"DataConfig.batch_size must be below 2**31 / sequence_length="
                f"{self.sequence_length}, got {self.batch_size}"
            )
        if self.batch_size % self.streams:
            raise ValueError(
                "DataConfig.streams must divide batch_size, got "
                f"streams={self.streams} for batch_size={self.batch_size}"
            )
        default = DataConfig.shuffle_window
        if not self.shuffle and self.shuffle_window != default:
            raise ValueError(
                f"DataConfig.shuffle_window must stay {default} with shuffle=False, "
                f"because nothing is shuffled, got {self.shuffle_window}"
            )
        if self.vocab_size < SMALLEST:
            raise ValueError(
                f"DataConfig.vocab_size must be at least {SMALLEST} (every "
                f"byte and {', '.join(SPECIAL_TOKENS)}), got {self.vocab_size}"
            )

    def fixed(self) -> dict[str, Any]:
        """The fields that a resumed run must share with the saved one."""
        fields = dataclasses.asdict(self)
        del fields["cache_dir"]  # it does not change the vocabulary
        if not self.streaming:  # as in runs from before there was a choice
            del fields["streaming"], fields["shuffle_window"]
        if self.stripped == "raise":
            del fields["stripped"]
        if self.shuffle:
            del fields["shuffle"]
        for name in ("chat_template_kwargs", "columns", "ignored", "weights"):
            if not fields[name]:
                del fields[name]
        return fields
