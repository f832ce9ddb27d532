"""The cache of a decoder, and attention of one new token to cached keys and values.

Rows of a batch have prompts of different lengths, yet each step writes all rows at the
same slot. A row's prompt fills its first slots, and generated tokens follow the longest
prompt; the slots between are masked, and so are those of rows that have ended. Keys are
stored after the rotation, so a slot need not equal a position, and a step is one
in-place update without a scatter. Rows that are replaced by others start while others
go on: `wrapped` then reuses slots.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import layout

from jaxmem import devices
from jaxmem.models import partitioning


class Layer(NamedTuple):
    """Keys and values of one layer, or of all layers on a leading axis.

    Heads come before slots, so that each row and head is one matrix [T, head_dim].
    """

    keys: jax.Array  # [B, kv_heads, T, head_dim], rotated
    values: jax.Array  # [B, kv_heads, T, head_dim]


class Cached(NamedTuple):
    """The state of one layer, such as keys and values, among those of its stack."""

    layers: Any  # a `Layer` [layers, B, kv_heads, T, head_dim], or another state
    index: jax.Array  # of the layer in its stack

    @property
    def layer(self) -> Any:
        """The state of the layer alone."""
        return jax.tree.map(lambda x: x[self.index], self.layers)


class Cache(NamedTuple):
    """The decoder's state after the tokens that it has processed.

    **Memory** of attention: 2 · layers · B · T · kv_heads · head_dim numbers of the
    compute dtype.
    """

    layers: dict[str, Any]  # the states of each stack of layers, by its name
    positions: jax.Array  # [B, T] int32 of the row's token in a slot; -1: none
    lengths: jax.Array  # [B] int32, tokens per row; the position of the next token
    slot: jax.Array  # int32 scalar, the slot of the next token in every row
    # of the tokens in slots, as in `models.route_records`; None: they are not recorded
    routes: jax.Array | None = None
    tokens: jax.Array | None = None  # [B, T] in slots, of `models.rereading`

    @property
    def max_length(self) -> int:
        """The number of slots per row, T."""
        return self.positions.shape[1]

    @property
    def filled(self) -> jax.Array:
        """The slots that hold a token of the row, [B, T] bool."""
        return self.positions >= 0

    def seen(self, window: jax.Array | int | None = None) -> jax.Array:
        """The slots that the next token attends to, [B, T] bool.

        The window of local layers, or [B, 1] of each row, includes the next token.
        """
        return self.seen_from(self.lengths[:, None], window)[:, 0]

    def seen_from(
        self, positions: jax.Array, window: jax.Array | int | None = None
    ) -> jax.Array:
        """`seen`, [B, M, T] bool, of later tokens at positions [B, M]."""
        filled = jnp.broadcast_to(
            self.filled[:, None], (*positions.shape, self.max_length)
        )
        if window is None:
            return filled
        distance = positions[..., None] - self.positions[:, None]
        return filled & (distance < jnp.asarray(window)[..., None])


def of_prompts(
    layers: dict[str, Any],
    lengths: jax.Array,
    width: int,
    max_length: int,
    *recorded: jax.Array | None,
) -> Cache:
    """The cache after prompts of `lengths` [B], in rows `width` tokens wide.

    Their routes, [B, width, ...], and tokens, [B, width], are recorded if not None.
    """

    def wide(x: jax.Array) -> jax.Array:
        unused = [(0, 0), (0, max_length - width)] + [(0, 0)] * (x.ndim - 2)
        return jnp.pad(x, unused)

    recorded = jax.tree.map(wide, recorded)
    slots = jnp.arange(max_length, dtype=jnp.int32)
    positions = jnp.where(slots < lengths[:, None], slots, -1)
    slot = jnp.asarray(width, jnp.int32)
    return Cache(layers, positions, lengths, slot, *recorded)


def replaced(cache: Cache, row: jax.Array, other: Cache) -> Cache:
    """The cache with `row` replaced by the only row of `other`; both have T slots."""

    def put(x: jax.Array, new: jax.Array, axis: int) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(x, new, row, axis)

    def put_layer(x: jax.Array, new: jax.Array) -> jax.Array:
        # The prefill's own layout may be another, and a loop would carry the whole
        # cache in it: each row that starts would then transpose all of it, twice.
        rows_first = layout.Layout(tuple(range(x.ndim)))
        return put(x, layout.with_layout_constraint(new, rows_first), 1)

    return cache._replace(
        layers=jax.tree.map(put_layer, cache.layers, other.layers),
        positions=put(cache.positions, other.positions, 0),
        lengths=put(cache.lengths, other.lengths, 0),
        routes=jax.tree.map(lambda x, new: put(x, new, 0), cache.routes, other.routes),
        tokens=jax.tree.map(lambda x, new: put(x, new, 0), cache.tokens, other.tokens),
    )


def empty(shapes: Cache, slot: int) -> Cache:
    """A cache of these shapes without tokens, whose rows are `replaced` later.

    All rows write to one slot at a time, from `slot` on, and round again: see
    `wrapped`.
    """
    cache = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return cache._replace(
        positions=cache.positions - 1, slot=jnp.asarray(slot, jnp.int32)
    )


def rolled(cache: Cache, slot: jax.Array) -> Cache:
    """The cache of one row, with its last token in the slot before `slot`.

    Tokens before the first slot are in the last ones.
    """
    shift = slot - cache.lengths[0]

    def roll(state: Any) -> Any:
        if not isinstance(state, Layer):
            return state  # a recurrent state has no slots
        return Layer(*(jnp.roll(x, shift, -2) for x in state))

    return cache._replace(
        layers=jax.tree.map(roll, cache.layers, is_leaf=lambda x: isinstance(x, Layer)),
        positions=jnp.roll(cache.positions, shift, 1),
        routes=jax.tree.map(lambda x: jnp.roll(x, shift, 1), cache.routes),
        tokens=jax.tree.map(lambda x: jnp.roll(x, shift, 1), cache.tokens),
        slot=slot,
    )


def wrapped(cache: Cache, width: int) -> Cache:
    """A full cache whose next slot is the first one after prompts of that width.

    It is for rows that hold fewer tokens after their prompts than there are slots.
    """
    full = cache.slot >= cache.max_length
    return cache._replace(slot=jnp.where(full, width, cache.slot))


def layer_of(keys: jax.Array, values: jax.Array, max_length: int) -> Layer:
    """Keys and values [B, T, kv_heads, head_dim] in the layout of a cache, padded."""
    unused = [(0, 0), (0, 0), (0, max_length - keys.shape[1]), (0, 0)]
    return Layer(*(jnp.pad(jnp.swapaxes(x, 1, 2), unused) for x in (keys, values)))


def append(states: Layer, added: Layer, slot: jax.Array, live: jax.Array) -> Layer:
    """Write tokens of each row: keys and values [layers, B, kv_heads, M, head_dim].

    Tokens of rows that are not live are masked by their positions.
    """
    del live
    both = zip(states, added, strict=True)
    put = lax.dynamic_update_slice_in_dim
    return Layer(*(put(cached, new, slot, axis=-2) for cached, new in both))


def after(before: Layer, keys: jax.Array, values: jax.Array) -> list[jax.Array]:
    """Keys and values [B, M, kv_heads, head_dim] behind those of a layer."""
    both = zip(before, (keys, values), strict=True)
    return [jnp.concatenate([jnp.swapaxes(x, 1, 2), new], 1) for x, new in both]


def keys_and_values(layer: Layer, tokens: int) -> tuple[jax.Array, jax.Array]:
    """Keys and values of a layer's first tokens, [B, tokens, kv_heads, head_dim]."""
    first, second = (jnp.swapaxes(x[:, :, :tokens], 1, 2) for x in layer)
    return first, second


def advance(
    cache: Cache,
    layers: dict[str, Any],
    lengths: jax.Array,
    width: int,
    routes: jax.Array | None,
    tokens: jax.Array,
) -> Cache:
    """The cache after `lengths` [B] more tokens in `width` slots, with its states.

    Their routes [B, width, ...] and ids [B, width] are read if it records them.
    """
    offsets = jnp.arange(width, dtype=jnp.int32)
    positions = cache.lengths[:, None] + offsets
    positions = jnp.where(offsets < lengths[:, None], positions, -1)
    slot = cache.slot + width

    def put(old: Any, new: Any) -> Any:
        if old is None or new is None:
            return old
        return lax.dynamic_update_slice_in_dim(old, new, cache.slot, axis=1)

    return Cache(
        layers,
        put(cache.positions, positions),
        cache.lengths + lengths,
        slot,
        put(cache.routes, routes),
        put(cache.tokens, tokens),
    )


def routes_by_position(cache: Any) -> jax.Array | None:
    """Recorded routes `by_position`; None if a cache, maybe a user's, has none."""
    routes = getattr(cache, "routes", None)
    return None if routes is None else by_position(cache, routes)


def by_position(cache: Cache, recorded: jax.Array) -> jax.Array:
    """Records of slots [B, T, ...], reordered by tokens' positions in rows; 0: none."""
    positions = jnp.where(cache.filled, cache.positions, cache.max_length)
    rows, empty = jnp.arange(len(positions))[:, None], jnp.zeros_like(recorded)
    return empty.at[rows, positions].set(recorded, mode="drop")


def attend_in_place(
    query: jax.Array, token: Layer, cached: Cached, seen: jax.Array, *,
    scale: float, softcap: float | None = None, sinks: jax.Array | None = None,
) -> jax.Array:  # fmt: skip
    """`attend` of a layer, on one GPU in 16 bits by a kernel that reads it in place."""
    # XLA cannot partition a kernel: on a mesh, every device would need all rows.
    on_one_gpu = devices.backend() == "gpu" and partitioning.current() is None
    plain = functools.partial(attend, scale=scale, softcap=softcap, sinks=sinks)
    if not (on_one_gpu and devices.has_wgmma() and sinks is None):
        return plain(query, token, cached.layer, seen)
    from jaxmem.models.kernels import cached_attention  # Pallas takes a while to import

    batch, _, _, width = query.shape
    grouped = query.reshape(batch, token.keys.shape[1], -1, width)
    if not cached_attention.supports(grouped, cached.layers.keys):
        return plain(query, token, cached.layer, seen)
    own = token.keys[:, :, 0], token.values[:, :, 0]
    location = cached_attention.Place(cached.index, seen)
    mixed = cached_attention.attend(
        grouped, own, cached.layers, location, scale=scale, softcap=softcap
    )
    return mixed.reshape(query.shape)


def attend(
    query: jax.Array, token: Layer, layer: Layer, seen: jax.Array, *,
    scale: float | None = None, softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:  # fmt: skip
    """Attention of one new token per row to the cached tokens and to itself.

        out = Σ_t p_t v_t,   p = softmax(scale q·k),   t cached or new

    With a softcap, scores s become softcap·tanh(s / softcap) before the softmax. The
    new token is not in the cache yet, so that a layer only reads the cache: the tokens
    of all layers are written at once, after the last layer.

    Args:
        query: [B, 1, heads, head_dim], rotated.
        token: keys and values of the new tokens, [B, kv_heads, 1, head_dim].
        layer: cached keys and values, [B, kv_heads, T, head_dim].
        seen: [B, T] slots to attend to.
        scale: factor of the scores; None: 1 / sqrt(head_dim).
        softcap: bound of the scores; None: they are not capped.
        sinks: [heads] one more score of each head, without a value; None: none.
    """
    batch, _, heads, width = query.shape
    # Queries of one group become rows of one matrix, so keys are not copied per head.
    query = query.reshape(batch, token.keys.shape[1], -1, width)

    def scores(keys: jax.Array) -> jax.Array:
        scaled = jnp.einsum(
            "bkgd,bktd->bkgt", query, keys, preferred_element_type=jnp.float32
        )
        scaled = scaled * (width**-0.5 if scale is None else scale)
        return scaled if softcap is None else softcap * jnp.tanh(scaled / softcap)

    cached = jnp.where(seen[:, None, None], scores(layer.keys), -jnp.inf)
    parts = [cached, scores(token.keys)]
    if sinks is not None:
        taking = sinks.astype(jnp.float32).reshape(1, *query.shape[1:3], 1)
        parts.append(jnp.broadcast_to(taking, (batch, *taking.shape[1:])))
    both = jax.nn.softmax(jnp.concatenate(parts, axis=-1)).astype(query.dtype)
    weights = both[..., : cached.shape[-1] + 1]

    def mix(part: jax.Array, values: jax.Array) -> jax.Array:
        return jnp.einsum(
            "bkgt,bktd->bkgd", part, values, preferred_element_type=jnp.float32
        )

    old, own = weights[..., :-1], weights[..., -1:]
    mixed = mix(old, layer.values) + mix(own, token.values)
    return mixed.astype(query.dtype).reshape(batch, 1, heads, width)
