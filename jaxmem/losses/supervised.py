"""Losses for supervised training: cross-entropy, z-loss, label smoothing."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jaxmem.head.maths import checks
from jaxmem.head.maths.explicit_axes import sharded_like, with_automatic_axes
from jaxmem.head.maths.head import Matrix, as_head
from jaxmem.head.verbs import arguments
from jaxmem.losses.ratios import Coefficient, as_coefficient, as_tokens


def cross_entropy(logprob: ArrayLike) -> jax.Array:
    """Cross-entropy of the labels.

        out = -logprob                                                         (nats)

    Args:
        logprob: ln p(label) [...].

    Returns:
        A loss per token [...].

    >>> import jax.numpy as jnp, jaxmem
    >>> jaxmem.losses.cross_entropy(jnp.log(jnp.array([1.0, 0.5]))).round(4)
    Array([-0.    ,  0.6931], dtype=float32)
    """
    (lp,) = as_tokens(logprob=logprob)
    return -lp


def sft(logprob: ArrayLike, weights: ArrayLike) -> jax.Array:
    """Supervised fine-tuning: weighted cross-entropy, for the tokens of a completion.

        out = -weight · logprob

    For a mean, divide the sum by Σ weights over the whole step.

    Args:
        logprob: ln p(label) [...].
        weights: [...], 1 for a completion's token and 0 for a prompt's, or any weight
            per token. (If all are 0 or 1, `where=` or a negative label also saves the
            cost of masked tokens.)

    Returns:
        A loss per token [...].

    >>> import jax.numpy as jnp, jaxmem
    >>> jaxmem.losses.sft(jnp.array([-3.0, -2.0, -1.0]), jnp.array([0.0, 1.0, 0.5]))
    Array([0. , 2. , 0.5], dtype=float32)

    Reference: Ouyang et al., 2022, arXiv:2203.02155.
    """
    lp, weights = as_tokens(logprob=logprob, weights=weights)
    return -weights * lp


def z_loss(logsumexp: ArrayLike, *, coefficient: Coefficient = 1e-4) -> jax.Array:
    """Penalty that keeps the softmax's normaliser near 1; add it to the cross-entropy.

        out = coefficient · logsumexp²

    Args:
        logsumexp: ln Σ e^z of each token [...].
        coefficient: weight of the penalty.

    Returns:
        A loss per token [...].

    >>> import jax.numpy as jnp, jaxmem
    >>> jaxmem.losses.z_loss(jnp.array([0.0, 10.0])).round(4)
    Array([0.  , 0.01], dtype=float32)

    Reference: Chowdhery et al., 2022, arXiv:2204.02311 (PaLM).
    """
    (lse,) = as_tokens(logsumexp=logsumexp)
    weight = as_coefficient("coefficient", coefficient, 0, tokens=lse.shape)
    return weight * jnp.square(lse)


def label_smoothing(
    logprob: ArrayLike, mean_logprob: ArrayLike, *, smoothing: Coefficient = 0.1
) -> jax.Array:
    """Cross-entropy against a mixture of the label and the uniform distribution.

        out = -(1 - smoothing) · logprob - smoothing · mean_v ln p_v

    Inside `token_loss`, pass `mean_logit` as a per-token argument: mean_v ln p_v =
    mean_logit - stats.logsumexp.

    Args:
        logprob: ln p(label) [...].
        mean_logprob: mean of ln p over the vocabulary [...].
        smoothing: in [0, 1], the weight of the uniform distribution.

    Returns:
        A loss per token [...].

    >>> import jax.numpy as jnp, jaxmem
    >>> jaxmem.losses.label_smoothing(jnp.array([-1.0]), jnp.array([-3.0]))
    Array([1.2], dtype=float32)

    Reference: Szegedy et al., 2015, arXiv:1512.00567.
    """
    lp, mean = as_tokens(logprob=logprob, mean_logprob=mean_logprob)
    smoothing = as_coefficient("smoothing", smoothing, 0, 1, tokens=lp.shape)
    return -(1 - smoothing) * lp - smoothing * mean


@with_automatic_axes(sharded_like(hidden=1))
def mean_logit(
    hidden: ArrayLike,
    W: Matrix,
    *,
    where: ArrayLike | None = None,
    temperature: ArrayLike = 1.0,
) -> jax.Array:
    """Mean logit of each token over the vocabulary, at the cost of one column.

        out = (h · mean_v W_v + mean_v bias_v) / temperature = mean_v z_v

    Exact, because logits are linear in W; differentiable in hidden, W and bias.

    Args:
        hidden, W, where, temperature: as in `jaxmem.logprobs`, of a head without
            softcap; but temperature is differentiable.

    Returns:
        float32 [...] (float64 for float64 hidden); 0 for a masked token, with a
        gradient of exactly 0, even if its hidden state is NaN.

    **Memory** beyond inputs, outputs and gradients: 4·D; XLA may hold a copy of W if it
    is padded or has another dtype than hidden.

    Raises:
        TypeError, ValueError: as `jaxmem.logprobs` does.
        NotImplementedError: the head has a softcap; capped logits are not linear in W.

    >>> import jax.numpy as jnp, jaxmem
    >>> W = jnp.array([[3.0, 0.0, 1.0]] * 2)
    >>> jaxmem.losses.mean_logit(jnp.array([[1.0, 2.0]]), W)
    Array([4.], dtype=float32)
    """
    head = as_head(W)
    if head.softcap is not None:
        raise NotImplementedError(
            f"softcap={checks.brief(head.softcap)}: the mean of capped logits needs "
            "every logit; leave label smoothing out, or take it from logits with "
            "token_stats_from_logits"
        )
    source, head, tokens = arguments.read_head(hidden, head)
    h, bias, vocabulary = source.hidden, source.bias, 0 if head.layout == "vd" else 1
    columns = checks.check_vocab_size(head.vocab_size, source.columns(head.layout))
    dtype = np.promote_types(h.dtype, np.float32)
    divisor = arguments.read_temperature("temperature", temperature, tokens, dtype)
    if (where := checks.read_where(where, tokens)) is not None:
        where = jnp.broadcast_to(where, tokens).reshape(-1)
        h = jnp.where(where[:, None], h, 0)
    kept = lax.slice_in_dim(source.W, 0, columns, axis=vocabulary).astype(h.dtype)
    mean = jnp.mean(kept, axis=vocabulary, dtype=dtype)
    out = jnp.matmul(h.astype(dtype), mean, precision="highest")
    if bias is not None:
        out = out + jnp.mean(bias[:columns], dtype=dtype)
    if divisor is not None:
        # Divide masked tokens by 1: their NaN would reach W's gradient as 0 · NaN.
        out = out / (divisor if where is None else jnp.where(where, divisor, 1))
    return jnp.reshape(out if where is None else jnp.where(where, out, 0), tokens)
