"""Sequence-parallel attention: all-to-alls between token and head sharding.

Outside of attention each device holds some tokens of all heads. An all-to-all before
attention gives it all tokens of some heads, and another one afterwards reverses that.

Reference: Jacobs et al., "DeepSpeed Ulysses", 2023, arXiv:2309.14509.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxmem.models import partitioning

AXIS = "sequence"
_HEADS = PartitionSpec(partitioning.ROWS, AXIS, "tensor", None)


def attend(
    attention: Callable,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    sight: Any,
    by_head: jax.Array | None = None,
) -> jax.Array:
    """Compute `attention(query, key, value, sight, by_head)` of whole sequences.

    Arrays are [B, T, heads, head_dim]; with fewer kv_heads than devices along the axis
    "sequence", each head is sent to several devices. `sight` is a pytree of arrays [B,
    ...] of whole sequences, and of scalars; `by_head` is [heads] of queries, or None.

    Raises:
        ValueError: the number of tokens or heads is not divisible by the devices.
    """
    around = partitioning.current()
    if around is None or around.shape[AXIS] == 1:
        return attention(query, key, value, sight, by_head)
    parts, tensor = around.shape[AXIS], around.shape["tensor"]
    _check_divides("tokens of a row", query.shape[1], parts, f"mesh.sequence={parts}")
    sizes = f"mesh.sequence={parts} x mesh.tensor={tensor}"
    _check_divides("model.heads", query.shape[2], parts * tensor, sizes)
    _check_divides("model.kv_heads", key.shape[2], tensor, f"mesh.tensor={tensor}")
    kv_heads = key.shape[2] // tensor
    copies = parts // math.gcd(parts, kv_heads)
    _check_divides("model.heads", query.shape[2] // tensor, kv_heads * copies, sizes)

    move = functools.partial(lax.all_to_all, tiled=True)

    def on_device(query, key, value, sight, by_head):
        key, value = (jnp.repeat(x, copies, axis=2) for x in (key, value))
        # Reshard [b, T/k, H, ...] to [b, T, H/k, ...], and back.
        query, key, value = (move(x, AXIS, 2, 1) for x in (query, key, value))
        return move(attention(query, key, value, sight, by_head), AXIS, 1, 2)

    def spec(x):
        return PartitionSpec(partitioning.ROWS) if jnp.ndim(x) else PartitionSpec()

    return jax.shard_map(
        on_device,
        in_specs=(
            _HEADS, _HEADS, _HEADS, jax.tree.map(spec, sight),
            None if by_head is None else PartitionSpec(("tensor", AXIS)),
        ),
        out_specs=_HEADS,
        # No output is replicated along an axis with more than one device.
        check_vma=False,
    )(query, key, value, sight, by_head)  # fmt: skip


def _check_divides(what, size, parts, sizes):
    if size % parts:
        raise ValueError(f"{sizes} must divide {what}, got {size}")
