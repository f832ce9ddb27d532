"""Jaxprs within jaxprs: bodies of loops, branches, and functions that are called."""

from collections.abc import Iterator
from typing import Any

import jax


def is_jaxpr(x: Any) -> bool:
    """True for a jaxpr, open or closed."""
    return hasattr(x, "eqns") or hasattr(x, "jaxpr")


def inner(equation: Any) -> Iterator[Any]:
    """The jaxprs among an equation's parameters, open or closed."""
    leaves = jax.tree.leaves(equation.params, is_leaf=is_jaxpr)
    return filter(is_jaxpr, leaves)


def equations(jaxpr: Any) -> Iterator[Any]:
    """Each equation of an open jaxpr, followed by those within it."""
    for equation in jaxpr.eqns:
        yield equation
        for called in inner(equation):
            yield from equations(getattr(called, "jaxpr", called))


def inner_consts(jaxpr: Any) -> Iterator[Any]:
    """Constants of functions within the jaxpr, such as a `jax.jit` in a loss."""
    for equation in equations(jaxpr):
        for called in inner(equation):
            yield from getattr(called, "consts", ())
