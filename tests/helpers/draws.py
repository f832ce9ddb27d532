"""Heads that ids are drawn from, and the random numbers of the draws."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.head.maths import column_sampling

N, D, V, CHUNK, KEY = 37, 8, 300, 16, jax.random.key(3)


def make(std=1.0, v=V, seed=0):
    rng = np.random.default_rng(seed)
    h = rng.standard_normal((N, D), np.float32)
    return h, (rng.standard_normal((v, D), np.float32) * std / D**0.5).astype("f")


def uniform(n, tokens=N, key=KEY):
    """The numbers in [0, 1) that a token's ids are drawn by."""
    keys = column_sampling.token_keys(key, (tokens,))
    bits = jax.vmap(lambda key: jax.random.bits(key, (n,), jnp.uint32))(keys)
    return np.asarray(bits).astype(float) / 2**32
