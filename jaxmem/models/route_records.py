"""Routes: experts of each token, recorded by a sampler and replayed by a trainer.

Routes are integers [B, T, layers with experts, experts.per_token].
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.models.config import ModelConfig
from jaxmem.models.structure import Stack


def layers(config: ModelConfig) -> list[int]:
    """Indices of the layers that have routers."""
    kinds = config.by_layer("feed_forwards")
    return [layer for layer, kind in enumerate(kinds) if kind != "dense"]


def dtype(config: ModelConfig) -> np.dtype:
    """The type of routes: one byte, or two for more than 256 experts."""
    return np.dtype(np.uint8 if (config.experts.count or 0) <= 256 else np.uint16)


def struct(config: ModelConfig, shape: tuple[int, int]) -> jax.ShapeDtypeStruct:
    """The routes of tokens [B, T]."""
    each = len(layers(config)), config.experts.per_token
    return jax.ShapeDtypeStruct((*shape, *each), dtype(config))


def check(config: ModelConfig) -> None:
    """Raise a ValueError unless a model of `ModelConfig` has routers."""
    if config.experts.count is not None:
        return
    what = "a model without experts"
    if config.factory is not None:
        what = f"model.factory={config.factory!r}, whose experts are not recorded"
    raise ValueError(f"grpo.replay_routing=True must stay False for {what}")


def of_layers(
    chosen: Mapping[tuple[int, ...], jax.Array | None], config: ModelConfig
) -> jax.Array | None:
    """Routes from the choices of all layers; None if there are none.

    `chosen` has, by the numbers of some layers, an array [some layers, B, T,
    experts.per_token], or None where they have no routers.
    """
    present = {layers: x for layers, x in chosen.items() if x is not None}
    if not present:
        return None
    order = np.argsort(np.concatenate(list(present)))
    joined = jnp.concatenate(list(present.values()))[order]
    return jnp.moveaxis(joined, 0, 2).astype(dtype(config))


def of_layer(
    routes: Any, stack: Stack, layer: jax.Array, config: ModelConfig
) -> jax.Array | None:
    """The recorded experts of a layer, int32 [B, T, experts.per_token].

    None where nothing is recorded, or the layers of its stack have no routers.
    """
    if routes is None or stack.config.experts.count is None:
        return None
    index = jnp.searchsorted(np.array(layers(config)), layer)
    chosen = jax.lax.dynamic_index_in_dim(routes, index, axis=2, keepdims=False)
    return chosen.astype(jnp.int32)
