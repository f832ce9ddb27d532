"""A call's tokens, shared out over the devices of a program that jit partitions.

XLA can split neither a loop over rows that it gathers nor a kernel written by hand: of
arrays in parts, every device would be given all tokens. So XLA is told what it cannot
see: tokens do not depend on each other. Each device takes some of them, has all of W,
and what is summed over tokens is then summed over devices.
"""

import functools
import hashlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxmem import devices as _devices


def is_possible() -> bool:
    """Whether XLA is to partition what is traced now.

    Inside `jax.shard_map` each device already has its own part.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return _devices.count() > 1 and AxisType.Manual not in mesh.axis_types


def by_tokens(run: Callable, given: Any, made: Any) -> Callable:
    """run with its tokens shared out, if jit comes to lower it for several devices.

    Args:
        run: arrays to arrays, for any number of tokens.
        given: of its arguments, a prefix: True for arrays whose first axis is tokens,
            False for those that every device needs whole.
        made: of its results, a prefix: True likewise, False for sums over tokens.
    """

    def call(*args):
        if jax.config.jax_remove_custom_partitioning_ptr_from_cache_key:
            return _split(
                lambda _, *args: run(*args), (False, *given), made,
                (_fingerprint(run, args), *args),
            )  # fmt: skip
        return _split(run, given, made, args)

    return call


def _split(run, given, made, args):
    """run(*args), of which XLA asks `_partition` what each device is to do."""
    leaves, tree = jax.tree.flatten(args)
    shapes, out_tree = jax.tree.flatten(jax.eval_shape(run, *args))
    of_tokens = _flags(given, args)
    made_of_tokens = _flags(made, out_tree.unflatten(shapes))

    def flat(*leaves):
        return tuple(jax.tree.leaves(run(*tree.unflatten(leaves))))

    made = tuple(zip(shapes, made_of_tokens, strict=True))
    split = custom_partitioning(flat)
    split.def_partition(
        functools.partial(
            _partition, flat, jax.sharding.get_abstract_mesh(), of_tokens, made
        ),
        # Asked for only where the older partitioner is chosen.
        infer_sharding_from_operands=lambda mesh, arguments, results: tuple(
            NamedSharding(mesh, PartitionSpec()) for _ in results
        ),
        sharding_rule=_rule(leaves, of_tokens, "a")
        + " -> "
        + _rule(shapes, made_of_tokens, "r"),
    )
    return out_tree.unflatten(split(*leaves))


def _fingerprint(run, args):
    """A constant that tells programs apart which jax's compilation cache could not.

    It knows what XLA is to ask about by an address alone, which that option of jax
    takes out of its keys: a program would be found for another of the same arrays.
    """
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    text = jax.jit(run).lower(*shapes).as_text()
    digest = hashlib.sha256(text.encode()).digest()
    return np.frombuffer(digest, np.int32)


def _partition(flat, traced_on, of_tokens, made, mesh, arguments, _):
    """What XLA asks: (mesh, what a device does, where results and arguments lie)."""
    made_of_tokens = [flag for _, flag in made]
    tokens = [x for x, flag in zip(arguments, of_tokens, strict=True) if flag]
    axes = _axes(mesh, tokens[0])

    def on_device(*leaves):
        # XLA asks while the caller's mesh is set, whose axes may be explicit.
        with jax.sharding.use_abstract_mesh(traced_on):
            results = [
                x if flag or not axes else lax.psum(x, axes)
                for x, flag in zip(flat(*leaves), made_of_tokens, strict=True)
            ]
            # A type may follow from how many tokens there are.
            return tuple(
                x.astype(like.dtype) for x, (like, _) in zip(results, made, strict=True)
            )

    def placed(flags):
        parts, whole = PartitionSpec(axes or None), PartitionSpec()
        return tuple(NamedSharding(mesh, parts if flag else whole) for flag in flags)

    return mesh, on_device, placed(made_of_tokens), placed(of_tokens)


def _flags(prefix, tree) -> list[bool]:
    return jax.tree.leaves(jax.tree.broadcast(prefix, tree))


def _axes(mesh, tokens) -> tuple[str, ...]:
    """Mesh axes that share the tokens out: theirs, and all others that divide them."""
    spec = tuple(getattr(tokens.sharding, "spec", ()))
    own = spec[0] if spec else None
    own = (own,) if isinstance(own, str) else tuple(own or ())
    chosen, parts = (), 1
    for axis in (*own, *(name for name in mesh.axis_names if name not in own)):
        if tokens.shape[0] % (parts * mesh.shape[axis]) == 0:
            chosen, parts = (*chosen, axis), parts * mesh.shape[axis]
    return chosen


def _rule(arrays, of_tokens, letter) -> str:
    """One factor for the tokens of all arrays; every other axis is its own."""
    return ", ".join(
        " ".join(
            "n" if flag and j == 0 else f"{letter}{i}_{j}" for j in range(len(x.shape))
        )
        for i, (x, flag) in enumerate(zip(arrays, of_tokens, strict=True))
    )
