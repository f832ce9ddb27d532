"""A teacher's columns of each scored token: its most likely ids, or ids it drew."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from jaxmem.base import ranges
from jaxmem.head.maths.random_streams import Stream
from jaxmem.models.own_model import LanguageModel


@dataclasses.dataclass(frozen=True)
class TeacherColumns:
    """The columns that are recorded: top k, sampled, or none; one count at most."""

    top_k: int | None = None  # most likely ids of a token, with their log-probabilities
    sample_ids: int | None = None  # ids drawn from a token's distribution
    temperature: float = 1.0  # divides the logits of the columns, not of the scores
    seed: int = 0  # of the draws

    def __bool__(self):
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
    decoder: LanguageModel,
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


def check(columns: TeacherColumns) -> None:
    """Raise a ValueError that names an option with an impossible value."""
    if columns.top_k is not None and columns.sample_ids is not None:
        raise ValueError(
            f"--sample-ids={columns.sample_ids} cannot be combined with --top-k="
            f"{columns.top_k}, because a student learns from one of them; leave one out"
        )
    for flag, count in (
        ("--top-k", columns.top_k),
        ("--sample-ids", columns.sample_ids),
    ):
        if count is not None:
            ranges.check(flag, count, ranges.integers(1))
    if not 0 < columns.temperature < np.inf:
        raise ValueError(
            f"--temperature must be positive and finite, got {columns.temperature}"
        )
    if not columns and columns != TeacherColumns():
        raise ValueError("--temperature and --seed need --top-k or --sample-ids")
