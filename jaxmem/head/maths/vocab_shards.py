"""Vocabulary sharding inside `jax.shard_map`: axes, varying types and sums.

There jax types each array by the mesh axes along which its values may vary. Loop
carries and custom derivatives must state these types explicitly. The cotangent of a
value that jax knows to be replicated must be summed over the shards exactly once; that
of a varying value must not be summed.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import ManualAxisType, NamedSharding, PartitionSpec

from jaxmem.base import messages


@dataclasses.dataclass(frozen=True)
class Shards:
    """The sharding of one call's vocabulary; `axes` are in the order of the shards."""

    axes: tuple[str, ...]  # mesh axes
    count: int
    # Axes along which hidden is known to be replicated: its cotangent is summed.
    same_hidden: tuple[str, ...] = ()
    # Axes along which row outputs are not known to be replicated: the cotangent that
    # arrives on each shard is only its own part.
    own_results: tuple[str, ...] = ()


def check_axis_name(axis_name) -> Shards:
    """The shards along axes, one name or several, of an enclosing `jax.shard_map`."""
    axes = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    named = axes and all(isinstance(axis, str) for axis in axes)
    if not named or len(set(axes)) < len(axes):
        raise TypeError(
            "axis_name must be the name of a mesh axis, or a tuple of different names, "
            f"got {messages.short(axis_name)}"
        )
    mesh = jax.sharding.get_abstract_mesh()
    if not set(axes) <= set(mesh.manual_axes):
        bound = ", ".join(map(repr, mesh.manual_axes))
        bound = f"which binds {bound}" if bound else "and there is none here"
        raise ValueError(
            f"axis_name={messages.short(axis_name)} must be bound by an enclosing "
            f"jax.shard_map, {bound}; for arrays that are not split by hand use "
            "jaxmem.sharding.parallel"
        )
    return Shards(axes, lax.axis_size(axes))


def check_split(shards: Shards, name: str, array) -> None:
    """Raise a ValueError if jax knows that a vocabulary axis replicates the array."""
    same = [a for a in shards.axes if _is_checked(a) and a not in varying(array)]
    if same:
        raise ValueError(
            f"{name} must be this shard's part of the vocabulary, but is the same "
            f"along mesh axis {same[0]!r}; split it in in_specs of jax.shard_map, as "
            f"in P({same[0]!r}, None) for [V, D]"
        )


def described(shards: Shards, hidden, rows) -> Shards:
    """Shards with axes along which hidden is replicated, and outputs of rows vary."""
    unknown = varying(rows)
    return dataclasses.replace(
        shards,
        same_hidden=tuple(
            a for a in shards.axes if _is_checked(a) and a not in varying(hidden)
        ),
        own_results=tuple(a for a in shards.axes if not _is_checked(a) or a in unknown),
    )


def varying(tree) -> frozenset[str]:
    """Mesh axes along which any of the arrays may vary, according to their types."""
    types = (jax.typeof(x).manual_axis_type for x in jax.tree.leaves(tree))
    return frozenset().union(*(t.varying for t in types))


def vary(tree, axes: frozenset[str]) -> Any:
    """Return the values with types that vary along `axes` too."""
    if not axes:
        return tree

    def vary_array(x):
        missing = tuple(sorted(axes - varying(x)))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary_array, tree)


def sum_hidden(shards: Shards | None, dhidden, dW, overlap: bool) -> tuple[Any, Any]:
    """The all-reduced cotangent of hidden, and that of W, in a fixed order.

    With overlap, the all-reduce overlaps the computation of dW. Otherwise it starts
    after that, because it would slow down a kernel that uses the whole chip.
    """
    if not (shards and shards.same_hidden):
        return dhidden, dW
    if overlap:
        return lax.optimization_barrier((lax.psum(dhidden, shards.same_hidden), dW))
    dhidden, dW = lax.optimization_barrier((dhidden, dW))
    return lax.psum(dhidden, shards.same_hidden), dW


def gather(axes: tuple[str, ...], part: jax.Array) -> jax.Array:
    """All devices' arrays along mesh axes, [devices, ...], bit for bit.

    The result is typed as replicated, which that of an all-gather is not. Integers are
    summed because the sum of floats would lose the sign of a zero.
    """
    integers = np.dtype(f"int{8 * part.dtype.itemsize}")
    bits = lax.bitcast_convert_type(part, integers)
    zeros = jnp.zeros((lax.axis_size(axes), *part.shape), integers)
    zeros, bits = vary((zeros, bits), varying(part) | frozenset(axes))
    placed = lax.dynamic_update_index_in_dim(zeros, bits, lax.axis_index(axes), 0)
    return lax.bitcast_convert_type(lax.psum(placed, axes), part.dtype)


def sum_tree(parts) -> jax.Array:
    """The sum of 2^n arrays, in a binary tree over their index."""
    parts = list(parts)
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def sum_rows_in_order(axes: tuple[str, ...], part: jax.Array) -> jax.Array:
    """`sum_tree` of all devices' arrays [N, D]; an all-reduce may add in any order.

    Each device adds a share of the rows, which an all-to-all gives it.
    """
    n_rows, count = part.shape[0], lax.axis_size(axes)
    padded = jnp.pad(part, ((0, -n_rows % count), (0, 0)))
    shares = padded.reshape(count, -1, part.shape[1])
    received = lax.all_to_all(shares, axes, 0, 0)
    return gather(axes, sum_tree(received)).reshape(padded.shape)[:n_rows]


def types(axes: frozenset[str]) -> dict:
    """Arguments of a ShapeDtypeStruct whose values vary along `axes`."""
    return {
        "sharding": NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec()),
        "manual_axis_type": ManualAxisType(varying=axes),
    }


def _is_checked(axis):
    """True if types carry varying axes: they do not under check_vma=False."""
    return axis in varying(lax.axis_index(axis))
