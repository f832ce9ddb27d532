"""The terms of each divergence between two distributions, and their derivatives.

`jaxmem.functional.divergence` has the derivation.
"""

import dataclasses
import math

import jax.numpy as jnp

_SERIES_BELOW = 0.5  # |x| above which e^-x - 1 + x does not cancel
_SERIES_TERMS = {4: 9, 8: 15}  # by item size: the next is below epsilon


@dataclasses.dataclass(frozen=True)
class KL:
    """KL(p ‖ q)."""

    def terms(self, p, q, log_ratio):
        """Terms, none negative, whose sum over the vocabulary is the divergence."""
        return (_excess(p, q, log_ratio),)

    def slopes(self, p, q, log_ratio):
        """Return p · ∂D/∂p, up to a multiple of p."""
        return _product(p, log_ratio)

    def density(self, p, q, log_ratio):
        """Return the distribution by which columns of the derivative are sampled."""
        return p


@dataclasses.dataclass(frozen=True)
class ForwardKL:
    """KL(q ‖ p)."""

    def terms(self, p, q, log_ratio):
        """See `KL.terms`."""
        return (_excess(q, p, -log_ratio),)

    def slopes(self, p, q, log_ratio):
        """Return p - q: p · ∂D/∂p is -q, and p is a multiple of p."""
        near = jnp.abs(log_ratio) < _SERIES_BELOW
        return jnp.where(near, p * (log_ratio * _series(log_ratio, 2)), p - q)

    def density(self, p, q, log_ratio):
        """See `KL.density`."""
        return (p + q) / 2


@dataclasses.dataclass(frozen=True)
class JSD:
    """β KL(q ‖ m) + (1-β) KL(p ‖ m), m = β q + (1-β) p."""

    beta: float

    def terms(self, p, q, log_ratio):
        """See `KL.terms`."""
        beta, log_p, log_q = self.beta, *self._to_mixture(log_ratio)
        m = beta * q + (1 - beta) * p
        # Two terms, because XLA on a CPU would store the operands of their sum.
        return beta * _excess(q, m, log_q), (1 - beta) * _excess(p, m, log_p)

    def slopes(self, p, q, log_ratio):
        """(1-β) p ln(p/m)."""
        log_p, _ = self._to_mixture(log_ratio)
        return (1 - self.beta) * _product(p, log_p)

    def density(self, p, q, log_ratio):
        """See `KL.density`."""
        return p

    def _to_mixture(self, log_ratio):
        """ln(p/m) and ln(q/m)."""
        of_p, of_q = 1 - self.beta, self.beta
        return -_ln_mixed(of_p, of_q, -log_ratio), -_ln_mixed(of_q, of_p, log_ratio)


def _excess(a, b, x):
    """Return a ln(a/b) - a + b for x = ln(a/b), never negative; b where a is 0."""
    near = a * (x * x / 2) * _series(x, 3)  # of e^-x - 1 + x
    return jnp.where(jnp.abs(x) < _SERIES_BELOW, near, _product(a, x) - a + b)


def _series(x, first):
    """Return 1 - x/k (1 - x/(k+1) (1 - ...)) from k = first, for |x| < _SERIES_BELOW.

    1 - e^-x is x times the series from 2, and e^-x - 1 + x is x²/2 times that from 3.
    XLA would store an expm1 that a product reads more than once.
    """
    series = 1.0
    for k in range(_SERIES_TERMS[x.dtype.itemsize], first - 1, -1):
        series = 1 - x * (1 / k) * series
    return series


def _ln_mixed(own, other, x):
    """ln(own + other · e^x) of two weights whose sum is 1, without cancellation.

    Where e^x would overflow, x is clipped; the factor applied later underflows there.
    """
    x = jnp.minimum(x, -math.log(jnp.finfo(x.dtype).tiny))
    grown = jnp.exp(x)
    near = jnp.abs(x) < _SERIES_BELOW
    change = other * jnp.where(near, x * _series(-x, 2), grown - 1)
    mixed = jnp.log(own + other * grown)
    return jnp.where(change < -0.5, mixed, jnp.log1p(change))


def _product(a, x):
    """Return a · x, and 0 where a is 0: x may be infinite there, or inf - inf."""
    return jnp.where(a == 0, 0, a * x)
