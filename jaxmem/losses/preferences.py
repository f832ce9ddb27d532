"""Losses of pairs of completions: DPO and IPO; SimPO and ORPO without a reference."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jaxmem.losses.ratios import Coefficient, as_coefficient, as_tokens

_CERTAIN = 1e-7  # nats, from which on a mean log-probability counts as certain


def dpo(
    chosen: ArrayLike,
    rejected: ArrayLike,
    ref_chosen: ArrayLike,
    ref_rejected: ArrayLike,
    *,
    beta: Coefficient = 0.1,
) -> jax.Array:
    """DPO loss of pairs of completions.

        h = (chosen - ref_chosen) - (rejected - ref_rejected)
        out = -ln σ(beta · h)

    The arguments are of sequences: `sequence_sum` computes them from per-token
    log-probabilities. The slope of a pair depends on both completions, so per-token
    log-probabilities must come from `jaxmem.logprobs` (8NVD), or the slopes go into
    `token_loss`, as `jaxmem.losses` describes.

    Args:
        chosen: ln p of the preferred completion [pairs], a sum over its tokens.
        rejected: ln p of the other completion [pairs].
        ref_chosen, ref_rejected: the same under the reference policy, constants.
        beta: strength of the regularisation towards the reference.

    Returns:
        A loss per pair [pairs].

    >>> import jax.numpy as jnp, jaxmem
    >>> chosen, rejected = jnp.array([-10.0]), jnp.array([-20.0])
    >>> reference = jnp.array([-15.0])
    >>> loss = jaxmem.losses.dpo(chosen, rejected, reference, reference)
    >>> print(f"{loss[0]:.4f}")
    0.3133

    Reference: Rafailov et al., 2023, arXiv:2305.18290.
    """
    margin = _margin(chosen, rejected, ref_chosen, ref_rejected)
    beta = as_coefficient("beta", beta, 0, tokens=margin.shape)
    return -jax.nn.log_sigmoid(beta * margin)


def ipo(
    chosen: ArrayLike,
    rejected: ArrayLike,
    ref_chosen: ArrayLike,
    ref_rejected: ArrayLike,
    *,
    beta: Coefficient = 0.1,
) -> jax.Array:
    """IPO loss of pairs of completions: DPO with a target for the margin.

        h = (chosen - ref_chosen) - (rejected - ref_rejected)
        out = (h - 1 / (2·beta))²

    Arguments and result are as in `dpo`; beta, the paper's τ, must not be 0.

    >>> import jax.numpy as jnp, jaxmem
    >>> chosen, rejected = jnp.array([-10.0]), jnp.array([-20.0])
    >>> jaxmem.losses.ipo(chosen, rejected, jnp.array([-15.0]), jnp.array([-15.0]))
    Array([25.], dtype=float32)

    Reference: Azar et al., 2023, arXiv:2310.12036.
    """
    margin = _margin(chosen, rejected, ref_chosen, ref_rejected)
    beta = as_coefficient("beta", beta, 1e-30, tokens=margin.shape)
    return jnp.square(margin - 1 / (2 * beta))


def simpo(
    chosen: ArrayLike,
    rejected: ArrayLike,
    *,
    beta: Coefficient = 2.0,
    gamma: Coefficient = 0.5,
) -> jax.Array:
    """SimPO loss of pairs of completions: of means, with a margin, and no reference.

        out = -ln σ(beta · (chosen - rejected) - gamma)

    The arguments are means: ln p of a completion, divided by the number of its tokens.
    The defaults are from the paper's code, where gamma is a quarter of beta.

    Args:
        chosen: mean ln p of the preferred completion's tokens [pairs].
        rejected: the same of the other completion [pairs].
        beta: scale of the reward beta · ln p.
        gamma: the margin by which rewards are to differ.

    Returns:
        A loss per pair [pairs].

    >>> import jax.numpy as jnp, jaxmem
    >>> loss = jaxmem.losses.simpo(jnp.array([-1.0]), jnp.array([-2.0]))
    >>> print(f"{loss[0]:.4f}")
    0.2014

    Reference: Meng et al., 2024, arXiv:2405.14734.
    """
    chosen, rejected = as_tokens(chosen=chosen, rejected=rejected)
    beta = as_coefficient("beta", beta, 0, tokens=chosen.shape)
    gamma = as_coefficient("gamma", gamma, 0, tokens=chosen.shape)
    return -jax.nn.log_sigmoid(beta * (chosen - rejected) - gamma)


def orpo(
    chosen: ArrayLike, rejected: ArrayLike, *, beta: Coefficient = 0.1
) -> jax.Array:
    """ORPO loss of pairs of completions: supervised, with a ratio of odds.

        odds(p) = p / (1 - p)
        out = -chosen - beta · ln σ(ln odds(e^chosen) - ln odds(e^rejected))

    The arguments are means, as in `simpo`; the first term is the supervised loss of the
    preferred completion. A mean of 0, which no completion of uncertain tokens has,
    stands for the probability 1 - 1e-7, so that its odds are finite; its gradient is 0
    in the second term.

    Args:
        chosen, rejected: as in `simpo`, at most 0 [pairs].
        beta: weight of the second term, the paper's λ.

    Returns:
        A loss per pair [pairs].

    >>> import jax.numpy as jnp, jaxmem
    >>> loss = jaxmem.losses.orpo(jnp.array([-1.0]), jnp.array([-2.0]))
    >>> print(f"{loss[0]:.4f}")
    1.0238

    Reference: Hong et al., 2024, arXiv:2403.07691.
    """
    chosen, rejected = as_tokens(chosen=chosen, rejected=rejected)
    beta = as_coefficient("beta", beta, 0, tokens=chosen.shape)
    log_ratio = _log_odds(chosen) - _log_odds(rejected)
    return -chosen - beta * jax.nn.log_sigmoid(log_ratio)


def _log_odds(logprob):
    """Logarithm of p / (1 - p), by ln p."""
    logprob = jnp.minimum(logprob, -_CERTAIN)
    return logprob - jnp.log(-jnp.expm1(logprob))


def _margin(chosen, rejected, ref_chosen, ref_rejected):
    chosen, rejected, ref_chosen, ref_rejected = as_tokens(
        chosen=chosen, rejected=rejected,
        ref_chosen=ref_chosen, ref_rejected=ref_rejected,
    )  # fmt: skip
    return (chosen - rejected) - lax.stop_gradient(ref_chosen - ref_rejected)
