"""Completions of conversations, turn by turn, by compiled programs."""

from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmem.models.sampling import Samples
from jaxmem.train.jobs.rollout.samples import SlotUse, draw_number
from jaxmem.train.jobs.rollout.sampling_program import SamplingProgram


class SamplePrograms(NamedTuple):
    """Compiled samplers; each returns `Samples` and a cache, or None."""

    # (params, frozen, prompts, lengths, number)
    first: jax.stages.Compiled
    # (params, frozen, cache, tokens, lengths, number); it continues from the cache and
    # consumes it. None: every turn reads the whole conversation
    further: jax.stages.Compiled | None

    @classmethod
    def of(
        cls, program: SamplingProgram, evaluated_at: float | None = None
    ) -> "SamplePrograms":
        """Compile the samplers of a program, as `SamplingProgram.trace_sample` says."""
        further = None
        if program.keeps_cache:
            further = program.trace_further(evaluated_at).lower().compile()
        return cls(program.trace_sample(evaluated_at).lower().compile(), further)


class Turns:
    """Completes prompts turn by turn, from the kept cache where there is one."""

    def __init__(
        self,
        program: SamplingProgram,
        compiled: SamplePrograms,
        weights: tuple[Any, Any],
        draw: tuple[int, int],
    ):
        self._program, self._compiled = program, compiled
        self._weights, self._draw = weights, draw
        self._cache: Any = None
        self._cache_lengths = np.array([], np.int32)  # [N] tokens of each row
        self._slot_count, self._token_count = 0, 0

    @property
    def decoded(self) -> SlotUse:
        """Use of the sampler's slots in all turns so far."""
        return SlotUse(self._token_count, self._slot_count)

    def __call__(self, tokens: np.ndarray, lengths: np.ndarray, turn: int) -> Samples:
        """Complete the conversations [N, W] of lengths [N] by one turn.

        With a kept cache, a turn after the first reads only tokens that the cache
        lacks.
        """
        program, shapes, total_lengths = self._program, self._program.prompts, lengths
        run, cache = self._compiled.first, ()
        if turn and self._compiled.further is not None:
            run, cache = self._compiled.further, (self._cache,)
            shapes = program.replies
            width = shapes[0].shape[1]
            tokens, lengths = self._tokens_after_cache(tokens, lengths, width)
        prompts = tokens[:, : shapes[0].shape[1]], lengths
        prompts = program.sampling_layout.place(prompts, shapes)
        number = np.int32(draw_number(*self._draw, turn))
        samples, self._cache = run(*self._weights, *cache, *prompts, number)
        samples = jax.device_get(samples)
        read_counts = np.maximum(samples.lengths - 1, 0)  # the last token is not read
        self._cache_lengths = total_lengths + read_counts
        self._slot_count += samples.steps * program.slots
        self._token_count += int(read_counts.sum())
        return samples

    def _tokens_after_cache(
        self, tokens: np.ndarray, lengths: np.ndarray, width: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokens [N, width] that the cache lacks, and their counts [N]."""
        counts = np.where(lengths > 0, lengths - self._cache_lengths, 0).astype(
            np.int32
        )
        columns = self._cache_lengths[:, None] + np.arange(width)
        columns = np.minimum(columns, tokens.shape[1] - 1)
        return np.take_along_axis(tokens, columns, axis=1), counts
