"""Completes more prompts than are decoded at a time: a slot whose row ends is refilled.

The next row is the first of a prompt that has no completion yet; then one of the prompt
whose completions are the longest so far, because those of one prompt are alike and what
is started last is waited for. Of equally long ones it is the prompt with the fewest
started rows, so that each prompt has as many of the first rows, whose lengths are
unknown. A row's tokens depend neither on its slot nor on when it starts: random numbers
belong to a row and to the number of its token.

Reference: Qin et al., 2025, arXiv:2511.14617, who schedule by lengths of a prompt.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxmem.models import kv_cache
from jaxmem.models.own_model import LanguageModel


class RefillPrompts(NamedTuple):
    """Prompts of N rows, and the keys of the rows' random numbers."""

    ids: jax.Array  # [N, P]
    lengths: jax.Array  # [N]; 0: the row gets no token
    keys: jax.Array  # [N]


class RefillRows(NamedTuple):
    """Progress of N rows: tokens so far, and steps at which they started."""

    drawn: Any  # arrays [N, R, ...]
    lengths: jax.Array  # [N] tokens so far
    starts: jax.Array  # [N] steps before its first token; -1: it waits
    routes: jax.Array | None  # [N, S, ...] of the tokens that were read, if recorded


class Slots(NamedTuple):
    """Rows that are decoded, one in each of S slots."""

    rows: jax.Array  # [S] index of the row in each slot; N: none
    token: jax.Array  # [S] its last token
    cache: kv_cache.Cache
    step: jax.Array  # steps so far


State = tuple[Slots, RefillRows]


@dataclasses.dataclass(frozen=True, eq=False)
class Refill:
    """Decodes N rows of at most R tokens in S slots.

    `draw` returns tokens and which rows end with them, from keys [k], numbers of tokens
    in their rows [k], logits [k, V] and which are no rows [k]. `unroll` is as in
    `Decoder.decode`, and `records` as in `Decoder.prefill`.
    """

    model: tuple[Any, Any]  # definition and weights
    prompts: RefillPrompts
    slots: int  # S, at most N
    most: int  # R
    draw: Callable[..., tuple[Any, jax.Array]]
    unroll: bool
    records: bool = False

    def run(self, nothing: Any) -> RefillRows:
        """Decode until all rows have ended; at first `drawn` is `nothing`."""
        count = self._count
        # Behind the prompts, the slot of all rows comes back to a row's first token
        # after the row has ended.
        shapes = jax.eval_shape(lambda: self._prefill_rows(jnp.arange(self.slots))[1])
        cache = kv_cache.empty(shapes, self._width)
        routes = jax.tree.map(
            lambda x: jnp.zeros((count, *x.shape[1:]), x.dtype), cache.routes
        )
        none = jnp.full(self.slots, count, jnp.int32)
        slots = Slots(none, jnp.zeros_like(none), cache, jnp.asarray(0, jnp.int32))
        zeros = jnp.zeros(count, jnp.int32)
        state = slots, RefillRows(nothing, zeros, zeros - 1, routes)
        state = lax.fori_loop(0, count, lambda _, state: self._start_row(state), state)
        return lax.while_loop(self._is_live, self._decode_step, state)[1]

    @property
    def _count(self) -> int:
        return len(self.prompts.lengths)

    @property
    def _width(self) -> int:
        return self.prompts.ids.shape[1]

    @property
    def _row_slots(self) -> int:
        """Slots of a row of the cache, as in `Sampler.start`."""
        return -(-(self._width + self.most - 1) // 8) * 8

    def _prefill_rows(self, rows: jax.Array) -> tuple[jax.Array, kv_cache.Cache]:
        decoder: LanguageModel = nnx.merge(*self.model)
        lengths = self.prompts.lengths[rows]
        lengths = jnp.where(lengths == 0, 1, lengths)
        return decoder.prefill(
            self.prompts.ids[rows], lengths, self._row_slots, records=self.records
        )

    def _is_live(self, state: State) -> jax.Array:
        return jnp.any(state[0].rows < self._count)

    def _is_full(self, state: State) -> jax.Array:
        return jnp.all(state[0].rows < self._count)

    def _start_row(self, state: State) -> State:
        """Start one more row, as soon as a slot has none."""
        slots, rows = lax.while_loop(self._is_full, self._decode_step, state)
        index = jnp.argmax(slots.rows == self._count)
        row = self._next_row(rows)[None]
        hidden, cache = self._prefill_rows(row)
        routes = kv_cache.routes_by_position(cache)

        def put(all_: jax.Array, x: jax.Array) -> jax.Array:
            return all_.at[row].set(x)

        rows = rows._replace(
            starts=put(rows.starts, slots.step),
            routes=jax.tree.map(put, rows.routes, routes),
        )
        rows, token, left = self._draw_tokens(rows, row, hidden)
        slots = slots._replace(
            rows=slots.rows.at[index].set(left[0]),
            token=slots.token.at[index].set(token[0]),
            cache=kv_cache.replaced(slots.cache, index, cache),
        )
        return slots, rows

    def _decode_step(self, state: State) -> State:
        """Decode one more token in every slot."""
        slots, rows = state
        decoder: LanguageModel = nnx.merge(*self.model)
        cache = kv_cache.wrapped(slots.cache, self._width)
        live, slot, positions = slots.rows < self._count, cache.slot, cache.lengths
        hidden, cache = decoder.decode(slots.token, cache, live, unroll=self.unroll)

        def put(all_: jax.Array, new: jax.Array) -> jax.Array:
            return all_.at[slots.rows, positions].set(new[:, slot], mode="drop")

        rows = rows._replace(routes=jax.tree.map(put, rows.routes, cache.routes))
        rows, token, left = self._draw_tokens(rows, slots.rows, hidden)
        return Slots(left, token, cache, slots.step + 1), rows

    def _draw_tokens(self, rows: RefillRows, indices: jax.Array, hidden: jax.Array):
        """Draw a token for each of the rows `indices` [k].

        Returns all rows, the tokens [k], and `indices` with N for rows that ended.
        """
        count, decoder = self._count, nnx.merge(*self.model)
        known = jnp.minimum(indices, count - 1)
        steps, keys = rows.lengths[known], self.prompts.keys[known]
        live = (self.prompts.lengths[known] != 0) & (indices < count)
        new, ended = self.draw(keys, steps, decoder.logits(hidden), ~live)

        def put(all_: jax.Array, x: jax.Array) -> jax.Array:
            return all_.at[indices, steps].set(x, mode="drop")

        drawn = jax.tree.map(put, rows.drawn, new)
        lengths = rows.lengths.at[indices].add(live, mode="drop")
        ended |= steps + 1 == self.most
        left = jnp.where(ended, count, indices)
        return rows._replace(drawn=drawn, lengths=lengths), new.tokens, left

    def _next_row(self, rows: RefillRows) -> jax.Array:
        """Index of the row to start."""
        waits, groups = rows.starts < 0, self._prompt_groups
        lengths = jnp.where(waits, -1, rows.lengths)
        longest = jax.ops.segment_max(lengths, groups, self._count)[groups]
        started = jax.ops.segment_sum(1 - waits, groups, self._count)[groups]
        urgency = jnp.where(longest < 0, self.most + 1, longest)
        urgent = jnp.max(jnp.where(waits, urgency, -1))
        fewest = jnp.where(waits & (urgency == urgent), started, self._count)
        return jnp.argmin(fewest)

    @property
    def _prompt_groups(self) -> jax.Array:
        """[N] index of each row's prompt; rows of one prompt follow one another."""
        filled = jnp.arange(self._width) < self.prompts.lengths[:, None]
        ids = jnp.where(filled, self.prompts.ids, -1)
        differs = jnp.any(ids[1:] != ids[:-1], axis=1)
        return jnp.pad(jnp.cumsum(differs), (1, 0))
