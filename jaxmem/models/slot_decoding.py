"""Rows that start and end at different times, decoded together in slots.

    read a prompt -> place it in a slot -> advance all slots -> place the next prompt

The caller decides, between two parts, which row takes a slot that is free; `refill`
decides this on the device, for rows that are all known at the start. Random numbers
belong to a row and to the number of its token, so its tokens do not depend on its slot,
on its start or on other rows. The slots of the cache are in another order, so the last
bits of log-probabilities may.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxmem.models import kv_cache
from jaxmem.models.layers import Ids
from jaxmem.models.own_model import LanguageModel
from jaxmem.models.sampling import SampledTokens, Sampler


class ReadPrompt(NamedTuple):
    """A prompt as the decoder has read it, for any number of completions."""

    hidden: jax.Array  # [1, hidden] of its last token
    cache: kv_cache.Cache  # of one row


class NewRow(NamedTuple):
    """A row that takes a slot, with the number of tokens that it has already.

    These are read with its prompt, as of a row that goes on with other weights.
    """

    slot: jax.typing.ArrayLike  # a free one
    key: jax.Array  # of its random numbers
    count: jax.typing.ArrayLike  # tokens so far
    limit: jax.typing.ArrayLike  # maximum of these
    temperature: jax.typing.ArrayLike  # f32 divisor of its logits, positive


class SlotState(NamedTuple):
    """Rows in S slots, and what the next token of each depends on."""

    token: jax.Array  # [S] the last token of each row
    ended: jax.Array  # [S] bool; True if the slot is free, too
    keys: jax.Array  # [S] of the rows' random numbers
    counts: jax.Array  # [S] int32 tokens of each row so far
    limits: jax.Array  # [S] int32 maximum of these
    temperatures: jax.Array  # [S] f32 divisors of the logits
    cache: kv_cache.Cache


class SlotTokens(NamedTuple):
    """New tokens of S slots in a part of P steps, and the most probable ones.

    Most probable ids [P, S, K] are -1 beyond a support; None if none are kept.
    """

    ended: jax.Array  # [S] bool, after these tokens
    drawn: SampledTokens  # [P, S]; its mask is False where a row has no token
    top_ids: jax.Array | None
    top_logprobs: jax.Array | None


Step = tuple[SampledTokens, jax.Array | None, jax.Array | None]


@dataclasses.dataclass(frozen=True)
class SlotSampler:
    """Decodes rows of at most T tokens, and one that is drawn and not read.

    Call its methods inside `jax.jit`, with `sampling.COMPILER_OPTIONS`, and donate the
    state. The decoder may be another one in each call, of equal shapes.
    """

    sampler: Sampler  # truncation and ends of all rows; each has its own temperature
    slots: int  # S
    max_length: int  # T, tokens of a row that are read: all but the last
    part: int  # P, steps of a call of `advance`
    top: int = 0  # K, most probable tokens that are kept
    records: bool = False  # as in `Decoder.prefill`

    def empty(self, decoder: LanguageModel) -> SlotState:
        """The state without rows."""
        prompts = jnp.zeros((self.slots, 1), jnp.int32)
        shapes = jax.eval_shape(
            lambda: self.read(decoder, prompts, prompts[:, 0] + 1)
        ).cache
        zeros = jnp.zeros(self.slots, jnp.int32)
        keys = jax.random.split(jax.random.key(0), self.slots)
        cache = kv_cache.empty(shapes, 0)
        ones = jnp.ones(self.slots, jnp.float32)
        return SlotState(zeros, zeros == 0, keys, zeros, zeros, ones, cache)

    def read(self, decoder: LanguageModel, prompts: Ids, lengths: Ids) -> ReadPrompt:
        """Read prompts [B, P] of so many tokens [B]; `place` takes one."""
        model: LanguageModel = nnx.merge(*decoder.in_compute_type())
        return ReadPrompt(
            *model.prefill(prompts, lengths, self.max_length, records=self.records)
        )

    def place(
        self, decoder: LanguageModel, state: SlotState, prompt: ReadPrompt, row: NewRow
    ) -> tuple[SlotState, SlotTokens]:
        """Start a row in a free slot, and draw its next token.

        The tokens are those of a part of one step and one slot.
        """
        model: LanguageModel = nnx.merge(*decoder.in_compute_type())
        temperature = jnp.asarray(row.temperature, jnp.float32)
        logits = _tempered(model.logits(prompt.hidden), temperature[None])
        count, none = jnp.asarray(row.count), jnp.zeros(1, bool)
        new, ended = self.sampler.draw_tokens(row.key[None], count, logits, none)
        ended |= count + 1 >= jnp.asarray(row.limit)
        # A row's tokens lie behind each other, round the end, so T slots hold it.
        behind = kv_cache.rolled(prompt.cache, state.cache.slot)
        state = SlotState(
            state.token.at[row.slot].set(new.tokens[0]),
            state.ended.at[row.slot].set(ended[0]),
            state.keys.at[row.slot].set(row.key),
            state.counts.at[row.slot].set(count + 1),
            state.limits.at[row.slot].set(row.limit),
            state.temperatures.at[row.slot].set(temperature),
            kv_cache.replaced(state.cache, jnp.asarray(row.slot), behind),
        )
        step = new, *self._most_probable(logits)
        return state, SlotTokens(ended, *jax.tree.map(lambda x: x[None], step))

    def advance(
        self, decoder: LanguageModel, state: SlotState
    ) -> tuple[SlotState, SlotTokens]:
        """Draw up to `part` tokens of each row that has not ended."""
        definition, weights = decoder.in_compute_type()

        def draw(state: SlotState) -> tuple[SlotState, Step]:
            model = nnx.merge(definition, weights)  # modules must not enter the loop
            cache = kv_cache.wrapped(state.cache, 0)
            hidden, cache = model.decode(
                state.token, cache, ~state.ended, unroll=self.sampler.is_unrolled
            )
            logits = _tempered(model.logits(hidden), state.temperatures)
            new, ended = self.sampler.draw_tokens(
                state.keys, state.counts, logits, state.ended
            )
            counts = state.counts + ~state.ended
            ended |= counts >= state.limits
            state = state._replace(
                token=new.tokens, ended=ended, counts=counts, cache=cache
            )
            return state, (new, *self._most_probable(logits))

        def goes_on(carry: tuple[jax.Array, SlotState, Step]) -> jax.Array:
            done, state, _ = carry
            return (done < self.part) & ~jnp.all(state.ended)

        def one_more(
            carry: tuple[jax.Array, SlotState, Step],
        ) -> tuple[jax.Array, SlotState, Step]:
            done, state, drawn = carry
            state, new = draw(state)
            drawn = jax.tree.map(lambda all_, x: all_.at[done].set(x), drawn, new)
            return done + 1, state, drawn

        # A step that is not taken has no token: its mask is False.
        shapes = jax.eval_shape(lambda state: draw(state)[1], state)
        nothing = jax.tree.map(
            lambda x: jnp.zeros((self.part, *x.shape), x.dtype), shapes
        )
        start = jnp.asarray(0), state, nothing
        _, state, drawn = lax.while_loop(goes_on, one_more, start)
        return state, SlotTokens(state.ended, *drawn)

    def routes(self, state: SlotState, slot: jax.typing.ArrayLike) -> jax.Array:
        """Recorded routes [T, ...] of the row in a slot, by position; 0: not read.

        After its end a row loses a token in each step of a part once its T slots are
        full.
        """
        cache, index = state.cache, jnp.asarray(slot)[None]
        assert cache.routes is not None
        own = cache._replace(positions=cache.positions[index])
        return kv_cache.by_position(own, cache.routes[index])[0]

    def _most_probable(
        self, logits: jax.Array
    ) -> tuple[jax.Array | None, jax.Array | None]:
        if not self.top:
            return None, None
        return self.sampler.most_probable(logits, self.top)


def _tempered(logits: jax.Array, temperatures: jax.Array) -> jax.Array:
    """Logits [B, V] by temperatures [B]; the largest is 0, as in `truncation`."""
    best = jnp.max(logits, axis=-1, keepdims=True)
    return (logits - best) / temperatures[:, None]
