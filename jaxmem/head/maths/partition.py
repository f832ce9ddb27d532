"""Token-parallel partitioning of a call inside a program that jit partitions.

XLA can partition neither a loop over gathered rows nor a hand-written kernel: it
would all-gather sharded operands, and every device would process all tokens. Tokens
are independent of each other, which XLA cannot see. `custom_partitioning` states it:
each device processes a share of the tokens with a replicated W, and sums over tokens
are all-reduced.
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

from jaxmem import devices


def is_possible() -> bool:
    """True if XLA may partition the program that is being traced.

    It may not inside `jax.shard_map`, where each device already has its own shard.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return devices.count() > 1 and AxisType.Manual not in mesh.axis_types


def by_tokens(run: Callable, of_tokens: Callable[[Any], Any]) -> Callable:
    """Wrap `run` so that jit partitions it by tokens when it targets several devices.

    `of_tokens` maps the arguments, or shapes of the results, to a tree prefix of them:
    True for arrays whose first axis is tokens, False for arguments that are replicated
    and results that are sums over tokens.
    """

    def call(*args):
        flags = of_tokens(args)
        if jax.config.jax_remove_custom_partitioning_ptr_from_cache_key:
            return _run_partitioned(
                lambda _, *args: run(*args), (False, *flags), of_tokens,
                (_fingerprint(run, args), *args),
            )  # fmt: skip
        return _run_partitioned(run, flags, of_tokens, args)

    return call


def _run_partitioned(run, args_flags, flags_of, args):
    """Call `run(*args)` so that XLA asks `_partition` how to partition it."""
    leaves, tree = jax.tree.flatten(args)
    results = jax.eval_shape(run, *args)
    shapes, out_tree = jax.tree.flatten(results)
    of_tokens, flags = (
        _broadcast_flags(args_flags, args),
        _broadcast_flags(flags_of(results), results),
    )

    def flat(*leaves):
        return tuple(jax.tree.leaves(run(*tree.unflatten(leaves))))

    shapes_and_flags = tuple(zip(shapes, flags, strict=True))
    mesh = jax.sharding.get_abstract_mesh()
    operands, results = (
        _sharding_rule(leaves, of_tokens, "a"),
        _sharding_rule(shapes, flags, "r"),
    )
    split = custom_partitioning(flat)
    split.def_partition(
        functools.partial(_partition, flat, mesh, of_tokens, shapes_and_flags),
        # Only the older GSPMD partitioner calls this.
        infer_sharding_from_operands=lambda mesh, arguments, results: tuple(
            NamedSharding(mesh, PartitionSpec()) for _ in results
        ),
        sharding_rule=f"{operands} -> {results}",
    )
    return out_tree.unflatten(split(*leaves))


def _fingerprint(run, args):
    """A constant that gives different programs different compilation-cache keys.

    The option `jax_remove_custom_partitioning_ptr_from_cache_key` removes the pointer
    that alone tells two programs with the same operands apart.
    """
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    text = jax.jit(run).lower(*shapes).as_text()
    digest = hashlib.sha256(text.encode()).digest()
    return np.frombuffer(digest, np.int32)


def _partition(flat, traced_on, of_tokens, shapes_and_flags, mesh, arguments, _):
    """Answer XLA: (mesh, per-device function, shardings of results, of arguments)."""
    shapes, flags = zip(*shapes_and_flags, strict=True)
    tokens = [x for x, flag in zip(arguments, of_tokens, strict=True) if flag]
    axes = _token_axes(mesh, tokens[0])

    def on_device(*leaves):
        # XLA asks while the caller's mesh is set, which may have explicit axes.
        with jax.sharding.use_abstract_mesh(traced_on):
            results = [
                x if flag or not axes else lax.psum(x, axes)
                for x, flag in zip(flat(*leaves), flags, strict=True)
            ]
            # The dtype of a result may depend on the number of tokens.
            pairs = zip(results, shapes, strict=True)
            return tuple(x.astype(like.dtype) for x, like in pairs)

    def shardings(flags):
        parts, whole = PartitionSpec(axes or None), PartitionSpec()
        return tuple(NamedSharding(mesh, parts if flag else whole) for flag in flags)

    return mesh, on_device, shardings(flags), shardings(of_tokens)


def _broadcast_flags(prefix, tree) -> list[bool]:
    return jax.tree.leaves(jax.tree.broadcast(prefix, tree))


def _token_axes(mesh, tokens) -> tuple[str, ...]:
    """Mesh axes to shard tokens over: their own, then all others that divide them."""
    spec = tuple(getattr(tokens.sharding, "spec", ()))
    own = spec[0] if spec else None
    own = (own,) if isinstance(own, str) else tuple(own or ())
    chosen, parts = (), 1
    for axis in (*own, *(name for name in mesh.axis_names if name not in own)):
        if tokens.shape[0] % (parts * mesh.shape[axis]) == 0:
            chosen, parts = (*chosen, axis), parts * mesh.shape[axis]
    return chosen


def _sharding_rule(arrays, of_tokens, letter) -> str:
    """The sharding rule: one factor for all token axes, one for each other axis."""
    return ", ".join(
        " ".join(
            "n" if flag and j == 0 else f"{letter}{i}_{j}" for j in range(len(x.shape))
        )
        for i, (x, flag) in enumerate(zip(arrays, of_tokens, strict=True))
    )
