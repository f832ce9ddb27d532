"""Arithmetic in few instructions, for kernels that are limited by their number.

Mosaic GPU computes e^x by `ex2.approx.ftz` where approximations are allowed, and fuses
a multiplication with an addition.
"""

import math
import operator

import jax
import jax.numpy as jnp

from jaxmem.head.maths.divergence_terms import Arithmetic
from jaxmem.head.maths.row_stats import Normaliser

_LOG2_E = math.log2(math.e)


def fma(a: jax.Array, b: jax.Array | float, c: jax.Array | float) -> jax.Array:
    """The sum a b + c of float32, rounded once in a kernel."""
    return a * b + c


def exp(x: jax.Array, y: jax.Array | None = None) -> jax.Array:
    """e^x of float32, or e^(x - y); 0 if subnormal.

    The relative error is up to |x| + |y| epsilons.
    """
    return jnp.exp2(x * _LOG2_E if y is None else x * _LOG2_E - y * _LOG2_E)


def at_most(x: jax.Array, bound: float) -> jax.Array:
    """The smaller of float32 x and the bound, which is the result for NaN."""
    return jnp.where(x < bound, x, bound)


def log_ratio(z: jax.Array, y: jax.Array, z_max: jax.Array, y_max: jax.Array):
    """(z - z_max) - (y - y_max), where the difference of z and y is large as well.

    Of the two orders of these sums, the one whose first difference is the smaller:
    its rounding is what is lost.
    """
    between, below = z - y, z - z_max
    near = between - (z_max - y_max)
    return jnp.where(jnp.abs(between) <= jnp.abs(below), near, below - (y - y_max))


def _log_ratio_of_rows(z, y, policy: Normaliser, reference: Normaliser):
    """The ln(p/q) of logits: kernels have no room for what differences lose."""
    ratio = log_ratio(z, y, policy.max, reference.max)
    return ratio - (policy.log_sum - reference.log_sum)


OPERATIONS = Arithmetic(exp, fma, at_most, operator.mul, _log_ratio_of_rows)
