"""Finds arrays whose numbers are not finite."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.base import processes


def not_finite(state: Any) -> list[str]:
    """Names of a pytree's arrays, sharded in any way, that hold NaN or infinity."""
    named = {
        name: leaf
        for name, leaf in by_name(state).items()
        if jnp.issubdtype(leaf.dtype, jnp.inexact)
    }
    # One at a time: concurrent programs over several CPU devices can deadlock, each
    # holding threads that another one waits for.
    bad = [name for name, x in named.items() if not jax.device_get(_is_finite(x))]
    return sorted(processes.share(dict.fromkeys(bad)))


def _is_finite(array: Any) -> Any:
    if isinstance(array, np.ndarray):
        return np.isfinite(array.astype(np.float32, copy=False)).all()
    if array.sharding.memory_kind in (
        None,
        jax.local_devices()[0].default_memory().kind,
    ):
        return _all_finite(array)
    shards = (shard.data for shard in array.addressable_shards)  # in the host's memory
    return all(_is_finite(np.asarray(shard)) for shard in shards)


@jax.jit
def _all_finite(array: jax.Array) -> jax.Array:
    return jnp.isfinite(array).all()


def by_name(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree by path, keys joined by "/" as orbax names them."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(k, simple=True, separator="/"): x for k, x in leaves}
