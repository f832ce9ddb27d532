"""Types of operands and results of kernels inside `jax.shard_map`."""

from collections.abc import Callable
from typing import Any

import jax

from jaxmem.core import vocab_shards


def alike(*operands: jax.Array) -> tuple[jax.Array, ...]:
    """The operands, typed as varying along the mesh axes of any of them."""
    return vocab_shards.vary(operands, vocab_shards.varying(operands))


def run(kernel: Callable[..., Any], *operands: jax.Array) -> Any:
    """The results of a kernel, typed as varying along its operands' mesh axes.

    `plgpu.kernel` checks no such types, and gives its results none.
    """
    return vocab_shards.vary(kernel(*alike(*operands)), vocab_shards.varying(operands))
