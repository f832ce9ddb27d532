"""Completions of conversations, turn by turn, with programs that are compiled."""

from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmem.models.sampling import Samples
from jaxmem.train.jobs.rollout.samples import SlotUse, draw_number
from jaxmem.train.jobs.rollout.sampling_program import SamplingProgram


class SamplePrograms(NamedTuple):
    """What samples, with a cache or None as a second result."""

    # (params, frozen, prompts, lengths, number)
    first: jax.stages.Compiled
    # (params, frozen, cache, tokens, lengths, number) goes on from a cache, which it
    # consumes; None: every turn reads all that was said
    further: jax.stages.Compiled | None

    @classmethod
    def of(cls, program: SamplingProgram, greedy: bool = False) -> "SamplePrograms":
        """Compile them; greedy ones are at temperature 0."""
        further = None
        if program.keeps_cache:
            further = program.trace_further(greedy).lower().compile()
        return cls(program.trace_sample(greedy).lower().compile(), further)


class Turns:
    """Completes prompts, and goes on after replies to the completions."""

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
        self._read = np.array([], np.int32)  # [N] tokens of a row that it holds
        self._slots, self._tokens = 0, 0

    @property
    def decoded(self) -> SlotUse:
        """What the sampler's slots did so far."""
        return SlotUse(self._tokens, self._slots)

    def __call__(self, said: np.ndarray, lengths: np.ndarray, turn: int) -> Samples:
        """Complete all that was said [N, W] in rows of these lengths, in one turn.

        Where a cache is kept, only what follows on it is read.
        """
        program, shapes, whole = self._program, self._program.prompts, lengths
        run, before = self._compiled.first, ()
        if turn and self._compiled.further is not None:
            run, before = self._compiled.further, (self._cache,)
            shapes = program.replies
            said, lengths = self._news(said, lengths, shapes[0].shape[1])
        given = said[:, : shapes[0].shape[1]], lengths
        given = program.sampling_layout.place(given, shapes)
        number = np.int32(draw_number(*self._draw, turn))
        made, self._cache = run(*self._weights, *before, *given, number)
        made = jax.device_get(made)
        drawn = np.maximum(made.lengths - 1, 0)  # the last token is not read
        self._read = whole + drawn
        self._slots += made.steps * program.slots
        self._tokens += int(drawn.sum())
        return made

    def _news(
        self, said: np.ndarray, lengths: np.ndarray, width: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """What follows [N, width] on the tokens that are in the cache, and lengths."""
        counts = np.where(lengths > 0, lengths - self._read, 0).astype(np.int32)
        places = np.minimum(self._read[:, None] + np.arange(width), said.shape[1] - 1)
        return np.take_along_axis(said, places, axis=1), counts
