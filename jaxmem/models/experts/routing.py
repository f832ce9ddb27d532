"""Routing: the experts of a token, and the weights of their results."""

import jax
import jax.numpy as jnp

from jaxmem.models.balance import Choice
from jaxmem.models.config import ModelConfig


def choose(
    logits: jax.Array,
    correction: jax.Array | None,
    config: ModelConfig,
    chosen: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The experts with the largest scores, and the weights of their results.

        s = softmax(logits) or sigmoid(logits);   best K of s + correction
        weight_k = router.scale s_k,   divided by Σ_k s_k if renormalised

    With groups, experts outside of the best groups are not chosen; a group is as good
    as the sum of its `router.group_best` best scores. With the scores "chosen" the
    weights are the softmax of the chosen experts' logits. With "near" each weight is
    that in the softmax of an expert and of those after it whose logits are near its.
    Logits are f32 [..., experts]; the correction has no gradient. Experts that are
    `chosen` take the place of the best ones; weights are of these logits all the same.
    """
    kind = config.router.scores
    scores = logits
    if kind == "softmax":
        scores = jax.nn.softmax(logits)
    elif kind == "sigmoid":
        scores = jax.nn.sigmoid(logits)
    if chosen is None:
        ranks = jax.lax.stop_gradient(scores)
        if correction is not None:
            ranks = ranks + jax.lax.stop_gradient(correction.astype(jnp.float32))
        if config.router.groups > 1:
            ranks = _mask_other_groups(ranks, config)
        chosen = jax.lax.top_k(ranks, config.experts.per_token)[1]
    if kind == "near":
        return chosen.astype(jnp.int32), _near_weights(logits, chosen, config)
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if kind == "chosen":
        weights = jax.nn.softmax(weights)
    if config.router.renormalised:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return chosen.astype(jnp.int32), weights * config.router.scale


def decide(
    logits: jax.Array,
    correction: jax.Array | None,
    config: ModelConfig,
    replayed: jax.Array | None,
) -> tuple[Choice, jax.Array]:
    """The choice and weights from `choose`; of `replayed` experts, if not None."""
    own, weights = choose(logits, correction, config)
    if replayed is None:
        return Choice(logits, own, own), weights
    replayed, weights = choose(logits, correction, config, replayed)
    return Choice(logits, replayed, own), weights


def _near_weights(
    logits: jax.Array, chosen: jax.Array, config: ModelConfig
) -> jax.Array:
    """Weights of the chosen experts with the scores "near", see `choose`."""
    weights = []
    for k in range(config.experts.per_token):
        expert = chosen[..., k, None]
        largest = jnp.take_along_axis(logits, expert, axis=-1)
        scale = jnp.maximum(jnp.abs(logits), largest)
        is_far = (largest - logits) / scale > 2 * config.router.nearness
        earlier = jax.nn.one_hot(chosen[..., :k], logits.shape[-1], dtype=bool)
        left_out = jax.lax.stop_gradient(is_far | jnp.any(earlier, axis=-2))
        shares = jax.nn.softmax(jnp.where(left_out, -jnp.inf, logits))
        weights.append(jnp.take_along_axis(shares, expert, axis=-1))
    return jnp.concatenate(weights, axis=-1)


def _mask_other_groups(ranks: jax.Array, config: ModelConfig) -> jax.Array:
    """Ranks, -inf outside of the best groups."""
    grouped = ranks.reshape(*ranks.shape[:-1], config.router.groups, -1)
    best, _ = jax.lax.top_k(grouped, config.router.group_best)
    _, kept = jax.lax.top_k(jnp.sum(best, axis=-1), config.router.groups_kept)
    is_kept = jnp.any(jax.nn.one_hot(kept, config.router.groups, dtype=bool), axis=-2)
    return jnp.where(is_kept[..., None], grouped, -jnp.inf).reshape(ranks.shape)
