"""Policy-gradient losses per token.

With r = e^(logprob - old_logprob) and the advantage A, PPO and its variants are -A·r
with r clipped on the side that the sign of A selects. That equals the minimum of the
two products in their papers, but needs only one product.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jaxmem.losses.ratios import Coefficient, as_coefficient, as_tokens, clamp, kl_k3


def policy_gradient(logprob: ArrayLike, advantages: ArrayLike) -> jax.Array:
    """REINFORCE: the log-probability, weighted by the advantage.

        out = -A · logprob

    Args:
        logprob: under the policy being updated [...], which sampled the tokens.
        advantages: A, constants [...]; a sequence's advantage at each of its tokens.

    Returns:
        A loss per token [...].

    >>> import jax.numpy as jnp, jaxmem
    >>> jaxmem.losses.policy_gradient(jnp.array([-1.0, -2.0]), jnp.array([0.5, -0.5]))
    Array([ 0.5, -1. ], dtype=float32)

    Reference: Williams, "Simple statistical gradient-following algorithms for
    connectionist reinforcement learning", 1992.
    """
    lp, advantages = as_tokens(logprob=logprob, advantages=advantages)
    return -lax.stop_gradient(advantages) * lp


def ppo_clip(
    logprob: ArrayLike,
    old_logprob: ArrayLike,
    advantages: ArrayLike,
    *,
    clip_low: Coefficient = 0.2,
    clip_high: Coefficient = 0.2,
    dual_clip: Coefficient | None = None,
) -> jax.Array:
    """PPO's clipped surrogate, optionally with the dual clip.

        r = e^(logprob - old_logprob)
        out = -min(r·A, clip(r, 1 - clip_low, 1 + clip_high)·A)
        out = min(out, -dual_clip·A)  where A < 0

    That is -A·r with r clipped at 1 + clip_high where A > 0, and to [1 - clip_low,
    dual_clip] where A < 0. Where r is clipped, the gradient is exactly 0.

    Args:
        logprob: under the policy being updated [...].
        old_logprob: under the behaviour policy, which sampled; a constant [...].
        advantages: A, constants [...].
        clip_low: distance of the lower clip from 1, in [0, 1].
        clip_high: distance of the upper clip from 1.
        dual_clip: largest ratio of a token with A < 0, above 1 (3 is common); None for
            no bound except e^20.

    Returns:
        A loss per token [...].

    Raises:
        ValueError: shapes disagree, or a coefficient is out of its range.

    >>> import jax.numpy as jnp, jaxmem
    >>> ratio, A = jnp.array([1.1, 1.5, 1.5, 5.0]), jnp.array([1.0, 1.0, -1.0, -1.0])
    >>> out = jaxmem.losses.ppo_clip(jnp.log(ratio), jnp.zeros(4), A, dual_clip=3.0)
    >>> [round(float(x), 4) for x in out]
    [-1.1, -1.2, 1.5, 3.0]

    Reference: Schulman et al., 2017, arXiv:1707.06347; dual clip, Ye et al., 2019,
    arXiv:1912.09729.
    """
    lp, old, A = as_tokens(
        logprob=logprob, old_logprob=old_logprob, advantages=advantages
    )
    return _clipped(lp - lax.stop_gradient(old), A, clip_low, clip_high, dual_clip)


def grpo(
    logprob: ArrayLike,
    old_logprob: ArrayLike,
    ref_logprob: ArrayLike | None,
    advantages: ArrayLike,
    *,
    clip_low: Coefficient = 0.2,
    clip_high: Coefficient = 0.2,
    beta: Coefficient = 0.04,
) -> jax.Array:
    """GRPO: PPO's surrogate plus a KL term to a reference policy.

        out = ppo_clip(logprob, old_logprob, A) + beta · kl_k3(logprob, ref_logprob)

    Use A from `grpo_advantages`, and average with `sequence_mean_weights`.

    Args:
        ref_logprob: under the reference policy, a constant [...]; None: no KL term.
        beta: weight of the KL term.
        logprob, old_logprob, advantages, clip_low, clip_high: as in `ppo_clip`.

    Returns:
        A loss per token [...].

    >>> import jax.numpy as jnp, jaxmem
    >>> lp, ref, A = jnp.array([-1.0]), jnp.array([-2.0]), jnp.array([0.5])
    >>> print(f"{jaxmem.losses.grpo(lp, lp, ref, A)[0]:.4f}")
    -0.4853

    Reference: Shao et al., 2024, arXiv:2402.03300.
    """
    surrogate = ppo_clip(
        logprob, old_logprob, advantages, clip_low=clip_low, clip_high=clip_high
    )
    beta = as_coefficient("beta", beta, 0, tokens=surrogate.shape)
    if ref_logprob is None:
        return surrogate
    lp, ref = as_tokens(logprob=logprob, ref_logprob=ref_logprob)
    return surrogate + beta * kl_k3(lp, lax.stop_gradient(ref))


def dr_grpo(
    logprob: ArrayLike,
    old_logprob: ArrayLike,
    advantages: ArrayLike,
    *,
    clip_low: Coefficient = 0.2,
    clip_high: Coefficient = 0.2,
) -> jax.Array:
    """Dr. GRPO: GRPO without its bias towards long wrong answers and uneven prompts.

        out = ppo_clip(logprob, old_logprob, A),   A = r - mean(r)

    The loss per token is PPO's; advantages and averaging differ. Advantages are those
    of `grpo_advantages(..., normalize_std=False)`, and the sum over all tokens is
    divided by a constant, the number of sequences times the maximum completion length,
    instead of by the length of each completion. Arguments and result are those of
    `ppo_clip`.

    >>> import jax.numpy as jnp, jaxmem
    >>> A = jaxmem.losses.grpo_advantages(jnp.array([[1.0, 0.0]]), normalize_std=False)
    >>> jaxmem.losses.dr_grpo(jnp.zeros((1, 2)), jnp.zeros((1, 2)), A)
    Array([[-0.5,  0.5]], dtype=float32)

    Reference: Liu et al., 2025, arXiv:2503.20783.
    """
    return ppo_clip(
        logprob, old_logprob, advantages, clip_low=clip_low, clip_high=clip_high
    )


def dapo(
    logprob: ArrayLike,
    old_logprob: ArrayLike,
    advantages: ArrayLike,
    *,
    clip_low: Coefficient = 0.2,
    clip_high: Coefficient = 0.28,
) -> jax.Array:
    """DAPO: PPO's surrogate with a higher upper clip, for unlikely tokens.

        out = -min(r·A, clip(r, 1 - clip_low, 1 + clip_high)·A),   clip_high > clip_low

    Average over tokens: divide the sum by the number of tokens of the whole step.
    Groups whose rewards are all equal, which DAPO resamples, have advantage 0.
    Arguments and result are as in `ppo_clip`.

    >>> import jax.numpy as jnp, jaxmem
    >>> ratio, A = jnp.array([1.5, 0.5]), jnp.array([1.0, -1.0])
    >>> out = jaxmem.losses.dapo(jnp.log(ratio), jnp.zeros(2), A)
    >>> [round(float(x), 4) for x in out]
    [-1.28, 0.8]

    Reference: Yu et al., 2025, arXiv:2503.14476.
    """
    return ppo_clip(
        logprob, old_logprob, advantages, clip_low=clip_low, clip_high=clip_high
    )


def gspo(
    logprob: ArrayLike,
    sequence_log_ratio: ArrayLike,
    advantages: ArrayLike,
    *,
    clip_low: Coefficient = 3e-4,
    clip_high: Coefficient = 4e-4,
) -> jax.Array:
    """GSPO: one ratio, and one decision to clip, for all tokens of a sequence.

        s = e^sequence_log_ratio · p / stop_gradient(p),   p = e^logprob
        out = -min(s·A, clip(s, 1 - clip_low, 1 + clip_high)·A)

    This is GSPO-token, which has GSPO's value and gradient if a sequence has one
    advantage. Average with `sequence_mean_weights`. The ratio couples tokens. Either
    `sequence_log_ratio` computes it from a forward-only pass (2NVD) under the same
    weights, and this loss goes into `token_loss` (6NVD); or both use log-probabilities
    of `jaxmem.logprobs` (8NVD in all). In the first update after sampling the log-ratio
    is 0, and needs no pass.

    Args:
        logprob, advantages: as in `ppo_clip`.
        sequence_log_ratio: of the sequence, at each of its tokens; a constant [...].
        clip_low, clip_high: as in `ppo_clip`; small, as s is a geometric mean.

    Returns:
        A loss per token [...].

    >>> import jax.numpy as jnp, jaxmem
    >>> lp, old = jnp.array([-1.0, -2.0]), jnp.array([-1.5, -1.0])
    >>> log_ratio = jaxmem.losses.sequence_log_ratio(lp, old, jnp.array([1, 1]))
    >>> [round(float(x), 4) for x in jaxmem.losses.gspo(lp, log_ratio, jnp.ones(2))]
    [-0.7788, -0.7788]

    Reference: Zheng et al., 2025, arXiv:2507.18071.
    """
    lp, log_ratio, A = as_tokens(
        logprob=logprob, sequence_log_ratio=sequence_log_ratio, advantages=advantages
    )
    log_ratio = lax.stop_gradient(log_ratio) + (lp - lax.stop_gradient(lp))
    return _clipped(log_ratio, A, clip_low, clip_high, None)


def cispo(
    logprob: ArrayLike,
    old_logprob: ArrayLike,
    advantages: ArrayLike,
    *,
    clip_low: Coefficient = 1.0,
    clip_high: Coefficient = 4.0,
) -> jax.Array:
    """CISPO: REINFORCE with clipped importance weights, so every token has a gradient.

        r = e^(logprob - old_logprob)
        out = -stop_gradient(clip(r, 1 - clip_low, 1 + clip_high)) · A · logprob

    Ratios are positive, so a clip_low of 1 or more means no lower bound, as verl's
    `clip_ratio_low=10` does. The defaults clip weights at 5 and not below, as in
    ScaleRL.

    Args:
        logprob, old_logprob, advantages, clip_high: as in `ppo_clip`.
        clip_low: as in `ppo_clip`, but it may be above 1.

    Returns:
        A loss per token [...].

    >>> import jax.numpy as jnp, jaxmem
    >>> lp, old = jnp.array([-1.0, -1.0]), jnp.array([-1.0, -9.0])
    >>> jaxmem.losses.cispo(lp, old, jnp.ones(2))
    Array([1., 5.], dtype=float32)

    Reference: MiniMax, 2025, arXiv:2506.13585; ScaleRL, Khatri et al., 2025,
    arXiv:2510.13786; Sheng et al., 2024, arXiv:2409.19256 (verl).
    """
    lp, old, A = as_tokens(
        logprob=logprob, old_logprob=old_logprob, advantages=advantages
    )
    low = as_coefficient("clip_low", clip_low, 0, infinite=True, tokens=lp.shape)
    high = as_coefficient("clip_high", clip_high, 0, infinite=True, tokens=lp.shape)
    weight = jnp.clip(jnp.exp(clamp(lp - old)), 1 - low, 1 + high)
    return -lax.stop_gradient(weight * A) * lp


def sapo(
    logprob: ArrayLike,
    old_logprob: ArrayLike,
    advantages: ArrayLike,
    *,
    temperature_pos: Coefficient = 1.0,
    temperature_neg: Coefficient = 1.05,
) -> jax.Array:
    """SAPO: a smooth gate on the ratio instead of a clip.

        r = e^(logprob - old_logprob),   τ = temperature_pos where A > 0, else _neg
        out = -(4 / τ) · σ(τ (r - 1)) · A

    At r = 1 its gradient is that of PPO's surrogate; away from 1 it decays on both
    sides, for either sign of A. Average with `sequence_mean_weights`.

    Args:
        logprob, old_logprob, advantages: as in `ppo_clip`.
        temperature_pos: how fast the gradient of a good token decays, above 0.
        temperature_neg: that of a bad token; larger, as its gradient raises the
            probability of all other tokens.

    Returns:
        A loss per token [...].

    >>> import jax.numpy as jnp, jaxmem
    >>> ratio, A = jnp.array([1.0, 1.0, 3.0]), jnp.array([1.0, -1.0, 1.0])
    >>> out = jaxmem.losses.sapo(jnp.log(ratio), jnp.zeros(3), A)
    >>> [round(float(x), 4) for x in out]
    [-2.0, 1.9048, -3.5232]

    Reference: Gao et al., "Soft Adaptive Policy Optimization", 2025, arXiv:2511.20347.
    """
    lp, old, A = as_tokens(
        logprob=logprob, old_logprob=old_logprob, advantages=advantages
    )
    A = lax.stop_gradient(A)
    good, bad = (
        as_coefficient(f"temperature_{sign}", value, 1e-30, tokens=lp.shape)
        for sign, value in (("pos", temperature_pos), ("neg", temperature_neg))
    )
    temperature = jnp.where(A > 0, good, bad)
    ratio = jnp.exp(clamp(lp - lax.stop_gradient(old)))
    return -4 / temperature * jax.nn.sigmoid(temperature * (ratio - 1)) * A


def entropy_bonus(entropy: ArrayLike, *, coefficient: Coefficient = 0.01) -> jax.Array:
    """A reward for high entropy; add it to a policy's loss.

        out = -coefficient · entropy

    Args:
        entropy: of each token's distribution [...].
        coefficient: weight of the bonus.

    Returns:
        A loss per token [...].

    >>> import jax.numpy as jnp, jaxmem
    >>> jaxmem.losses.entropy_bonus(jnp.array([2.0]))
    Array([-0.02], dtype=float32)

    Reference: Mnih et al., 2016, arXiv:1602.01783.
    """
    (H,) = as_tokens(entropy=entropy)
    weight = as_coefficient("coefficient", coefficient, 0, tokens=H.shape)
    return -weight * H


def _clipped(log_ratio, advantages, clip_low, clip_high, dual_clip):
    """-A·r, with r clipped on the side that the sign of A selects."""
    tokens, A = advantages.shape, lax.stop_gradient(advantages)
    below = as_coefficient("clip_low", clip_low, 0, 1, tokens=tokens)
    above = as_coefficient("clip_high", clip_high, 0, infinite=True, tokens=tokens)
    largest = jnp.inf if dual_clip is None else dual_clip
    largest = as_coefficient("dual_clip", largest, 1, infinite=True, tokens=tokens)
    low = jnp.where(A > 0, 0, 1 - below)
    high = jnp.where(A > 0, 1 + above, largest)
    return -A * jnp.clip(jnp.exp(clamp(log_ratio)), low, high)
