"""The configuration of supervised data and of pairs."""

import dataclasses
from typing import Annotated, Any, Literal

from jaxmem.base.fields import Must, check
from jaxmem.base.ranges import integers, reals
from jaxmem.base.rules import is_set, must, wrong
from jaxmem.data import mixing
from jaxmem.data.vocabulary import SMALLEST, SPECIAL_TOKENS

_SLOTS = 2**31  # of a batch, which int32 indices number
_VOCABULARY = Must(
    f"at least {SMALLEST} (every byte and {', '.join(SPECIAL_TOKENS)})",
    lambda size: size >= SMALLEST,
)


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Sources of supervised data, and the layout of their tokens in rows."""

    source: Annotated[
        str | tuple[str, ...],
        'training data: "stdlib" (Python\'s own sources), or paths and globs of '
        ".txt, .jsonl, .csv, .parquet and other files, or folders of such files or of "
        "`save_to_disk`",
    ] = "stdlib"
    weights: Annotated[
        tuple[float, ...] | None,
        "share of each entry of data.source in the training data. Each entry is "
        "repeated as often as needed, in a new order each time. None: an epoch "
        "contains each document once",
    ] = None
    vocab_size: Annotated[
        int,
        integers(high=2**24),
        _VOCABULARY,
        "entries of the byte-level BPE vocabulary that is trained on the data, "
        "special tokens included",
    ] = 8192
    sequence_length: Annotated[int, integers(1, limit=2**24), "tokens per row (T)"] = (
        256
    )
    batch_size: Annotated[
        int, integers(1), "rows per micro-batch (B), on all devices together"
    ] = 8
    held_out: Annotated[
        float,
        reals(0, below=1),
        "fraction of the documents, in [0, 1), that is kept out of training for "
        "evaluation. 0.0: if the source is a folder, its files named validation, "
        "valid, val or dev, or else test, are held out",
    ] = 0.0
    shuffle: Annotated[
        bool,
        "True: each epoch has a new order. False: documents keep the order of the "
        "files, and rows are filled one after the other",
    ] = True
    seed: Annotated[int, integers(0, below=2**31), "seed of the orders"] = 0
    cache_dir: Annotated[
        str | None,
        "directory in which trained vocabularies are kept. None: "
        "$XDG_CACHE_HOME/jaxmem, or ~/.cache/jaxmem, or a directory of temporary files",
    ] = None
    streams: Annotated[
        int,
        integers(1),
        "number of parts into which documents are divided. Each part fills its share "
        "of the rows of every batch, so that a process reads only its own parts",
    ] = 1
    chat_template: Annotated[
        str | None,
        "path of a Jinja template for messages. None: the checkpoint's template",
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None,
        'variables of the chat template, as in {"enable_thinking": False}',
    ] = None
    columns: Annotated[
        dict[str, str] | None,
        'names of the data\'s columns, as in {"prompt": "my_question"}',
    ] = None
    ignored: Annotated[
        tuple[str, ...], "columns, and keys of messages, that are ignored"
    ] = ()
    stripped: Annotated[
        Literal["raise", "mask", "count"],
        'if the chat template leaves out text that the loss should count: "raise" '
        'stops with an error, "mask" takes the whole turn out of the loss, "count" '
        "counts the rest of the turn",
    ] = "raise"
    streaming: Annotated[
        bool,
        "read .jsonl, .parquet and .arrow files block by block, for data that do not "
        "fit into memory",
    ] = False
    shuffle_window: Annotated[
        int,
        integers(1, limit=2**24),
        "with data.streaming, number of pieces of documents that are shuffled together",
    ] = 4096

    RULES = (
        *mixing.RULES,
        must(
            "batch_size",
            "below 2**31 / sequence_length={sequence_length}",
            lambda config: config.sequence_length * config.batch_size < _SLOTS,
        ),
        wrong(
            "streams",
            "must divide batch_size, got streams={value} for batch_size={batch_size}",
            lambda config: config.batch_size % config.streams,
        ),
        wrong(
            "shuffle_window",
            "must stay {default} with shuffle=False, because nothing is shuffled, got "
            "{value}",
            lambda config: not config.shuffle and is_set(config, "shuffle_window"),
        ),
    )

    def __post_init__(self):
        check(self)

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
