"""A vocabulary split over the devices of a mesh, inside `jax.shard_map`.

jax types each array there by the mesh axes along which devices may hold different
numbers. Loops, and derivatives with rules of their own, need those types spelled out;
what jax then knows to be the same on all shards has a derivative that must be summed
over them once, and what it does not know to be the same must not be.
"""

import dataclasses
from typing import Any

import jax
from jax import lax
from jax.sharding import ManualAxisType, NamedSharding, PartitionSpec

from jaxmem.core import messages


@dataclasses.dataclass(frozen=True)
class Shards:
    """How one call's vocabulary is split; axes are in the order of their shards."""

    axes: tuple[str, ...]  # of the mesh
    count: int
    # Known to have the same hidden states, so that their cotangent is to be summed.
    same_hidden: tuple[str, ...] = ()
    # Not known to have the same results, each of whose cotangents is then a part.
    own_results: tuple[str, ...] = ()


def check_axis_name(axis_name) -> Shards | None:
    """One axis of an enclosing `jax.shard_map`, or several; None where none is named.

    Raises:
        TypeError: not a name or a tuple of names.
        ValueError: no such axis here.
    """
    if axis_name is None:
        return None
    axes = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    named = axes and all(isinstance(axis, str) for axis in axes)
    if not named or len(set(axes)) < len(axes):
        raise TypeError(
            "axis_name must be the name of a mesh axis, or a tuple of different names, "
            f"got {messages.short(axis_name)}"
        )
    mesh = jax.sharding.get_abstract_mesh()
    if not set(axes) <= set(mesh.manual_axes):
        there = ", ".join(map(repr, mesh.manual_axes))
        there = f"which binds {there}" if there else "and there is none here"
        raise ValueError(
            f"axis_name={messages.short(axis_name)} must be bound by an enclosing "
            f"jax.shard_map, {there}; for arrays that are not split by hand use "
            "jaxmem.sharding.parallel"
        )
    return Shards(axes, lax.axis_size(axes))


def check_split(shards: Shards, name: str, array) -> None:
    """An array that jax knows to be whole, or the same part, on every shard."""
    same = [a for a in shards.axes if _is_checked(a) and a not in varying(array)]
    if same:
        raise ValueError(
            f"{name} must be this shard's part of the vocabulary, but is the same "
            f"along mesh axis {same[0]!r}; split it in in_specs of jax.shard_map, as "
            f"in P({same[0]!r}, None) for [V, D]"
        )


def described(shards: Shards, hidden, rows) -> Shards:
    """With what is known of hidden states, and of what decides on the results."""
    unknown = varying(rows)
    return dataclasses.replace(
        shards,
        same_hidden=tuple(
            a for a in shards.axes if _is_checked(a) and a not in varying(hidden)
        ),
        own_results=tuple(a for a in shards.axes if not _is_checked(a) or a in unknown),
    )


def varying(tree) -> frozenset[str]:
    """Mesh axes along which any of the arrays may differ, by their types."""
    types = (jax.typeof(x).manual_axis_type for x in jax.tree.leaves(tree))
    return frozenset().union(*(t.varying for t in types))


def vary(tree, axes: frozenset[str]) -> Any:
    """The same numbers, typed as if they might differ along axes too."""

    def one(x):
        missing = tuple(sorted(axes - varying(x)))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(one, tree)


def sum_hidden(shards: Shards | None, dhidden, dW, overlap: bool) -> tuple[Any, Any]:
    """hidden's cotangent of all shards, and W's; XLA is told which comes first.

    Args:
        overlap: whether the sum is to run while dW is computed. Else it would slow a
            kernel that takes the whole chip, and comes after it.
    """
    if not (shards and shards.same_hidden):
        return dhidden, dW
    if overlap:
        return lax.optimization_barrier((lax.psum(dhidden, shards.same_hidden), dW))
    dhidden, dW = lax.optimization_barrier((dhidden, dW))
    return lax.psum(dhidden, shards.same_hidden), dW


def types(axes: frozenset[str]) -> dict:
    """What makes a ShapeDtypeStruct differ along axes."""
    return {
        "sharding": NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec()),
        "manual_axis_type": ManualAxisType(varying=axes),
    }


def _is_checked(axis):
    """Whether types tell anything: not under check_vma=False."""
    return axis in varying(lax.axis_index(axis))
