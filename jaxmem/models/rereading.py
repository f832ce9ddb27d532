"""Rows that become long documents while they are decoded, and so are read again.

Beyond `rope.limit` tokens all of a document is rotated by long factors. Cached keys of
a row that passes the limit were rotated by short ones, and deeper layers read results
of attention to these: the row is read once more, as a whole.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.models import kv_cache
from jaxmem.models.config import ModelConfig
from jaxmem.models.positions import Ids


def tokens(config: ModelConfig, ids: Ids) -> jax.Array | None:
    """Ids as a cache keeps them; None for a model that reads no row again."""
    return None if config.rope.long_factors is None else jnp.asarray(ids)


def longer(
    model: Any, cache: kv_cache.Cache, ids: jax.Array, counts: jax.Array
) -> kv_cache.Cache:
    """The cache before further tokens, with other states of rows that pass the limit.

    `ids` [B, M] has the tokens of each row first, and `counts` [B] is their number.
    Recorded routes stay.
    """
    limit, before = model.config.rope.limit, cache.tokens
    if before is None:
        return cache
    total = cache.lengths + counts
    passes = (cache.lengths <= limit) & (total > limit)

    def again(layers: dict[str, Any]) -> dict[str, Any]:
        positions = cache.lengths[:, None] + jnp.arange(ids.shape[1])
        rows = jnp.arange(len(ids))[:, None]
        whole = kv_cache.by_position(cache, before)
        whole = whole.at[rows, positions].set(ids, mode="drop")
        _, other = model.prefill(whole, total, cache.max_length)
        index = jnp.maximum(cache.positions, 0)[:, None, :, None]

        def replace(old: jax.Array, new: jax.Array) -> jax.Array:
            new = jnp.take_along_axis(new, index[None], axis=-2)
            return jnp.where(passes[:, None, None, None], new, old)

        return jax.tree.map(replace, layers, other.layers)

    some = jax.lax.cond(jnp.any(passes), again, lambda layers: layers, cache.layers)
    return cache._replace(layers=some)
