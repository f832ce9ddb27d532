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

    # "stdlib" (Python's own sources), or paths and globs of .txt, .jsonl, .csv,
    # .parquet and other files, or folders of such files or of `save_to_disk`
    source: str | tuple[str, ...] = "stdlib"
    # share of each entry of `source` in the training data; each entry is read again and
    # again, every time in another order; None: an epoch has everything once
    weights: tuple[float, ...] | None = None
    vocab_size: int = 8192  # entries of the byte-level BPE vocabulary, with specials
    sequence_length: int = 256  # tokens in a row (T)
    batch_size: int = 8  # rows in a micro-batch (B)
    # fraction of the documents kept from training, in [0, 1); 0.0: a folder's own files
    # are held out, named validation, valid, val or dev, or else test
    held_out: float = 0.0
    # True: every epoch has an order of its own; False: that of the files, in rows that
    # are filled one after the other
    shuffle: bool = True
    seed: int = 0  # decides the orders
    # directory that keeps trained vocabularies; None: that of XDG_CACHE_HOME, or
    # ~/.cache/jaxmem, or one among the temporary files
    cache_dir: str | None = None
    streams: int = 1  # parts of the documents, each a part of every batch's rows
    # path of a Jinja template for messages; None: the checkpoint's own
    chat_template: str | None = None
    # variables of the template, as in {"enable_thinking": False}
    chat_template_kwargs: dict[str, Any] | None = None
    # names of columns, as in {"prompt": "my_question"}
    columns: dict[str, str] | None = None
    ignored: tuple[str, ...] = ()  # columns, and keys of messages, that are left out
    # handling of a turn whose template leaves out text that the loss counts: an error
    # (raise), the turn does not count (mask), or the rest of it counts (count)
    stripped: Literal["raise", "mask", "count"] = "raise"
    # read .jsonl, .parquet and .arrow files block by block, for data that do not fit in
    # memory
    streaming: bool = False
    # pieces of documents that are shuffled together where data.streaming is True
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
