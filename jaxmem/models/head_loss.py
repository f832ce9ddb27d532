"""The cross-entropy of hidden states, with and without logits."""

from typing import Literal

import jax
import jax.numpy as jnp
import optax

from jaxmem.core.gradients import Sample
from jaxmem.heads.nnx import LMHead
from jaxmem.models.positions import Ids


def head_loss(
    head: LMHead,
    hidden: jax.Array,
    labels: Ids,
    normalizer: jax.Array,
    logits: Literal["fused", "materialised"],
    sample: Sample | None = None,
    key: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Sum of the tokens' cross-entropies, divided by `normalizer`, and metrics.

    The sum is a float32 scalar in nats; metrics are the sums over tokens of what
    `jaxmem.token_loss` tells besides.

    Args:
        head: of the decoder.
        hidden: [B, T, hidden] final hidden states.
        labels: [B, T] next token ids; negative for tokens without a loss.
        normalizer: number of tokens that count in the whole step.
        logits: "materialised" stores all logits, and serves for comparison.
        sample: how to sample the gradient, for "fused"; None: it is exact.
        key: as in `jaxmem.logprobs`, for "fused".
    """
    if logits == "fused":
        loss, told = head.token_loss(
            _cross_entropy, hidden, labels, normalizer=normalizer,
            gradient=sample, key=key,
        )  # fmt: skip
        return loss, {name: jnp.sum(x) for name, x in told.items()}
    per_token = optax.softmax_cross_entropy_with_integer_labels(
        head(hidden).astype(jnp.float32), jnp.maximum(labels, 0)
    )
    total = jnp.sum(jnp.where(labels >= 0, per_token, 0.0))
    return total / jnp.maximum(normalizer, 1), {}


def _cross_entropy(stats):
    return -stats.logprob
