"""The cache of a decoder, and attention of one new token to cached keys and values.

Rows of a batch have prompts of different lengths, yet each step writes all rows at the
same slot. A row's prompt fills its first slots, and generated tokens follow the longest
prompt; the slots between are masked, and so are those of rows that have ended. Keys are
stored after the rotation, so a slot need not equal a position, and a step is one
in-place update without a scatter. Rows that are replaced by others start while others
go on: `wrapped` then reuses slots. Rows that read different numbers of tokens in a step
each have a slot of their own instead (`by_row`), and a step scatters.
"""

import functools
import math
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


class Seen(NamedTuple):
    """The tokens that M new ones of each row attend to."""

    cached: jax.Array  # [B, M or 1, T] bool, by the slots of those before them
    new: jax.Array | None = None  # [B, M, M] bool, of the new ones; None: no later ones


class Cache(NamedTuple):
    """The decoder's state after the tokens that it has processed.

    **Memory** of attention: 2 · layers · B · T · kv_heads · head_dim numbers of the
    compute dtype.
    """

    layers: dict[str, Any]  # the states of each stack of layers, by its name
    positions: jax.Array  # [B, T] int32 of the row's token in a slot; -1: none
    lengths: jax.Array  # [B] int32, tokens per row; the position of the next token
    # int32 slot of the next token: a scalar for all rows, or [B] of each, see `by_row`
    slot: jax.Array
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

    def seen_from(
        self, positions: jax.Array, window: jax.Array | int | None = None
    ) -> jax.Array:
        """The slots that later tokens at positions [B, M] attend to, [B, M, T] bool.

        The window of local layers, or [B, M] of each token, includes the token.
        """
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


def by_row(cache: Cache) -> Cache:
    """The cache of prompts with a slot for each row: tokens follow on its prompt.

    A row's tokens then have the slots of their positions.
    """
    return cache._replace(slot=cache.lengths)


def shortened(cache: Cache, lengths: jax.Array) -> Cache:
    """The cache after the first `lengths` [B] tokens of each row; others are masked.

    With a slot for each row, the next tokens take the slots of the masked ones.
    """
    dropped = cache.lengths - lengths
    return cache._replace(
        positions=jnp.where(cache.positions < lengths[:, None], cache.positions, -1),
        lengths=lengths,
        slot=cache.slot - dropped if cache.slot.ndim else cache.slot,
    )


def layer_of(keys: jax.Array, values: jax.Array, max_length: int) -> Layer:
    """Keys and values [B, T, kv_heads, head_dim] in the layout of a cache, padded."""
    unused = [(0, 0), (0, 0), (0, max_length - keys.shape[1]), (0, 0)]
    return Layer(*(jnp.pad(jnp.swapaxes(x, 1, 2), unused) for x in (keys, values)))


def append(states: Layer, added: Layer, slot: jax.Array, live: jax.Array) -> Layer:
    """Write tokens of each row: keys and values [layers, B, kv_heads, M, head_dim].

    Tokens of rows that are not live are masked by their positions.
    """
    del live
    put = _put_by_row if slot.ndim else _put_at_slot
    both = zip(states, added, strict=True)
    return Layer(*(put(cached, new, slot) for cached, new in both))


def _put_at_slot(cached: jax.Array, new: jax.Array, slot: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(cached, new, slot, axis=-2)


def _put_by_row(cached: jax.Array, new: jax.Array, slots: jax.Array) -> jax.Array:
    """States [layers, B, heads, T, width] with new ones [..., M, width] from `slots`.

    Those beyond the last slot are dropped.
    """
    # Indices of one axis: XLA would transpose the whole cache for others.
    *outer, room, width = cached.shape
    slots = slots[:, None] + jnp.arange(new.shape[-2], dtype=jnp.int32)  # [B, M]
    matrices = jnp.arange(math.prod(outer), dtype=jnp.int32).reshape(*outer, 1)
    index = slots[:, None] + matrices * room
    index = jnp.where(slots[:, None] < room, index, matrices.size * room)
    flat = cached.reshape(-1, width).at[index.reshape(-1)]
    put = flat.set(new.reshape(-1, width), mode="drop", unique_indices=True)
    return put.reshape(cached.shape)


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
    by_row = cache.slot.ndim == 1
    slot = cache.slot + (lengths if by_row else width)

    def put(old: Any, new: Any) -> Any:
        if old is None or new is None:
            return old
        if not by_row:
            return lax.dynamic_update_slice_in_dim(old, new, cache.slot, axis=1)
        rows = jnp.arange(len(old))[:, None]
        return old.at[rows, cache.slot[:, None] + offsets].set(new, mode="drop")

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
    query: jax.Array, new: Layer, cached: Cached, seen: Seen, *,
    scale: float, softcap: float | None = None, sinks: jax.Array | None = None,
) -> jax.Array:  # fmt: skip
    """`attend` of a layer, on one GPU in 16 bits by a kernel that reads it in place."""
    # XLA cannot partition a kernel: on a mesh, every device would need all rows.
    on_one_gpu = devices.backend() == "gpu" and partitioning.current() is None
    plain = functools.partial(attend, scale=scale, softcap=softcap, sinks=sinks)
    # The kernel has one mask for all new tokens of a row.
    one_mask = seen.cached.shape[1] == 1 and seen.new is None
    if not (on_one_gpu and devices.has_wgmma() and one_mask and sinks is None):
        return plain(query, new, cached.layer, seen)
    from jaxmem.models.kernels import cached_attention  # Pallas takes a while to import

    grouped = _by_head(query, new.keys.shape[1])
    if not cached_attention.supports(grouped, cached.layers.keys):
        return plain(query, new, cached.layer, seen)
    location = cached_attention.Place(cached.index, seen.cached[:, 0])
    mixed = cached_attention.attend(
        grouped,
        (new.keys, new.values),
        cached.layers,
        location,
        scale=scale,
        softcap=softcap,
    )
    return _by_token(mixed, query.shape)


def _by_head(query: jax.Array, kv_heads: int) -> jax.Array:
    """Queries [B, M, heads, head_dim] as [B, kv_heads, M · group, head_dim].

    Those of one key-value head become rows of one matrix, so keys are not copied.
    """
    batch, tokens, _, width = query.shape
    grouped = query.reshape(batch, tokens, kv_heads, -1, width).swapaxes(1, 2)
    return grouped.reshape(batch, kv_heads, -1, width)


def _by_token(mixed: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `_by_head`, for queries of a shape [B, M, heads, head_dim]."""
    batch, tokens, _, width = shape
    grouped = mixed.reshape(batch, mixed.shape[1], tokens, -1, width)
    return grouped.swapaxes(1, 2).reshape(shape)


def attend(
    query: jax.Array, new: Layer, layer: Layer, seen: Seen, *,
    scale: float | None = None, softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:  # fmt: skip
    """Attention of M new tokens per row to the cached tokens and to each other.

        out = Σ_t p_t v_t,   p = softmax(scale q·k),   t cached, or new and no later

    With a softcap, scores s become softcap·tanh(s / softcap) before the softmax. The
    new tokens are not in the cache yet, so that a layer only reads the cache: the
    tokens of all layers are written at once, after the last layer.

    Args:
        query: [B, M, heads, head_dim], rotated.
        new: keys and values of the new tokens, [B, kv_heads, M, head_dim].
        layer: cached keys and values, [B, kv_heads, T, head_dim].
        seen: tokens to attend to.
        scale: factor of the scores; None: 1 / sqrt(head_dim).
        softcap: bound of the scores; None: they are not capped.
        sinks: [heads] one more score of each head, without a value; None: none.
    """
    batch, tokens, heads, width = shape = query.shape
    query = _by_head(query, new.keys.shape[1])

    def scores(keys: jax.Array) -> jax.Array:
        scaled = jnp.einsum(
            "bkqd,bktd->bkqt", query, keys, preferred_element_type=jnp.float32
        )
        scaled = scaled * (width**-0.5 if scale is None else scale)
        return scaled if softcap is None else softcap * jnp.tanh(scaled / softcap)

    causal = jnp.tril(jnp.ones((1, tokens, tokens), bool))
    masks = seen.cached, causal if seen.new is None else seen.new
    group = heads // new.keys.shape[1]
    parts = []
    for mask, keys in zip(masks, (layer.keys, new.keys), strict=True):
        of_queries = mask if mask.shape[1] == 1 else jnp.repeat(mask, group, axis=1)
        parts.append(jnp.where(of_queries[:, None], scores(keys), -jnp.inf))
    slots = layer.keys.shape[2]
    if sinks is not None:
        by_head = sinks.astype(jnp.float32).reshape(1, 1, -1, 1)
        every = jnp.broadcast_to(by_head, (batch, tokens, heads, 1))
        parts.append(_by_head(every, new.keys.shape[1]))
    weights = jax.nn.softmax(jnp.concatenate(parts, axis=-1)).astype(query.dtype)

    def mix(part: jax.Array, values: jax.Array) -> jax.Array:
        return jnp.einsum(
            "bkqt,bktd->bkqd", part, values, preferred_element_type=jnp.float32
        )

    mixed = mix(weights[..., :slots], layer.values)
    mixed = mixed + mix(weights[..., slots : slots + tokens], new.values)
    return _by_token(mixed.astype(query.dtype), shape)
