"""Probability ratios and KL estimators between two policies, per token.

Every function starts from the log-ratio δ of each token. Before exponentiation δ is
clamped to ±`MAX_LOG_RATIO`: e^20 is 5e8, so no ratio, estimate or gradient overflows,
and beyond the clamp the gradient is exactly 0. A masked token has log-probability 0
under every policy, so its ratio is 1 and its KL is 0.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jaxmem.base import messages, ranges
from jaxmem.head.maths import checks

MAX_LOG_RATIO = 20.0  # nats
Coefficient = float | jax.Array
_SERIES_BELOW = 0.03  # smallest |δ| at which e^δ - 1 - δ keeps 5 digits in float32


def as_tokens(**arrays: ArrayLike) -> list[jax.Array]:
    """The arrays in float32 or wider, checked to have one shape."""
    by_name = {name: checks.as_array(name, value) for name, value in arrays.items()}
    for name, array in by_name.items():
        checks.check_real(name, array)
    (first, tokens), *others = by_name.items()
    for name, array in others:
        if array.shape != tokens.shape:
            raise ValueError(
                f"{name} must have one entry per token, the shape {tokens.shape} of "
                f"{first}, got {array.shape}; broadcast it to the tokens first"
            )
    with jax.numpy_dtype_promotion("standard"):
        dtype = jnp.result_type(jnp.float32, *by_name.values())
    return [array.astype(dtype) for array in by_name.values()]


def as_coefficient(
    name: str,
    value: Coefficient,
    low: float,
    high: float = math.inf,
    *,
    infinite: bool = False,
    tokens: tuple[int, ...] = (),
) -> Coefficient:
    """A float in [low, high], or a jax array that broadcasts to the tokens' shape.

    The values of an array are not checked. Infinity may be allowed, as a bound that
    never applies.
    """
    if isinstance(value, jax.Array):
        checks.check_number(name, value)
        checks.check_broadcast(name, value, tokens)
        return value
    kinds = (int, float, np.integer, np.floating)
    number = isinstance(value, kinds) and not isinstance(value, bool)
    if not (number and low <= value <= high):
        expected = f"at least {low}" if high == math.inf else f"in [{low}, {high}]"
        raise ValueError(
            f"{name} must be a number, {expected}, got {messages.short(value)}"
        )
    if value > ranges.LARGEST and not (infinite and value == math.inf):
        raise ValueError(
            f"{name} must be finite in float32, got {messages.short(value)}"
        )
    return float(value)


def clamp(log_ratio: jax.Array) -> jax.Array:
    """Clamp to ±MAX_LOG_RATIO, where e^x and its gradient are finite."""
    return jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def kl_k1(logprob: ArrayLike, ref_logprob: ArrayLike) -> jax.Array:
    """KL(policy ‖ reference), estimator k1: unbiased, of high variance.

        out = logprob - ref_logprob                                            (nats)

    It is unbiased for tokens sampled from the policy, and negative for some of them.
    Its gradient is that of logprob alone, whose expectation is 0. Use k1 in a reward or
    a report; in a loss, k2 has the gradient of the KL.

    Args:
        logprob: log-probabilities under the policy that sampled the tokens [...].
        ref_logprob: log-probabilities under the reference policy [...].

    Returns:
        An estimate per token [...].

    >>> import jax.numpy as jnp, jaxmem
    >>> jaxmem.losses.kl_k1(jnp.array([-1.0, -2.0]), jnp.array([-1.5, -1.0]))
    Array([ 0.5, -1. ], dtype=float32)

    Reference: Schulman, "Approximating KL Divergence", 2020, joschu.net/blog.
    """
    lp, ref = as_tokens(logprob=logprob, ref_logprob=ref_logprob)
    return lp - ref


def kl_k2(logprob: ArrayLike, ref_logprob: ArrayLike) -> jax.Array:
    """KL(policy ‖ reference), estimator k2: biased in third order, of low variance.

        out = ½ (logprob - ref_logprob)²                                       (nats)

    For tokens sampled from the policy, the expectation of its gradient is the gradient
    of the KL. Arguments, result and reference are as in `kl_k1`.

    >>> import jax.numpy as jnp, jaxmem
    >>> jaxmem.losses.kl_k2(jnp.array([-1.0, -2.0]), jnp.array([-1.5, -1.0]))
    Array([0.125, 0.5  ], dtype=float32)
    """
    return 0.5 * jnp.square(kl_k1(logprob, ref_logprob))


def kl_k3(logprob: ArrayLike, ref_logprob: ArrayLike) -> jax.Array:
    """KL(policy ‖ reference), estimator k3: unbiased, never negative, of low variance.

        δ = ref_logprob - logprob        out = e^δ - 1 - δ                     (nats)

    δ is clamped to ±20 (no NaN, no infinity, gradient 0 beyond). Near 0, where the
    difference would cancel, a series is summed instead. It is unbiased for tokens
    sampled from the policy; the expectation of its gradient is that of KL(reference ‖
    policy). Arguments and result are as in `kl_k1`.

    >>> import jax.numpy as jnp, jaxmem
    >>> jaxmem.losses.kl_k3(jnp.array([-1.0, -2.0]), jnp.array([-1.0, -1.0])).round(4)
    Array([0.    , 0.7183], dtype=float32)

    Reference: as `kl_k1`; in GRPO's loss, Shao et al., 2024, arXiv:2402.03300.
    """
    delta = clamp(-kl_k1(logprob, ref_logprob))
    is_small = jnp.abs(delta) < _SERIES_BELOW
    small = jnp.where(is_small, delta, 0)
    series = 1 + small / 3 * (1 + small / 4 * (1 + small / 5 * (1 + small / 6)))
    return jnp.where(is_small, jnp.square(small) / 2 * series, jnp.expm1(delta) - delta)


def kl_low_variance(
    logprob: ArrayLike, ref_logprob: ArrayLike, *, limit: Coefficient = 10.0
) -> jax.Array:
    """`kl_k3` with an upper bound, which limits the influence of a single token.

        δ = clamp(ref_logprob - logprob, ±20)        out = min(e^δ - 1 - δ, limit)

    Where the bound applies, the estimate is biased and the gradient is exactly 0. With
    the default limit, the values equal verl's `low_var_kl`.

    Args:
        logprob, ref_logprob: as in `kl_k1`.
        limit: largest value of the estimate.

    Returns:
        An estimate per token [...].

    >>> import jax.numpy as jnp, jaxmem
    >>> jaxmem.losses.kl_low_variance(jnp.array([-9.0, -2.0]), jnp.array([-1.0, -2.0]))
    Array([10.,  0.], dtype=float32)

    Reference: as `kl_k1`; Sheng et al., 2024, arXiv:2409.19256 (verl).
    """
    kl = kl_k3(logprob, ref_logprob)
    limit = as_coefficient("limit", limit, 0, infinite=True, tokens=kl.shape)
    return jnp.minimum(kl, limit)


def truncated_importance_weights(
    logprob: ArrayLike, rollout_logprob: ArrayLike, *, cap: Coefficient = 2.0
) -> jax.Array:
    """Weights that correct a loss for tokens that another engine sampled.

        out = stop_gradient(min(e^(logprob - rollout_logprob), cap))

    Multiply any per-token loss by them. They are constants: compute them once per
    rollout, from the trainer's own log-probabilities under the sampling weights (the
    "old" ones, a forward-only pass), not from the policy being updated.

    Args:
        logprob: the trainer's log-probabilities [...] under the sampling weights.
        rollout_logprob: the sampler's log-probabilities of the same tokens [...].
        cap: largest weight.

    Returns:
        A weight per token [...].

    >>> import jax.numpy as jnp, jaxmem
    >>> lp, rollout = jnp.array([-1.0, -1.0]), jnp.array([-1.0, -3.0])
    >>> jaxmem.losses.truncated_importance_weights(lp, rollout)
    Array([1., 2.], dtype=float32)

    Reference: Ionides, "Truncated Importance Sampling", 2008; for a sampler that
    differs from the trainer, Yao et al., "Your Efficient RL Framework Secretly Brings
    You Off-Policy RL Training", 2025 (fengyao.notion.site/off-policy-rl); truncation of
    V-trace, Espeholt et al., 2018, arXiv:1802.01561.
    """
    ratio = _importance(logprob, rollout_logprob)
    cap = as_coefficient("cap", cap, 0, infinite=True, tokens=ratio.shape)
    return lax.stop_gradient(jnp.minimum(ratio, cap))


def masked_importance_weights(
    logprob: ArrayLike, rollout_logprob: ArrayLike, *, cap: Coefficient = 2.0
) -> jax.Array:
    """MIS: importance weights that drop a token whose weight is above a cap.

        r = e^(logprob - rollout_logprob)
        out = stop_gradient(r if r ≤ cap else 0)

    `truncated_importance_weights` keeps such a token with the weight `cap`. A dropped
    token counts in the loss's normaliser as before. TRL calls this `token_mask`.
    Arguments and result are as in `truncated_importance_weights`.

    >>> import jax.numpy as jnp, jaxmem
    >>> lp, rollout = jnp.array([-1.0, -1.0]), jnp.array([-1.0, -3.0])
    >>> jaxmem.losses.masked_importance_weights(lp, rollout)
    Array([1., 0.], dtype=float32)

    Reference: Liu et al., "When Speed Kills Stability: Demystifying RL Collapse from
    the Training-Inference Mismatch", 2025 (richardli.xyz/rl-collapse).
    """
    ratio = _importance(logprob, rollout_logprob)
    cap = as_coefficient("cap", cap, 0, infinite=True, tokens=ratio.shape)
    return lax.stop_gradient(jnp.where(ratio <= cap, ratio, 0))


def icepop_weights(
    logprob: ArrayLike,
    rollout_logprob: ArrayLike,
    *,
    low: Coefficient = 0.5,
    high: Coefficient = 5.0,
) -> jax.Array:
    """IcePop: importance weights that drop a token whose weight leaves a band.

        r = e^(logprob - rollout_logprob)
        out = stop_gradient(r if low ≤ r ≤ high else 0)

    A dropped token counts in the loss's normaliser as before.

    Args:
        logprob, rollout_logprob: as in `truncated_importance_weights`.
        low: smallest weight that is kept, the paper's α.
        high: largest weight that is kept, the paper's β.

    Returns:
        A weight per token [...].

    >>> import jax.numpy as jnp, jaxmem
    >>> lp, rollout = jnp.array([-1.0, -3.0, -1.0]), jnp.array([-1.0, -1.0, -3.0])
    >>> jaxmem.losses.icepop_weights(lp, rollout)
    Array([1., 0., 0.], dtype=float32)

    Reference: Ling Team, "Every Step Evolves: Scaling Reinforcement Learning for
    Trillion-Scale Thinking Model" (Ring-1T), 2025, arXiv:2510.18855.
    """
    ratio = _importance(logprob, rollout_logprob)
    return lax.stop_gradient(jnp.where(in_band(ratio, low, high), ratio, 0))


def in_band(ratio: jax.Array, low: Coefficient, high: Coefficient) -> jax.Array:
    """True for each ratio in [low, high], which is checked; False for NaN."""
    low = as_coefficient("low", low, 0, tokens=ratio.shape)
    high = as_coefficient("high", high, 0, infinite=True, tokens=ratio.shape)
    if isinstance(low, float) and isinstance(high, float) and low > high:
        raise ValueError(f"low must be at most high={high:g}, got {low:g}")
    return (ratio >= low) & (ratio <= high)


def _importance(logprob, rollout_logprob):
    lp, rollout = as_tokens(logprob=logprob, rollout_logprob=rollout_logprob)
    return jnp.exp(clamp(lp - rollout))
