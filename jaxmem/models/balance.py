"""Statistics of routers, and the loss that spreads tokens evenly over experts."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.models.config import ModelConfig


class Choice(NamedTuple):
    """A router's logits and choice of experts for each token."""

    logits: jax.Array  # f32 [B, T, experts]
    chosen: jax.Array  # int32 [B, T, experts.per_token]
    own: jax.Array  # the router's own choice; `chosen` may be replayed


def chosen(choice: Choice | None, is_needed: bool) -> jax.Array | None:
    """Experts that a layer's router chose; None without a router or if not needed."""
    return choice.chosen if is_needed and choice is not None else None


class Routed(NamedTuple):
    """Sums over tokens, of which those of micro-batches can be added.

    A layer without experts has zeros.
    """

    counts: Any  # f32 [layers, experts] tokens that an expert has
    chances: Any  # f32 [layers, experts] softmax of the router's logits
    entropy: Any  # f32 [layers] of that softmax, nats
    rerouted: Any  # f32 [layers] chosen experts that are not the router's own


def nothing(config: ModelConfig) -> Routed | None:
    """The sums before the first token; None for a model without experts."""
    if config.experts.count is None:
        return None
    every = jnp.zeros((config.layers, config.experts.count), jnp.float32)
    return Routed(every, every, every[:, 0], every[:, 0])


def counted(tokens: Any, segment_ids: Any) -> Any:
    """Boolean mask [B, T]: True for tokens other than padding, which is segment 0."""
    return np.ones(tokens.shape, bool) if segment_ids is None else segment_ids > 0


def add(
    routed: Routed, layer: jax.Array, choice: Choice, mask: jax.Array, trained: bool
) -> Routed:
    """Add the tokens of one layer to the sums.

    `mask` [B, T] is True for tokens that count, and `trained` says whether `chances`
    have a gradient.
    """
    logits = choice.logits if trained else jax.lax.stop_gradient(choice.logits)
    logs = jax.nn.log_softmax(logits)
    chances, mask = jnp.exp(logs), mask[..., None]
    chosen, own = (
        jnp.sum(jax.nn.one_hot(x, logits.shape[-1], dtype=jnp.float32), axis=-2)
        for x in (choice.chosen, choice.own)
    )
    foreign = jnp.sum(chosen * (1 - own), -1, keepdims=True)
    entropy = -jnp.sum(jax.lax.stop_gradient(chances * logs), -1, keepdims=True)
    sums = (
        jnp.sum(jnp.where(mask, x, 0), axis=(0, 1))
        for x in (chosen, chances, entropy, foreign)
    )
    both = zip(routed, sums, strict=True)
    return Routed(*(old.at[layer].set(x.reshape(old.shape[1:])) for old, x in both))


def rerouted(routed: Routed) -> float:
    """The share of all choices that are not the router's own."""
    return float(np.sum(routed.rerouted) / max(np.sum(routed.counts), 1))


def loss(routed: Routed, experts_per_token: int) -> jax.Array:
    """The load-balancing loss of all layers as one, at least `experts_per_token`.

        E Σ_e f_e P_e,   f_e = tokens of expert e / N,   P_e = Σ softmax_e / N

    N counts tokens once a layer. The gradient is that of P alone; without tokens it is
    0.

    Reference: Fedus et al., "Switch Transformers", 2021, arXiv:2101.03961, equations 4
    to 6, with all layers as one, as transformers has it.
    """
    counts, chances = (jnp.sum(x, axis=0) for x in routed[:2])
    tokens = jnp.maximum(jnp.sum(counts) / experts_per_token, 1)
    return len(counts) * jnp.sum(counts / tokens * (chances / tokens))


def with_loss(
    value: jax.Array, routed: Routed | None, config: ModelConfig, share: Any
) -> jax.Array:
    """The differentiated loss: `value` plus the routers' loss, if it has a factor.

    `value` is a micro-batch's part of the loss of a step, and `share` is its part of
    the step's tokens.
    """
    if routed is None or not config.router_aux_loss_coef:
        return value
    factor = config.router_aux_loss_coef * jnp.asarray(share, jnp.float32)
    return value + factor * loss(routed, config.experts.per_token)


def report(routed: Routed, experts_per_token: int) -> dict[str, float]:
    """Metrics of the routers of a step.

    `load` is the largest number of tokens of an expert over the mean number, and
    `entropy` is that of a token's softmax in nats. Both are means over layers with
    experts; `load_worst` and `entropy_worst` are those of the worst layer. `loss` is
    the result of the function `loss`.
    """
    routed = Routed(*(np.asarray(x, np.float64) for x in routed))
    tokens = routed.counts.sum(axis=1) / experts_per_token
    sparse = tokens > 0
    if not sparse.any():
        return {}
    counts = routed.counts[sparse]
    load = counts.max(axis=1) / counts.mean(axis=1)
    entropy = routed.entropy[sparse] / tokens[sparse]
    return {
        "load": float(load.mean()),
        "load_worst": float(load.max()),
        "entropy": float(entropy.mean()),
        "entropy_worst": float(entropy.min()),
        "loss": float(loss(routed, experts_per_token)),
    }
