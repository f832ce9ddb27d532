"""Terms of divergences between two distributions, and their derivatives.

docs/maths.md has the derivation. With w = e^(z - max z) and v = e^(y - max y), maxima
over a block of columns, d = ln(w/v), and t what d lacks of ln(p/q),

    Σ e(p, q) ∝ E + (e^-t - 1 + t) Σ w + (1 - e^-t) B,   Σ p ln(p/q) ∝ E + B + t Σ w,
    E = Σ e(w, v) = Σ w (e^-d - 1 + d),   B = Σ w (1 - e^-d) = Σ (w - v).
"""

import fractions
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from numpy.polynomial import Chebyshev, Polynomial

from jaxmem.head.maths.row_stats import Normaliser, difference

SERIES_BELOW = 0.5  # |x| above which e^-x - 1 + x does not cancel
# Terms of Taylor's series whose next one is below float64's epsilon, and for float32
# degrees of interpolations that are good to half an epsilon.
_SERIES_TERMS, _SERIES_DEGREES = 15, {2: 6, 3: 5}  # by the first term
_ARTANH_TERMS, _ARTANH_DEGREE = 17, 4
_MIXING_TERMS = {4: 10, 8: 23}  # by item size: the next is below epsilon
# For β = 1/2, of interpolations that are good to half an epsilon of float32.
_HALF_DEGREES = {"term": 3, "near": 2, "far": 8}
_NO_RATIO = 1000.0  # in place of an infinite |ln(p/q)|: e^-x is 0 in either type


class Arithmetic(NamedTuple):
    """Operations of the terms, for which kernels have instructions of their own.

    Attributes:
        exp: e^x of x, or e^(x - y) of x and y.
        fma: a b + c of a, b and c.
        at_most: the smaller of x and a bound. That of a kernel is the bound for NaN.
        product: a x of a and x, 0 where a is 0. That of a kernel is a plain product,
            whose x is finite by `at_most`.
        log_ratio: ln(p/q) of logits z and y, and the normalisers of p and of q.
    """

    exp: Callable[..., Any]
    fma: Callable[[Any, Any, Any], Any]
    at_most: Callable[[Any, float], Any]
    product: Callable[[Any, Any], Any]
    log_ratio: Callable[..., Any]


def _exp(x, y=None):
    return jnp.exp(x if y is None else x - y)


def product(a, x):
    """Return a · x, and 0 where a is 0: x may be infinite there, or inf - inf."""
    return jnp.where(a == 0, 0, a * x)


def log_ratio(z, y, policy: Normaliser, reference: Normaliser):
    """ln(p/q) of logits, which keeps its last digits where they are large, too."""
    ratio, lost = difference(z, y)
    largest, lost_of_largest = difference(policy.max, reference.max)
    log_sums = (policy.log_sum - reference.log_sum) + lost_of_largest
    shift, lost_of_shift = difference(largest, -log_sums)
    # Below the epsilon of ln p, it would be all of the largest term of two confident
    # heads, and blur the sum of the others.
    matters = jnp.abs(lost_of_shift) > jnp.finfo(shift.dtype).eps
    return (ratio - shift) + (lost - jnp.where(matters, lost_of_shift, 0))


XLA = Arithmetic(_exp, lambda a, b, c: a * b + c, jnp.minimum, product, log_ratio)


class ColumnBlocks(NamedTuple):
    """Sums over blocks of columns, in arrays of one shape."""

    p: Any  # mass
    q: Any
    p_scale: Any  # factor from Σ w to p's mass
    q_scale: Any  # from Σ v to q's
    sums: Any  # of `block_terms`
    log_ratio: Any  # t: of p_scale / q_scale


def excess_of(a, b, x, ops):
    """Return a ln(a/b) - a + b for x = ln(a/b), never negative; b where a is 0."""
    near = a * (x * x / 2) * exp_series(x, 3, ops)  # of e^-x - 1 + x
    return jnp.where(jnp.abs(x) < SERIES_BELOW, near, product(a, x) - a + b)


def relative(a, b, x, ops):
    """(e(a, b), a - b), where a near b does not cancel."""
    excess = excess_of(a, b, x, ops)
    near = jnp.abs(x) < SERIES_BELOW
    return excess, jnp.where(near, product(a, x) - excess, a - b)


def shifted_excess(a, b, excess, difference, t):
    """Σ e(a, b) of columns whose ln(a/b) is t more than in excess and difference.

    a and b are masses of the columns, excess Σ e(a, b e^t), difference Σ (a - b e^t).
    """
    series = exp_series(t, 3) * (t * t / 2)  # e^-t - 1 + t
    near = a * series + (t - series) * difference
    far = product(a, t) - a + b + difference
    change = jnp.where(jnp.abs(t) < SERIES_BELOW, near, far)
    return jnp.maximum(excess + change, 0)  # negative by rounding only


def exp_series(x, first, ops=XLA):
    """Return 1 - x/k + x²/(k (k+1)) - ... from k = first, for |x| < SERIES_BELOW.

    1 - e^-x is x times the series from 2, and e^-x - 1 + x is x²/2 times that from 3.
    XLA would store an expm1 that a product reads more than once.
    """
    return _evaluate_polynomial(_series_factors(first, x.dtype.itemsize), x, ops)


@functools.cache
def _series_factors(first: int, itemsize: int) -> tuple[float, ...]:
    """Coefficients of powers of x."""
    taylor = [
        (-1) ** k * math.factorial(first - 1) / math.factorial(first - 1 + k)
        for k in range(_SERIES_TERMS)
    ]
    if itemsize == 8:
        return tuple(taylor)
    domain = -SERIES_BELOW, SERIES_BELOW
    return _interpolate(Polynomial(taylor), _SERIES_DEGREES[first], domain)


def _interpolate(function, degree, domain) -> tuple[float, ...]:
    """Factors of a polynomial that is near to a function in a domain."""
    interpolant = Chebyshev.interpolate(function, degree, domain)
    return tuple(map(float, interpolant.convert(kind=Polynomial).coef))


def half_terms(p, q, log_ratio, ops):
    """(p ln(p/m) + q ln(q/m)) / 2 of m = (p + q) / 2.

    With s = |ln(p/q)| and the larger one l, this is l times
    (1 + e^-s) ln(l/m)/2 - e^-s s/2, which cancels where s is small; m times an even
    function of s does not.
    """
    size, ratio = _size_and_ratio(log_ratio, ops)
    one_plus_ratio = 1 + ratio
    far = ops.fma(
        -ratio, size / 2, one_plus_ratio * _half_log_of_larger(size, ratio, ops)
    )
    square = size * size
    near = one_plus_ratio * (
        square * _evaluate_polynomial(_half_factors(size.dtype.itemsize), square, ops)
    )
    return ops.product(jnp.maximum(p, q), jnp.where(size < SERIES_BELOW, near, far))


def half_slopes(p, log_ratio, ops):
    """Return p ln(p/m) / 2 of m = (p + q) / 2."""
    size, ratio = _size_and_ratio(log_ratio, ops)
    of_larger = _half_log_of_larger(size, ratio, ops)
    return ops.product(p, jnp.where(log_ratio > 0, of_larger, of_larger - size / 2))


def _size_and_ratio(log_ratio, ops):
    """(s = |ln(p/q)|, the smaller over the larger one)."""
    # Infinite if p or q is 0, NaN if both are.
    size = ops.at_most(jnp.abs(log_ratio), _NO_RATIO)
    return size, ops.exp(-size)


def _half_log_of_larger(size, ratio, ops):
    """ln(l/m)/2 = -ln((1 + e^-s) / 2)/2 = s/4 - ln cosh(s/2)/2, for s ≥ 0."""
    series = _evaluate_polynomial(
        _log_cosh_factors(size.dtype.itemsize), size * size, ops
    )
    near = size * ops.fma(-size, series, 0.25)
    if size.dtype.itemsize == 8:
        far = -jnp.log((1 + ratio) / 2) / 2
    else:
        far = _evaluate_polynomial(_log_factors(), ratio, ops)
    return jnp.where(size < SERIES_BELOW, near, far)


@functools.cache
def _half_factors(itemsize: int) -> tuple[float, ...]:
    """Factors of s²ⁿ in (u tanh u - ln cosh u) / 2s², u = s/2, s < SERIES_BELOW.

    Twice that is x K'(x) - K(x) of `mixing_series` for w = 1/2, which is even.
    """
    taylor = [term / 2 for term in _mixing_factors(0.5, _MIXING_TERMS[8])[::2]]
    return _interpolate_squares(taylor, itemsize, _HALF_DEGREES["term"])


@functools.cache
def _log_cosh_factors(itemsize: int) -> tuple[float, ...]:
    """Factors of powers of s² in ln cosh(s/2) / 2s², for s < SERIES_BELOW."""
    terms = _mixing_factors(0.5, _MIXING_TERMS[8])[::2]
    taylor = [term / (4 * k + 2) for k, term in enumerate(terms)]
    return _interpolate_squares(taylor, itemsize, _HALF_DEGREES["near"])


def _interpolate_squares(taylor, itemsize, degree):
    if itemsize == 8:
        return tuple(taylor)
    return _interpolate(Polynomial(taylor), degree, (0, SERIES_BELOW**2))


@functools.cache
def _log_factors() -> tuple[float, ...]:
    """Factors of rⁿ in -ln((1 + r) / 2)/2, for r = e^-s and s > SERIES_BELOW."""
    domain, degree = (0, math.exp(-SERIES_BELOW)), _HALF_DEGREES["far"]
    return _interpolate(lambda r: -np.log((1 + r) / 2) / 2, degree, domain)


def _evaluate_polynomial(factors, x, ops):
    """By Horner's rule."""
    total = factors[-1]
    for factor in factors[-2::-1]:
        total = ops.fma(x, total, factor)
    return total


def to_mixture(weight, x, ops):
    """(ln(heavy/m), ln(light/m)) of m = (1 - w) heavy + w light, w < 1/2.

    With x = ln(light/heavy), ln(m/heavy) = ln(1 + w (e^x - 1)) = 2 artanh(t) keeps its
    digits where m tends to heavy, because x or w is small. The series of artanh is
    short where |t| ≤ 1/3; beyond that, m > 2 heavy, and x + ln(m/light) loses nothing.
    No exponential overflows, for none has a positive argument.
    """
    size, light_is_larger = jnp.abs(x), x > 0
    smaller = ops.exp(-size)  # over the larger one
    series = size * exp_series(size, 2, ops)
    difference = jnp.where(size < SERIES_BELOW, series, 1 - smaller)
    change = weight * jnp.where(light_is_larger, difference, -difference)
    t = change * (1 / (2 * jnp.where(light_is_larger, smaller, 1) + change))
    over_light = jnp.log(weight + (1 - weight) * smaller)  # ln(m/light)
    beyond = t > 1 / 3
    log_heavy = -jnp.where(beyond, size + over_light, _log_by_artanh(t, ops))
    return log_heavy, jnp.where(beyond, -over_light, x + log_heavy)


def _log_by_artanh(t, ops):
    """Return ln((1 + t) / (1 - t)) = 2 t (1 + t²/3 + t⁴/5 + ...), for |t| ≤ 1/3."""
    return t * _evaluate_polynomial(_artanh_factors(t.dtype.itemsize), t * t, ops)


@functools.cache
def _artanh_factors(itemsize: int) -> tuple[float, ...]:
    """Factors of powers of t² in 2 artanh(t) / t."""
    taylor = [2 / (2 * k + 1) for k in range(_ARTANH_TERMS)]
    if itemsize == 8:
        return tuple(taylor)
    return _interpolate(Polynomial(taylor), _ARTANH_DEGREE, (0, 1 / 9))


def mixing_series(weight, x, ops):
    """Return (x K'(x) - K(x)) / x² of K(x) = ln(1 + w (e^x - 1)), |x| < SERIES_BELOW.

    Times m x² it is the divergence's term, for heavy is m e^-K and light m e^(x - K).
    K generates the cumulants of a Bernoulli variable.
    """
    factors = _mixing_factors(weight, _MIXING_TERMS[x.dtype.itemsize])
    return _evaluate_polynomial(factors, x, ops)


@functools.cache
def _mixing_factors(weight: float, terms: int) -> tuple[float, ...]:
    """Factors of x^n in x K'(x) - K(x), from n = 2 on: (n - 1) κ_n / n!.

    κ_n is a polynomial in w: κ_1 = w, κ_(n+1) = w (1 - w) dκ_n/dw. Its sum cancels,
    which fractions of integers do not mind.
    """
    w, polynomial, factors = fractions.Fraction(weight), [0, 1], []
    for n in range(2, terms + 2):
        slopes = [k * c for k, c in enumerate(polynomial)]
        polynomial = [a - b for a, b in zip([*slopes, 0], [0, *slopes], strict=True)]
        cumulant = sum(c * w**k for k, c in enumerate(polynomial))
        factors.append(float((n - 1) * cumulant / math.factorial(n)))
    return tuple(factors)
