"""Losses of tokens and sequences as plain functions of log-probabilities.

Functions of tokens take arrays of one shape and return a loss a token of that shape,
float32 (float64 for float64 arrays), so that they go into `jaxmem.token_loss`, where
loss and gradient come from one pass over the vocabulary (6NVD), or onto the results of
`jaxmem.logprobs` and `jaxmem.token_stats` (8NVD). They are to be minimised. What a
masked token adds is for the caller's mask or weights to leave out.

**How to average** is no option of a loss but a number known before the pass: multiply
by a weight a token, or divide the sum by a count, of the whole step and over all its
micro-batches. A mean over tokens (DAPO) divides by the tokens that count; a mean over
sequences of their means (GRPO, GSPO) has `sequence_mean_weights`; Dr. GRPO divides by
the number of sequences times the longest answer allowed.

**Losses that couple tokens** (`gspo` by its sequence's ratio, `dpo` and `ipo` by a pair
of sequences) need log-probabilities before any token's loss is known: a forward-only
pass (2NVD) fixes the coupling, then `token_loss` (6NVD); or `logprobs`, differentiated
as it stands (8NVD as well, with one pass over the trunk instead of two). Any such loss
of log-probabilities `lp` becomes one for `token_loss` by its slopes,

    slope = jax.grad(loss)(lp)        out = slope · stats.logprob

which has the gradient of `loss`, though not its value.

Ratios of probabilities are e^δ with δ clamped to ±20: nothing overflows, and past the
clamp, as where a ratio is clipped, the gradient is exactly 0.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jaxmem import _head, _spec
from jaxmem._explicit import sharded_like, with_automatic_axes
from jaxmem._policy import cispo as cispo
from jaxmem._policy import dapo as dapo
from jaxmem._policy import dr_grpo as dr_grpo
from jaxmem._policy import entropy_bonus as entropy_bonus
from jaxmem._policy import grpo as grpo
from jaxmem._policy import gspo as gspo
from jaxmem._policy import policy_gradient as policy_gradient
from jaxmem._policy import ppo_clip as ppo_clip
from jaxmem._ratios import Coefficient, as_tokens, check_coefficient
from jaxmem._ratios import kl_k1 as kl_k1
from jaxmem._ratios import kl_k2 as kl_k2
from jaxmem._ratios import kl_k3 as kl_k3
from jaxmem._ratios import kl_low_variance as kl_low_variance
from jaxmem._ratios import truncated_importance_weights as truncated_importance_weights
from jaxmem._sequences import grpo_advantages as grpo_advantages
from jaxmem._sequences import rloo_advantages as rloo_advantages
from jaxmem._sequences import sequence_log_ratio as sequence_log_ratio
from jaxmem._sequences import sequence_mean_weights as sequence_mean_weights
from jaxmem._sequences import sequence_sum as sequence_sum
from jaxmem._spec import Layout

# ------------------------------------------------------------------- supervised


def cross_entropy(logprob: ArrayLike) -> jax.Array:
    """Cross-entropy of the labels.

        out = -logprob                                                         (nats)

    Args:
        logprob: ln p(label) [...].

    >>> import jax.numpy as jnp
    >>> from jaxmem import losses
    >>> losses.cross_entropy(jnp.log(jnp.array([1.0, 0.5]))).round(4)
    Array([-0.    ,  0.6931], dtype=float32)
    """
    (lp,) = as_tokens(logprob=logprob)
    return -lp


def sft(logprob: ArrayLike, weights: ArrayLike) -> jax.Array:
    """Supervised fine-tuning: cross-entropy of the tokens that an answer consists of.

        out = -weight · logprob

    The mean divides the sum by Σ weights, over the whole step.

    Args:
        logprob: ln p(label) [...].
        weights: [...], 1 for an answer's token and 0 for a prompt's, or how much the
            token matters. (Where all are 0 or 1, `where=` or a negative label saves
            the tokens' cost as well.)

    >>> import jax.numpy as jnp
    >>> from jaxmem import losses
    >>> losses.sft(jnp.array([-3.0, -2.0, -1.0]), jnp.array([0.0, 1.0, 0.5]))
    Array([0. , 2. , 0.5], dtype=float32)

    Reference: Ouyang et al., 2022, arXiv:2203.02155.
    """
    lp, weights = as_tokens(logprob=logprob, weights=weights)
    return -weights * lp


def z_loss(logsumexp: ArrayLike, *, coefficient: Coefficient = 1e-4) -> jax.Array:
    """Keeps the softmax's normaliser near 1; to be added to the cross-entropy.

        out = coefficient · logsumexp²

    Args:
        logsumexp: ln Σ e^z of each token [...].
        coefficient: weight of the penalty.

    >>> import jax.numpy as jnp
    >>> from jaxmem import losses
    >>> losses.z_loss(jnp.array([0.0, 10.0])).round(4)
    Array([0.  , 0.01], dtype=float32)

    Reference: Chowdhery et al., 2022, arXiv:2204.02311 (PaLM).
    """
    check_coefficient("coefficient", coefficient, 0)
    (lse,) = as_tokens(logsumexp=logsumexp)
    return coefficient * jnp.square(lse)


def label_smoothing(
    logprob: ArrayLike, mean_logprob: ArrayLike, *, smoothing: Coefficient = 0.1
) -> jax.Array:
    """Cross-entropy against the label mixed with the uniform distribution.

        out = -(1 - smoothing) · logprob - smoothing · mean_v ln p_v

    Inside `token_loss`, `mean_logit` is a per-token argument, and mean_v ln p_v =
    mean_logit - stats.logsumexp.

    Args:
        logprob: ln p(label) [...].
        mean_logprob: mean of ln p over the vocabulary [...].
        smoothing: in [0, 1], the share of the uniform distribution.

    >>> import jax.numpy as jnp
    >>> from jaxmem import losses
    >>> losses.label_smoothing(jnp.array([-1.0]), jnp.array([-3.0]))
    Array([1.2], dtype=float32)

    Reference: Szegedy et al., 2015, arXiv:1512.00567.
    """
    check_coefficient("smoothing", smoothing, 0, 1)
    lp, mean = as_tokens(logprob=logprob, mean_logprob=mean_logprob)
    return -(1 - smoothing) * lp - smoothing * mean


@with_automatic_axes(sharded_like(hidden=1))
def mean_logit(
    hidden: ArrayLike,
    W: ArrayLike,
    *,
    where: ArrayLike | None = None,
    temperature: ArrayLike = 1.0,
    softcap: float | None = None,
    bias: ArrayLike | None = None,
    vocab_size: int | None = None,
    layout: Layout | None = None,
) -> jax.Array:
    """Mean logit of each token over the vocabulary, at the price of one column.

        out = (h · mean_v W_v + mean_v bias_v) / temperature = mean_v z_v

    Exact, because logits are linear in W, and differentiable in hidden, W and bias.
    Args are those of `jaxmem.logprobs`.

    Returns:
        float32 [...] (float64 for float64 hidden); 0 for a masked token, with a
        gradient of exactly 0, even where its hidden state is NaN.

    **Memory** beyond inputs, outputs and gradients: 4·D; while a padded W is sliced, or
    one of another type than hidden is cast, XLA may hold a copy.

    Raises:
        TypeError, ValueError: as `jaxmem.logprobs` does.
        NotImplementedError: a softcap; capped logits are not linear in W.

    >>> import jax.numpy as jnp
    >>> from jaxmem import losses
    >>> losses.mean_logit(jnp.array([[1.0, 2.0]]), jnp.array([[3.0, 0.0, 1.0]] * 2))
    Array([4.], dtype=float32)
    """
    if softcap is not None:
        raise NotImplementedError(
            f"softcap={softcap!r}: the mean of capped logits needs every logit; leave "
            "label smoothing out, or take it from logits with token_stats_from_logits"
        )
    hidden, W = _spec.as_array("hidden", hidden), _spec.as_array("W", W)
    _spec.check_hidden(hidden)
    vocabulary = 0 if _spec.check_layout(hidden, W, layout) == "vd" else 1
    columns = W.shape[vocabulary]
    columns = _spec.check_vocab_size(vocab_size, columns)
    tokens, dtype = hidden.shape[:-1], np.promote_types(hidden.dtype, np.float32)
    temperature = _spec.as_visible_array("temperature", temperature)
    _spec.check_temperature(temperature, tokens)
    if where is not None:
        where = _spec.as_array("where", where)
        _spec.check_where(where, tokens)
        where = jnp.broadcast_to(where, tokens)
        hidden = jnp.where(where[..., None], hidden, 0)
    kept = lax.slice_in_dim(W, 0, columns, axis=vocabulary).astype(hidden.dtype)
    mean = jnp.mean(kept, axis=vocabulary, dtype=dtype)
    out = jnp.matmul(hidden.astype(dtype), mean, precision="highest")
    if bias is not None:
        bias = _spec.as_array("bias", bias)
        _spec.check_bias(bias, W.shape[vocabulary])
        out = out + jnp.mean(bias[:columns], dtype=dtype)
    return _cooled(out, temperature, where)


def _cooled(out, temperature, where):
    """Divided by its temperature; 0 where a token does not count."""
    flat = _head._flat_temperature(temperature, out.shape, out.dtype)
    if flat is not None:
        temperature = jnp.reshape(flat, out.shape)
        # By 1 where it does not count: 0 times NaN would reach W's gradient.
        out = out / (temperature if where is None else jnp.where(where, temperature, 1))
    return out if where is None else jnp.where(where, out, 0)


# ------------------------------------------------------------------ preferences


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
    check_coefficient("beta", beta, 0)
    margin = _margin(chosen, rejected, ref_chosen, ref_rejected)
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
    check_coefficient("beta", beta, 1e-30)
    margin = _margin(chosen, rejected, ref_chosen, ref_rejected)
    return jnp.square(margin - 1 / (2 * beta))


def _margin(chosen, rejected, ref_chosen, ref_rejected):
    chosen, rejected, ref_chosen, ref_rejected = as_tokens(
        chosen=chosen, rejected=rejected,
        ref_chosen=ref_chosen, ref_rejected=ref_rejected,
    )  # fmt: skip
    return (chosen - rejected) - lax.stop_gradient(ref_chosen - ref_rejected)
