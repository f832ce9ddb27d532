"""Losses of pairs of completions: DPO, IPO."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jaxmem.losses.ratios import Coefficient, as_coefficient, as_tokens


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

    Arguments and result are those of `dpo`; beta, the paper's τ, must not be 0.

    >>> import jax.numpy as jnp, jaxmem
    >>> chosen, rejected = jnp.array([-10.0]), jnp.array([-20.0])
    >>> jaxmem.losses.ipo(chosen, rejected, jnp.array([-15.0]), jnp.array([-15.0]))
    Array([25.], dtype=float32)

    Reference: Azar et al., 2023, arXiv:2310.12036.
    """
    margin = _margin(chosen, rejected, ref_chosen, ref_rejected)
    beta = as_coefficient("beta", beta, 1e-30, tokens=margin.shape)
    return jnp.square(margin - 1 / (2 * beta))


def _margin(chosen, rejected, ref_chosen, ref_rejected):
    chosen, rejected, ref_chosen, ref_rejected = as_tokens(
        chosen=chosen, rejected=rejected,
        ref_chosen=ref_chosen, ref_rejected=ref_rejected,
    )  # fmt: skip
    return (chosen - rejected) - lax.stop_gradient(ref_chosen - ref_rejected)
