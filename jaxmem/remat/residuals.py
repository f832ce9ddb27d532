"""Lists the residuals of a block by name and size."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Residual:
    """One array that is stored between the forward and the backward pass.

    Attributes:
        name: its checkpoint name ("block_in" for the block's input); if it has none,
            the primitive that computes it.
        shape: shape of the array.
        dtype: dtype of the array.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Residuals:
    """The residuals of one block; iterable, and printed as a table.

    Attributes:
        entries: the arrays, each once, largest first.
        tokens: number of rows of the block's input, by which `bytes_per_token` divides.
    """

    entries: tuple[Residual, ...]
    tokens: int

    def __iter__(self) -> Iterator[Residual]:
        return iter(self.entries)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(entry.nbytes for entry in self.entries)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of all arrays, divided by the tokens."""
        return self.nbytes / self.tokens

    def __str__(self):
        kinds = [f"{entry.dtype}{list(entry.shape)}" for entry in self.entries]
        left = max([5, *(len(entry.name) for entry in self.entries)])
        middle = max([0, *map(len, kinds)])
        lines = [
            f"{entry.name:{left}}  {kind:{middle}}  {entry.nbytes / self.tokens:12,.1f}"
            for entry, kind in zip(self.entries, kinds, strict=True)
        ]
        lines.append(f"{'total':{left}}  {'':{middle}}  {self.bytes_per_token:12,.1f}")
        return "\n".join(f"{line} bytes/token" for line in lines)


def residuals(block: Callable, h: Any, *rest: Any) -> Residuals:
    """List the arrays that a block stores for its backward pass.

    Gradients are taken with respect to all arguments, but not to what the block closes
    over. h is listed if a gradient reads it, because a loop over blocks stores each
    block's input; the other arguments (weights, masks, tables) are not listed, because
    they exist anyway. XLA may merge or drop some of the arrays and stores no others.

    Args:
        block: (h, *rest) -> h; pass `remat.block(fn, policy)` to list the residuals
            under a policy.
        h: array, or pytree of arrays, [..., width] of floating-point numbers, or their
            shapes (`jax.ShapeDtypeStruct`), because nothing is computed.
        rest: further arguments of the block.

    Returns:
        Names, shapes and dtypes of the arrays, and their bytes per token.

    Raises:
        TypeError: block is not a function, or h has no floating-point arrays.
        ValueError: jax cannot differentiate the block; the message names it.

    >>> import jax, jax.numpy as jnp
    >>> from jaxmem import remat
    >>> h, w = (jax.ShapeDtypeStruct((n, 4), jnp.bfloat16) for n in (8, 4))
    >>> block = lambda h, w: h + jnp.sin(remat.name(h @ w, "gate"))
    >>> print(remat.residuals(remat.block(block, remat.Policy(save=["gate"])), h, w))
    block_in  bfloat16[8, 4]           8.0 bytes/token
    gate      bfloat16[8, 4]           8.0 bytes/token
    total                             16.0 bytes/token
    """
    label = getattr(block, "__qualname__", type(block).__name__)
    if not callable(block):
        raise TypeError(f"block must be a function of (h, *rest), got {block!r}")
    leaves = jax.tree.leaves(h)
    dtypes = [getattr(x, "dtype", np.dtype(object)) for x in leaves]
    if not leaves or not all(jnp.issubdtype(d, jnp.floating) for d in dtypes):
        raise TypeError(
            "h must contain floating-point arrays [..., width], because "
            f"{label!r} is differentiated, got {jax.tree.map(_kind_of, h)}"
        )

    def both_passes(*args):
        y, pull = jax.vjp(block, *args)
        return pull, pull(y)  # a loop that has no backward pass raises here

    try:
        jaxpr, shapes = jax.make_jaxpr(both_passes, return_shape=True)(h, *rest)
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"the residuals of {label!r} cannot be listed: {first}") from (
            error
        )
    kept = len(jax.tree.leaves(shapes[0]))
    by_variable = dict(_residuals_of(jaxpr.jaxpr, kept, len(leaves)))
    order = sorted(by_variable.values(), key=lambda entry: (-entry.nbytes, entry.name))
    return Residuals(tuple(order), math.prod(leaves[0].shape[:-1]))


def _kind_of(x):
    return f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else type(x).__name__


def _residuals_of(jaxpr, kept, n_inputs):
    """(variable, residual) of the first `kept` results; a variable may be repeated."""
    inputs = jaxpr.invars[:n_inputs]
    arguments = {*jaxpr.invars[n_inputs:], *jaxpr.constvars}
    for var in jaxpr.outvars[:kept]:
        is_literal = hasattr(var, "val")
        if is_literal or var in arguments or not var.aval.size:
            continue
        label = "block_in" if var in inputs else _name_of(jaxpr, var)
        yield var, Residual(label, var.aval.shape, var.aval.dtype)


def _name_of(jaxpr, var):
    """The checkpoint name of a variable, or the primitive that computes it."""
    for equation in jaxpr.eqns:
        if var not in equation.outvars:
            continue
        if equation.primitive.name == "name":
            return equation.params["name"]
        if equation.primitive.name == "reduce_precision":  # jax wraps saved values
            return _name_of(jaxpr, equation.invars[0]) or "input"
        index = equation.outvars.index(var)
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            outs = getattr(inner, "outvars", ())
            if len(outs) == len(equation.outvars) and not hasattr(outs[index], "val"):
                name = _name_of(inner, outs[index])
                return name or equation.primitive.name
        return equation.primitive.name
    return ""
