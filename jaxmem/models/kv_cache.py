"""Keys and values of the tokens seen so far, and attention of one more token to them.

Rows of a batch have prompts of several lengths, yet every row writes into the same
slot: a row's prompt lies in the first slots, what it generates in those after the
longest prompt, and what is between is masked. Keys carry their rotary angle already,
so slots need not be positions, and a step is one update in place, without a scatter.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Layer(NamedTuple):
    """Keys and values of one layer, or of all layers on a leading axis.

    Heads come before slots: a step multiplies one matrix [T, head_dim] a row and head.
    """

    keys: jax.Array  # [B, kv_heads, T, head_dim], rotated
    values: jax.Array  # likewise


class Cache(NamedTuple):
    """What a decoder remembers of the tokens it has seen.

    **Memory**: 2 · layers · B · T · kv_heads · head_dim numbers of the compute type.
    """

    layers: Layer  # of all layers, [layers, B, kv_heads, T, head_dim]
    filled: jax.Array  # [B, T] bool, which slots hold a token of the row
    lengths: jax.Array  # [B] int32, tokens of each row; the next one's position
    slot: jax.Array  # int32 scalar, where the next token of every row goes

    @property
    def max_length(self) -> int:
        """Slots in a row, T."""
        return self.filled.shape[1]

    def seen(self, window: int | None = None) -> jax.Array:
        """[B, T] bool, slots that the next token sees, itself counting to `window`."""
        if window is None:
            return self.filled
        position = jnp.cumsum(self.filled, axis=1) - 1
        return self.filled & (self.lengths[:, None] - position < window)


def of_prompts(layers: Layer, lengths: jax.Array, width: int) -> Cache:
    """A cache after prompts of some lengths, in rows `width` tokens wide."""
    slots = jnp.arange(layers.keys.shape[-2])
    return Cache(
        layers, slots < lengths[:, None], lengths, jnp.asarray(width, jnp.int32)
    )


def layer_of(keys: jax.Array, values: jax.Array, max_length: int) -> Layer:
    """Keys and values [B, T, kv_heads, head_dim] as a cache holds them."""
    unused = [(0, 0), (0, 0), (0, max_length - keys.shape[1]), (0, 0)]
    return Layer(*(jnp.pad(jnp.swapaxes(x, 1, 2), unused) for x in (keys, values)))


def append(cache: Cache, token: Layer) -> Cache:
    """Add one token a row: keys and values [layers, B, kv_heads, 1, head_dim]."""
    layers = (
        lax.dynamic_update_slice_in_dim(cached, new, cache.slot, axis=-2)
        for cached, new in zip(cache.layers, token, strict=True)
    )
    filled = jnp.ones((cache.filled.shape[0], 1), bool)
    return Cache(
        Layer(*layers),
        lax.dynamic_update_slice_in_dim(cache.filled, filled, cache.slot, axis=1),
        cache.lengths + 1,
        cache.slot + 1,
    )


def attend(
    query: jax.Array, token: Layer, layer: Layer, seen: jax.Array, *,
    scale: float | None = None, softcap: float | None = None,
) -> jax.Array:  # fmt: skip
    """Attention of one new token a row to the cached ones and to itself.

        out = Σ_t p_t v_t,   p = softmax(scale q·k),   t cached or new

    With a softcap, scores s become softcap·tanh(s / softcap) before the softmax.

    The new token stays outside the cache here, so that a layer only reads it: all
    layers write theirs at once, after the last.

    Args:
      query: [B, 1, heads, head_dim], rotated.
      token: keys and values of the same tokens, [B, kv_heads, 1, head_dim].
      layer: the cached ones, [B, kv_heads, T, head_dim].
      seen: [B, T] which slots to see.
      scale: of the scores; None: 1 / sqrt(head_dim).
      softcap: that scores stay below; None: they are not capped.

    Returns:
      An array like `query`.
    """
    batch, _, heads, width = query.shape
    # Queries of a group share their keys: rows of one matrix, no copy a head.
    query = query.reshape(batch, token.keys.shape[1], -1, width)

    def scores(keys: jax.Array) -> jax.Array:
        made = jnp.einsum(
            "bkgd,bktd->bkgt", query, keys, preferred_element_type=jnp.float32
        )
        made = made * (width**-0.5 if scale is None else scale)
        return made if softcap is None else softcap * jnp.tanh(made / softcap)

    cached = jnp.where(seen[:, None, None], scores(layer.keys), -jnp.inf)
    both = jnp.concatenate([cached, scores(token.keys)], axis=-1)
    weights = jax.nn.softmax(both).astype(query.dtype)

    def mix(part: jax.Array, values: jax.Array) -> jax.Array:
        return jnp.einsum(
            "bkgt,bktd->bkgd", part, values, preferred_element_type=jnp.float32
        )

    old, own = weights[..., :-1], weights[..., -1:]
    mixed = mix(old, layer.values) + mix(own, token.values)
    return mixed.astype(query.dtype).reshape(batch, 1, heads, width)
