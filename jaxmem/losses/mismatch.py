"""Measures the difference between the trainer's and the sampler's log-probabilities."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from jaxmem.head.maths import checks
from jaxmem.head.maths.explicit_axes import with_automatic_axes
from jaxmem.losses.ratios import as_tokens, kl_k1, kl_k3


class MismatchReport(NamedTuple):
    """Scalars; float32 except the count, and all 0 if no token counts.

    Attributes:
        tokens: number of unmasked tokens, int32.
        mean: mean of |Δ| in nats, Δ = train_logp - rollout_logp.
        p95: 95th percentile of |Δ|, interpolated between its two neighbours.
        max: maximum of |Δ|.
        outside_1_25: fraction of tokens whose ratio e^Δ is outside [1/1.25, 1.25].
        outside_2: fraction of tokens whose ratio is outside [1/2, 2].
        k1: mean of -Δ, an estimate of KL(rollout ‖ train).
        k3: mean of e^Δ - 1 - Δ, another estimate of it, which is never negative.
        p50: median of |Δ|, interpolated in the same way.
        p99: 99th percentile of |Δ|, interpolated in the same way.
        inside_strict: fraction of tokens whose ratio is in [0.999, 1.002], the band of
            `losses.sequence_mask_weights`.
        inside_1_01: fraction of tokens whose ratio is in [0.99, 1.01]; that in
            [0.8, 1.25] is 1 - outside_1_25.
    """

    tokens: jax.Array
    mean: jax.Array
    p95: jax.Array
    max: jax.Array
    outside_1_25: jax.Array
    outside_2: jax.Array
    k1: jax.Array
    k3: jax.Array
    p50: jax.Array
    p99: jax.Array
    inside_strict: jax.Array
    inside_1_01: jax.Array


@with_automatic_axes(lambda _: PartitionSpec())
def mismatch_report(
    train_logp: ArrayLike, rollout_logp: ArrayLike, where: ArrayLike | None = None
) -> MismatchReport:
    """Compare the trainer's log-probabilities with the sampler's.

        Δ = train_logp - rollout_logp

    Both must be of the same tokens under the same weights; the difference is then that
    of two implementations. Runs under jit.

    Args:
        train_logp: log-probability of each token by `jaxmem.logprobs` [...].
        rollout_logp: log-probability of each token by the sampler [...].
        where: booleans that broadcast to the tokens; False excludes a token, even if it
            is NaN.

    Returns:
        A `MismatchReport` of scalars. In k3, Δ is clamped to ±20.

    Raises:
        TypeError, ValueError: shapes disagree, or where is not boolean.

    >>> import jax.numpy as jnp, jaxmem
    >>> train, rollout = jnp.array([-1.0, -2.0, -0.5]), jnp.array([-1.0, -1.0, 9.0])
    >>> report = jaxmem.mismatch_report(train, rollout, jnp.array([True, True, False]))
    >>> print(report.tokens, report.mean, report.max, report.outside_2, report.k1)
    2 0.5 1.0 0.5 0.5

    Reference: k1 and k3, Schulman, "Approximating KL Divergence", 2020,
    joschu.net/blog.
    """
    train, rollout = as_tokens(train_logp=train_logp, rollout_logp=rollout_logp)
    where = checks.read_where(where, train.shape)
    where = jnp.broadcast_to(True if where is None else where, train.shape)
    train, rollout = jnp.where(where, train, 0), jnp.where(where, rollout, 0)
    tokens = jnp.sum(where, dtype=jnp.int32)
    distance = jnp.abs(train - rollout)

    ranked = jnp.sort(jnp.where(where, distance, jnp.inf), axis=None)
    # NaN sorts last, after the tokens that are excluded.
    broken = jnp.isnan(jnp.max(distance, initial=0))

    def percentile(percent):
        found = _percentile(ranked, tokens, percent)
        return jnp.where(broken, jnp.nan, found)

    def mean(x):
        return jnp.sum(jnp.where(where, x, 0)) / jnp.maximum(tokens, 1).astype(x.dtype)

    return MismatchReport(
        tokens=tokens,
        mean=mean(distance),
        p95=percentile(95),
        max=jnp.max(distance, initial=0),
        outside_1_25=mean(1 - _inside(train - rollout, 0.8, 1.25)),
        outside_2=mean(1 - _inside(train - rollout, 0.5, 2.0)),
        k1=mean(kl_k1(rollout, train)),
        k3=mean(kl_k3(rollout, train)),
        p50=percentile(50),
        p99=percentile(99),
        inside_strict=mean(_inside(train - rollout, 0.999, 1.002)),
        inside_1_01=mean(_inside(train - rollout, 0.99, 1.01)),
    )


def _inside(delta, low, high):
    """1 where the ratio e^Δ is in [low, high]; 0 for NaN."""
    within = (delta >= math.log(low)) & (delta <= math.log(high))
    return within.astype(delta.dtype)


def _percentile(ranked, tokens, percent):
    """A percentile of the first tokens, at rank (n - 1) percent / 100.

    The rank is computed in integers, for any n.
    """
    if ranked.size == 0:
        return jnp.zeros((), ranked.dtype)
    hundreds, rest = jnp.divmod(jnp.maximum(tokens - 1, 0), 100)
    whole, share = jnp.divmod(percent * rest, 100)
    below = percent * hundreds + whole
    low, high = ranked[below], ranked[below + (share > 0).astype(below.dtype)]
    between = low + (high - low) * (share.astype(ranked.dtype) / 100)
    between = jnp.where(low == high, low, between)  # also if both are infinite
    return jnp.where(tokens > 0, between, 0)
