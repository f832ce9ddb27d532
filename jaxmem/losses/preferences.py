"""Losses of pairs of answers: DPO, IPO."""

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
    """DPO: a pair of answers, the better to be made likelier, by as much as beta says.

        h = (chosen - ref_chosen) - (rejected - ref_rejected)
        out = -ln σ(beta · h)

    Of sequences: `sequence_sum` makes their log-probabilities from tokens'. A pair's
    slope depends on both answers, so the tokens come from `jaxmem.logprobs` (8NVD), or
    their slopes go into `token_loss` (see above).

    Args:
        chosen: ln p of the better answer [pairs], a sum over its tokens.
        rejected: ln p of the other [pairs].
        ref_chosen: the same under the reference, a constant [pairs].
        ref_rejected: likewise [pairs].
        beta: how strongly the reference holds.

    Returns:
        A loss a pair [pairs].

    >>> import jax.numpy as jnp
    >>> from jaxmem import losses
    >>> chosen, rejected = jnp.array([-10.0]), jnp.array([-20.0])
    >>> loss = losses.dpo(chosen, rejected, jnp.array([-15.0]), jnp.array([-15.0]))
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
    """IPO: as DPO, but with a margin to reach instead of one to grow for ever.

        h = (chosen - ref_chosen) - (rejected - ref_rejected)
        out = (h - 1 / (2·beta))²

    Args are those of `dpo`; beta is the paper's τ, and may not be 0.

    >>> import jax.numpy as jnp
    >>> from jaxmem import losses
    >>> chosen, rejected = jnp.array([-10.0]), jnp.array([-20.0])
    >>> losses.ipo(chosen, rejected, jnp.array([-15.0]), jnp.array([-15.0]))
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
