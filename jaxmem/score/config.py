"""Options of `jaxmem score`."""

import dataclasses
from typing import Annotated, Literal

from jaxmem.base import options
from jaxmem.base.command_options import (
    Flag,
    ModelOptions,
    Positional,
    TemplateOptions,
)
from jaxmem.base.fields import Must
from jaxmem.base.ranges import integers
from jaxmem.score.teacher_columns import TeacherColumns


@dataclasses.dataclass(frozen=True)
class ScoreConfig(TeacherColumns, TemplateOptions, ModelOptions):
    """The model, the documents, and the options of a scoring run."""

    model: Annotated[
        str, Positional("MODEL_DIR"), "run, checkpoint, adapter or Hub model"
    ]
    data: Annotated[
        str,
        Positional("DATA.jsonl"),
        "file of records in the formats of supervised training: .jsonl, .json, "
        ".parquet or .txt",
    ]
    out: Annotated[
        str, ".jsonl or .parquet file for the scores (default {default})"
    ] = "scores.jsonl"
    max_tokens: Annotated[
        int,
        integers(1),
        "number of tokens in a micro-batch, with padding (default {default})",
    ] = 4096
    _: dataclasses.KW_ONLY
    stride: Annotated[
        int | None,
        "score documents longer than --max-tokens in windows that advance by STRIDE "
        "tokens",
    ] = None
    chunk: Annotated[
        int | Literal["auto"],
        Flag(parse=options.chunk),
        Must("at least 1, or auto", lambda chunk: chunk == "auto" or chunk >= 1),
        "number of tokens whose logits exist at a time (default {default})",
    ] = "auto"
    eos: Annotated[bool, "also score the token that ends each document"] = False
    everything: Annotated[
        bool,
        Flag("--all"),
        "score all tokens of conversations, not only those that the loss counts",
    ] = False
    stripped: Annotated[
        Literal["raise", "mask", "count"],
        "handling of a turn from which the template removes text: stop (raise), skip "
        "the turn (mask) or score the rest (count); default {default}",
    ] = "raise"

    def __post_init__(self):
        super().__post_init__()
        if self.stride is not None and not 1 <= self.stride <= self.max_tokens:
            raise ValueError(
                f"--stride must be from 1 to --max-tokens={self.max_tokens}, got "
                f"{self.stride}"
            )

    @property
    def columns(self) -> TeacherColumns:
        """The columns that are recorded for a student."""
        return self.group(TeacherColumns)
