"""Types of operands and results of kernels inside `jax.shard_map`."""

from typing import Any

import jax

from jaxmem.core import shards as _shards


def alike(*operands: jax.Array) -> tuple[jax.Array, ...]:
    """The operands, typed as varying along the mesh axes of any of them."""
    return _shards.vary(operands, _shards.varying(operands))


def result(shape: tuple[int, ...], dtype: Any, *operands: jax.Array) -> Any:
    """A result's shape and type, varying as the operands do."""
    axes = _shards.varying(operands)
    types = _shards.types(axes) if axes else {}
    return jax.ShapeDtypeStruct(shape, dtype, **types)
