"""Rows that become long documents while they are decoded, and so are read again.

Beyond `rope_limit` tokens all of a document is rotated by its long factors. What the
cache has of a row that passes the limit was rotated by short ones, and deeper layers
read what came of it: the row is read once more, as a whole.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.models import kv_cache
from jaxmem.models.config import ModelConfig
from jaxmem.models.positions import Ids


def tokens(config: ModelConfig, ids: Ids) -> jax.Array | None:
    """Ids as a cache keeps them; None for a model that reads no row again."""
    return None if config.rope_long_factors is None else jnp.asarray(ids)


def longer(
    model: Any, cache: kv_cache.Cache, ids: jax.Array, counts: jax.Array
) -> kv_cache.Cache:
    """The cache before further tokens, with other states of rows that pass the limit.

    `ids` [B, M] are those of each row first, `counts` [B] how many a row has. What is
    recorded of routes stays.
    """
    limit, before = model.config.rope_limit, cache.tokens
    if before is None:
        return cache
    total = cache.lengths + counts
    passes = (cache.lengths <= limit) & (total > limit)

    def again(layers: dict[str, Any]) -> dict[str, Any]:
        places = cache.lengths[:, None] + jnp.arange(ids.shape[1])
        rows = jnp.arange(len(ids))[:, None]
        whole = kv_cache.by_place(cache, before)
        whole = whole.at[rows, places].set(ids, mode="drop")
        _, made = model.prefill(whole, total, cache.max_length)
        at = jnp.maximum(cache.positions, 0)[:, None, :, None]

        def one(old: jax.Array, new: jax.Array) -> jax.Array:
            new = jnp.take_along_axis(new, at[None], axis=-2)
            return jnp.where(passes[:, None, None, None], new, old)

        return jax.tree.map(one, layers, made.layers)

    some = jax.lax.cond(jnp.any(passes), again, lambda layers: layers, cache.layers)
    return cache._replace(layers=some)
