"""Losses of the statistics of a token."""

import jax.numpy as jnp

CLIP, C_ENTROPY, C_Z = 0.2, 0.1, 1e-3


def ppo(stats, advantage, old):
    """PPO-clip, an entropy bonus and a z-loss: three outputs, two float arguments."""
    ratio = jnp.exp(stats.logprob - old)
    clipped = jnp.clip(ratio, 1 - CLIP, 1 + CLIP)
    policy = -jnp.minimum(ratio * advantage, clipped * advantage)
    loss = policy - C_ENTROPY * stats.entropy + C_Z * stats.logsumexp**2
    return loss, {"ratio": ratio, "hit": stats.is_argmax, "square": stats[3]}


def nll(stats, *_):
    return -stats.logprob
