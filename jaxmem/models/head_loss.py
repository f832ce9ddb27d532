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
    implementation: Literal["fused", "materialised"],
    sample: Sample | None = None,
    key: jax.Array | None = None,
) -> jax.Array:
    """Sum of the tokens' cross-entropies, divided by `normalizer`.

    Args:
        head: of the decoder.
        hidden: [B, T, hidden] final hidden states.
        labels: [B, T] next token ids; negative for tokens without a loss.
        normalizer: number of tokens that count in the whole step.
        implementation: "fused" never stores all logits; "materialised" does, as is
            usual, and serves as the reference and for comparison.
        sample: how to sample the gradient, for "fused"; None: it is exact.
        key: as in `jaxmem.logprobs`, for "fused".

    Returns:
        Float32 scalar, in nats; 0 if no token counts.
    """
    if implementation == "fused":
        return head.loss(
            hidden, labels, normalizer=normalizer,
            gradient=sample, key=key,
        )  # fmt: skip
    per_token = optax.softmax_cross_entropy_with_integer_labels(
        head(hidden).astype(jnp.float32), jnp.maximum(labels, 0)
    )
    return jnp.sum(jnp.where(labels >= 0, per_token, 0.0)) / jnp.maximum(normalizer, 1)
