"""A teacher's columns of each scored token: its most likely ids, or ids it drew."""

import dataclasses
import functools
import math
import typing
from typing import Annotated, Any

import jax
import numpy as np

from jaxmem.base.command_options import CommandOptions
from jaxmem.base.fields import Must
from jaxmem.base.ranges import integers
from jaxmem.head.maths.random_streams import Stream

if typing.TYPE_CHECKING:  # options of a command import nothing heavy
    from jaxmem.models.own_model import LanguageModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class TeacherColumns(CommandOptions):
    """The columns that are recorded: top k, sampled, or none; one count at most."""

    top_k: Annotated[
        int | None,
        integers(1),
        "also record the TOP_K most probable ids of each token, for distillation",
    ] = None
    sample_ids: Annotated[
        int | None,
        integers(1),
        "also record SAMPLE_IDS ids drawn for each token, for distillation",
    ] = None
    temperature: Annotated[
        float,
        Must("positive and finite", lambda value: 0 < value < math.inf),
        "with --top-k or --sample-ids, number that divides the logits (default 1)",
    ] = 1.0
    seed: Annotated[int, "with --sample-ids, seed of the draws (default {default})"] = 0

    def __post_init__(self):
        """Raise a ValueError that names an option with an impossible value."""
        if self.top_k is not None and self.sample_ids is not None:
            raise ValueError(
                f"--sample-ids={self.sample_ids} cannot be combined with --top-k="
                f"{self.top_k}, because a student learns from one of them; leave one "
                "out"
            )
        super().__post_init__()
        is_default = self.temperature == 1 and self.seed == 0
        if not (self.has_columns or is_default):
            raise ValueError("--temperature and --seed need --top-k or --sample-ids")

    @property
    def has_columns(self) -> bool:
        """True if a column is recorded."""
        return self.top_k is not None or self.sample_ids is not None

    @property
    def shapes(self) -> dict[str, tuple[int, type]]:
        """Width and type of each recorded column, by name."""
        if self.top_k is not None:
            return {
                "top_ids": (self.top_k, np.int32),
                "top_logprobs": (self.top_k, np.float32),
            }
        if self.sample_ids is not None:
            return {"sampled_ids": (self.sample_ids, np.int32)}
        return {}

    def key(self, *numbers: int) -> jax.Array:
        """The key of one micro-batch's draws, which the numbers identify."""
        return Stream.TEACHER.key(self.seed, *numbers)


@functools.partial(jax.jit, static_argnames="columns")
def token_columns(
    decoder: "LanguageModel",
    tokens: jax.Array,
    labels: jax.Array,
    segment_ids: jax.Array,
    positions: jax.Array,
    key: Any,
    columns: TeacherColumns,
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """Scores of a micro-batch's labels, and a teacher's columns of them.

    Args:
        decoder: the model.
        tokens: [B, T] ids.
        labels: [B, T] ids of the next tokens; negative if not scored.
        segment_ids: [B, T] window of each token in its row; 0 is padding.
        positions: [B, T] position of each token in its window.
        key: of the draws; None without columns.
        columns: the columns to compute.

    Returns:
        (log-probabilities [B, T], entropies [B, T], columns [B, T, K] by name).
    """
    hidden = decoder(tokens, segment_ids, positions)
    stats, where = decoder.head.token_stats(hidden, labels), labels >= 0
    options: dict[str, Any] = {"where": where, "temperature": columns.temperature}
    recorded = {}
    if columns.top_k is not None:
        top = decoder.head.topk(hidden, columns.top_k, **options)
        recorded = {"top_ids": top.ids, "top_logprobs": top.logprobs}
    if columns.sample_ids is not None:
        count = columns.sample_ids
        recorded["sampled_ids"] = decoder.head.sample_ids(hidden, count, key, **options)
    return stats.logprob, stats.entropy, recorded
