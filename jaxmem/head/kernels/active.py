"""Active rows, gathered into blocks for kernel launches; results, scattered back."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxmem.head.maths import backend_operands


class RowBlock(NamedTuple):
    """Rows of one launch, or of several."""

    ids: jax.Array  # int32 [size]; past the end where there is no active row
    n_active: jax.Array  # int32
    position: jax.Array  # int32 [N], index of each row in ids; size where absent


def for_each_block(
    active, size: int, body: Callable[[RowBlock, Any], Any], carry
) -> Any:
    """Loop `carry = body(block of size rows, carry)` over all active rows."""
    n_blocks = -(-active.shape[0] // size)
    all_rows = in_one_block(active, n_blocks * size)
    if n_blocks == 1:  # without a loop, XLA is free to choose layouts
        return body(all_rows, carry)

    def step(i, carry):
        start = i * size
        ids = lax.dynamic_slice(all_rows.ids, (start,), (size,))
        position = all_rows.position - start
        inside = (position >= 0) & (position < size)
        position = jnp.where(inside, position, size)
        n_active = jnp.clip(all_rows.n_active - start, 0, size)
        return body(RowBlock(ids, n_active, position), carry)

    return lax.fori_loop(0, n_blocks, step, carry)


def in_one_block(active, size: int) -> RowBlock:
    """One block with all active rows of N, of which there are at most size."""
    position = jnp.cumsum(active, dtype=jnp.int32) - 1
    n_active = jnp.max(position, initial=-1) + 1
    position = jnp.where(active, position, size)
    ids = jnp.full(size, active.shape[0], jnp.int32)
    row_ids = jnp.arange(active.shape[0], dtype=jnp.int32)
    ids = backend_operands.put(ids, position, row_ids)
    return RowBlock(ids, n_active, position)


def put(tree, block: RowBlock, values) -> Any:
    """Arrays [N] of a tree, updated with values [size] of the block's active rows.

    Each row gathers its value: one pass on a GPU, where a scatter takes several.
    """
    in_block = block.position < block.ids.shape[0]

    def gathered(x, new):
        values = backend_operands.take(new, block.position)
        return jnp.where(in_block, values.astype(x.dtype), x)

    return jax.tree.map(gathered, tree, values)
