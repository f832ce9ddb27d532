"""The slots of the device: rows of equal options, decoded together."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.generate.config import GenerateConfig
from jaxmem.head.maths.random_streams import Stream
from jaxmem.models import sampling
from jaxmem.models.own_model import LanguageModel
from jaxmem.models.slot_decoding import (
    NewRow,
    ReadPrompt,
    SlotSampler,
    SlotState,
    SlotTokens,
)
from jaxmem.serve.completion_request import DrawOptions
from jaxmem.serve.served_rows import ServedRow

_PART = 8  # tokens between two looks at requests, pauses and new weights
_NARROWEST = 16  # tokens of a prompt's row; others are about twice as wide
_WIDTHS = 5  # the widest has all tokens of a row
_PROGRAMS = 16  # kinds of options whose compiled programs are kept


class PoolShape(NamedTuple):
    """Sizes that programs are compiled for."""

    slots: int
    max_length: int  # tokens of a row that are read
    records: bool = False  # True if the experts of each token are kept

    @classmethod
    def of(cls, slots: int, max_len: int, records: bool = False) -> "PoolShape":
        """Sizes for rows of `max_len` tokens, the last of which is not read.

        As in `Sampler.start`, they are multiples of 8. Records of a row must outlast
        the part in which it ends.
        """
        length = max_len - 1 + (_PART if records else 0)
        return cls(slots, -(-length // 8) * 8, records)

    def widths(self) -> list[int]:
        """Widths of the programs that read prompts, which few are compiled for."""
        widths = [self.max_length]
        while len(widths) < _WIDTHS and widths[0] > _NARROWEST:
            widths.insert(0, -(-widths[0] // 16) * 8)
        return widths


class SlotPool:
    """Rows of one model and equal options, at most one in each slot.

    Args:
        name: of the model that draws them.
        options: of their draws.
        shape: of the cache.
        decoder: `prepared`, of the shapes of all that later calls pass.
    """

    def __init__(
        self, name: str, options: DrawOptions, shape: PoolShape, decoder: LanguageModel
    ):
        self.name, self.options, self.shape = name, options, shape
        size = decoder.config.vocab_size
        assert size is not None
        self._programs = _programs(options, shape, size)
        self._state = self._programs.empty(decoder)
        self.rows: list[ServedRow | None] = [None] * shape.slots
        self._first: list[tuple[int, SlotTokens]] = []  # tokens that nobody has fetched
        self._read: tuple[LanguageModel, list[int], ReadPrompt] | None = None

    @property
    def is_busy(self) -> bool:
        """True if a slot has a row."""
        return any(row is not None for row in self.rows)

    @property
    def has_room(self) -> bool:
        """True if a slot has none."""
        return None in self.rows

    def takes(self, row: ServedRow) -> bool:
        """True if a row can be decoded with those that are here."""
        request = row.job.request
        return (self.name, self.options) == (request.model, request.options)

    def place(self, decoder: LanguageModel, row: ServedRow) -> None:
        """Start a row in a free slot, or go on with it there."""
        if not self.is_busy:  # then equal requests get equal bits
            cache = self._state.cache
            cache = cache._replace(slot=jnp.zeros_like(cache.slot))
            self._state = self._state._replace(cache=cache)
        slot = self.rows.index(None)
        self.rows[slot] = row
        read = self._read_prompt(decoder, row)
        low, high = row.seed % 2**31, (row.seed >> 31) % 2**32
        request = row.job.request
        numbers = slot, len(row.ids), request.max_tokens, low, high
        divisor = 1.0 if self.options.is_greedy else request.temperature
        new = np.array(numbers, np.uint32), np.float32(divisor)
        self._state, tokens = self._programs.place(decoder, self._state, read, *new)
        self._first.append((slot, tokens))

    def _read_prompt(self, decoder: LanguageModel, row: ServedRow) -> ReadPrompt:
        """The row's tokens, which are read once for all rows that begin with them."""
        ids = [*row.prompt, *row.ids]
        if self._read is None or self._read[:2] != (decoder, ids):
            self.forget_prompt()
            self._read = decoder, ids, self._programs.read(decoder, ids)
        return self._read[2]

    def forget_prompt(self) -> None:
        """Free the prompt that was read last."""
        self._read = None

    def advance(self, decoder: LanguageModel, version: str) -> list[ServedRow]:
        """Decode a part, add its tokens to the rows, and return those that ended."""
        self._state, tokens = self._programs.advance(decoder, self._state)
        first, tokens = jax.device_get((self._first, tokens))
        self._first = []
        for slot, own in first:
            if (row := self.rows[slot]) is not None:
                # Its arrays have one slot; the row may have ended with this token.
                row.add(own, 0, version)
        ended = []
        for slot, row in enumerate(self.rows):
            if row is None:
                continue
            if row.finish is None:
                row.add(tokens, slot, version)
            if row.finish is not None:
                self._keep_routes(slot, row)
                self.rows[slot] = None
                ended.append(row)
        return ended

    def _keep_routes(self, slot: int, row: ServedRow) -> None:
        if self.shape.records:
            routes = self._programs.routes(self._state, np.int32(slot))
            row.add_routes(jax.device_get(routes))

    def compile(self, decoder: LanguageModel) -> None:
        """Compile the programs of prompts of all widths."""
        for width in self.shape.widths():
            self._programs.read(decoder, [0] * width)

    def drop(self, rows: Sequence[ServedRow]) -> None:
        """Free the slots of rows, which get no more tokens there."""
        ended = np.array(self._state.ended)
        for slot, row in enumerate(self.rows):
            if row is not None and row in rows:
                self._keep_routes(slot, row)
                self.rows[slot], ended[slot] = None, True
        self._state = self._state._replace(ended=ended)


def _row_of(numbers: jax.Array, temperature: jax.Array) -> NewRow:
    """The row of five uint32: slot, tokens so far, their maximum, bits of the seed.

    The key of a seed below 2**31 is that of `jaxmem generate` for its first prompt.
    """
    slot, count, limit, low = (x.astype(jnp.int32) for x in numbers[:4])
    key = Stream.COMPLETIONS.key(low, 0)
    longer = jax.random.fold_in(key, numbers[4])
    key = jax.lax.cond(numbers[4] == 0, lambda: key, lambda: longer)
    return NewRow(slot, key, count, limit, temperature)


class _Programs(NamedTuple):
    """Jitted functions of a pool."""

    shape: PoolShape
    empty: Callable
    read_padded: Callable
    place: Callable
    advance: Callable
    routes: Callable

    def read(self, decoder: LanguageModel, ids: Sequence[int]) -> ReadPrompt:
        """Read a prompt, in a row of the least width that holds it."""
        length = len(ids)
        width = next(width for width in self.shape.widths() if width >= length)
        padded = np.zeros((1, width), np.int32)
        padded[0, :length] = ids
        lengths = np.array([length], np.int32)
        return self.read_padded(decoder, padded, lengths)


@functools.lru_cache(_PROGRAMS)
def _programs(options: DrawOptions, shape: PoolShape, vocab_size: int) -> _Programs:
    chosen = GenerateConfig(
        temperature=float(not options.is_greedy),
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
    ).sampling(shape.max_length, vocab_size)
    sampler = sampling.Sampler(chosen, options.end_ids, 0, keep_support=False)
    slots = SlotSampler(
        sampler, shape.slots, shape.max_length, _PART, options.top, shape.records
    )

    def place(
        decoder: LanguageModel,
        state: SlotState,
        read: ReadPrompt,
        numbers: jax.Array,
        temperature: jax.Array,
    ) -> tuple[SlotState, SlotTokens]:
        return slots.place(decoder, state, read, _row_of(numbers, temperature))

    return _Programs(
        shape,
        _jit(slots.empty),
        _read_program(shape),
        _jit(place, donate_argnums=1),
        _jit(slots.advance, donate_argnums=1),
        _jit(slots.routes),
    )


@functools.cache
def _read_program(shape: PoolShape) -> Callable:
    """The program that reads prompts, which all options share."""
    greedy = sampling.Sampler(sampling.SamplingConfig(1, top_k=1), (), 0)
    slots = SlotSampler(greedy, *shape[:2], part=1, records=shape.records)
    return _jit(slots.read)


def _jit(function: Callable, **options: Any) -> Callable:
    on_gpu = jax.default_backend() == "gpu"
    compiler = sampling.COMPILER_OPTIONS if on_gpu else None
    return jax.jit(function, compiler_options=compiler, **options)
