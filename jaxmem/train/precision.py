"""Bits of the trained weights: lines about their type and about updates it loses."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmem.base import checksums
from jaxmem.models import coded_weights
from jaxmem.train.state import finite

# In float32, half the spacing at a magnitude of 256, above which few weights are.
_NEVER_LOST = 2.0**-16


def types(weights: Any) -> str:
    """Names of the types of weights, such as "bfloat16 and float32".

    A coded matrix is of its base, as in "bfloat16 and nf4".
    """
    names = {
        coded_weights.base_of(x) if coded_weights.is_coded(path) else str(x.dtype)
        for path, x in finite.by_name(weights).items()
        if coded_weights.count_weights(path, x)
    }
    return " and ".join(sorted(names))


def described(trained: Any, frozen: Any, compute_type: str) -> str:
    """A line about the weights of a run: how many there are, and in which types."""
    line = f"{count_weights(trained):,} weights are trained in {types(trained)}"
    if frozen:
        line += f", {count_weights(frozen):,} are frozen in {types(frozen)}"
    return f"{line}; computed in {compute_type}"


def is_narrower(dtype: str, model: nnx.Module) -> bool:
    """True if a type has fewer bits than some weight of a model."""
    weights = jax.tree.leaves(nnx.state(model))
    return any(jnp.dtype(dtype).itemsize < leaf.dtype.itemsize for leaf in weights)


def count_weights(weights: Any) -> int:
    """The number of weights; a coded matrix counts those that it codes."""
    named = finite.by_name(weights).items()
    return sum(coded_weights.count_weights(name, leaf) for name, leaf in named)


def lost_updates(trained: Any, learning_rate: float) -> str | None:
    """A line about arrays whose updates round to nothing; None if there are none.

    An update of Adam is about as large as the learning rate. It is lost where it is
    below half the spacing of the weights' type at a weight's magnitude; an array is
    named if that is so for most of its weights.
    """
    named = {
        name: leaf
        for name, leaf in finite.by_name(trained).items()
        if leaf.dtype.itemsize < 4
        or (leaf.dtype == jnp.float32 and learning_rate < _NEVER_LOST)
    }
    # One at a time, as in `finite.not_finite`.
    lost = [name for name, x in named.items() if _is_lost(x, learning_rate)]
    if not lost:
        return None
    kinds = types([named[name] for name in lost])
    return (
        f"the largest learning rate, {learning_rate:g}, is below the spacing of "
        f"{kinds} at the magnitude of most weights of {checksums.first(lost)}: such "
        "small updates round to zero; raise optimizer.learning_rate"
    )


def _is_lost(weight: jax.Array, learning_rate: float) -> bool:
    return bool(jax.device_get(_share_unchanged(weight, learning_rate)) > 0.5)


@jax.jit
def _share_unchanged(weight: jax.Array, learning_rate: jax.Array) -> jax.Array:
    kind, wide = jnp.finfo(weight.dtype), weight.astype(jnp.float32)
    # Not by a cast, which XLA may leave out.
    moved = jax.lax.reduce_precision(wide + learning_rate, kind.nexp, kind.nmant)
    return jnp.mean(moved == wide)


def widened(saved: Any, trained: Any) -> str | None:
    """A line about weights that a checkpoint has in fewer bits; None if it has none.

    Args:
        saved: shapes and types of the weights in the checkpoint.
        trained: the weights, or their shapes, as the run has them.
    """
    before, now = finite.by_name(saved), finite.by_name(trained)
    narrow = [
        before[name] for name, leaf in now.items()
        if jnp.dtype(before[name].dtype).itemsize < leaf.dtype.itemsize
    ]  # fmt: skip
    if not narrow:
        return None
    return (
        f"{count_weights(narrow):,} trained weights were saved in {types(narrow)} and "
        f"are trained further in {types(trained)}"
    )
