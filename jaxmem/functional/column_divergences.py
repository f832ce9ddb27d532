"""Divergences of log-probabilities of K columns and of the rest's mass."""

import functools

import jax
import jax.numpy as jnp

from jaxmem.core import row_stats
from jaxmem.functional.kinds import Kind


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def values(how, log_p, log_q):
    """The divergence per row from ln p [N, K + 1], the rest's last, and ln q [N, K]."""
    return compare(how, log_p, log_q)[0]


def compare(
    how: tuple[Kind, bool], log_p: jax.Array, log_q: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The divergence per row, and its derivative by ln p [N, K + 1], the rest's last.

    `how` says which divergence, and whether the rest is one more outcome; ln q is
    [N, K].
    """
    (divergence, tail), given = how, log_p
    if tail:
        log_q = jnp.concatenate([log_q, _log_rest(log_q, log_p)], axis=1)
    else:
        log_p = log_p[:, :-1]
    log_p, log_q = _normalised(log_p), _normalised(log_q)
    p, q, log_ratio = jnp.exp(log_p), jnp.exp(log_q), log_p - log_q
    terms = divergence.terms(p, q, log_ratio)
    slopes = divergence.slopes(p, q, log_ratio)
    slopes = slopes - p * jnp.sum(slopes, axis=1, keepdims=True)
    slopes = jnp.pad(slopes, ((0, 0), (0, given.shape[1] - slopes.shape[1])))
    parts = [jnp.sum(x, axis=1) for x in terms]
    return sum(parts[1:], parts[0]), slopes


def _pull(how, slopes, g):
    # A row whose value is not used, maybe because it is NaN, has no derivative.
    g = g[:, None]
    return jnp.where(g == 0, 0, g * slopes), jnp.zeros_like(slopes[:, :-1])


values.defvjp(compare, _pull)


def _normalised(log_p):
    return row_stats.log_softmax(log_p, row_stats.normaliser(log_p))


def _log_rest(log_q, log_p):
    """ln(1 - Σ q) [N, 1], at least the logarithm of its rounding error's bound."""
    epsilon = jnp.finfo(log_q.dtype).eps
    first = jnp.argmax(log_q, axis=1, keepdims=True)
    largest = jnp.take_along_axis(log_q, first, axis=1)
    is_first = jnp.arange(log_q.shape[1], dtype=first.dtype)[None] == first
    others = jnp.sum(jnp.where(is_first, 0, jnp.exp(log_q)), axis=1, keepdims=True)
    without_first = -jnp.expm1(largest)
    unknown = epsilon * jnp.maximum(without_first, epsilon)
    rest = jnp.log(jnp.maximum(without_first - others, unknown))
    return jnp.where(log_p[:, -1:] == -jnp.inf, -jnp.inf, rest)
