"""Heads whose distributions over the vocabulary keep a known number of entries.

    z_ij = s_i g_ij - a ln(j + 2.7),      g_ij = Σ_d x_id W_jd,   x, W √D normal

Columns have the popularity of words (Zipf, a = 1) in the order of a tokenizer's ranks,
or all the same (a = 0); s_i says how sharp a token's distribution is. A label is drawn
from its token's distribution. With K=128 and V=151936, a token keeps Σ_j min(1, K p_j)
entries:

    flat     a=0, s=1                            128
    policy   a=1, s=2, 5, 12 by 26, 28, 46%      about 40: few that are open, many sure
    peaked   a=1, s=11                           about 8
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Kind(NamedTuple):
    """Sharpness of tokens, and popularity of columns."""

    sharpness: tuple[float, ...]
    share: tuple[float, ...]
    popularity: float


KINDS = {
    "flat": Kind((1.0,), (1.0,), 0.0),
    "policy": Kind((2.0, 5.0, 12.0), (0.26, 0.28, 0.46), 1.0),
    "peaked": Kind((11.0,), (1.0,), 1.0),
}


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def problem(kind: str, shape: tuple[int, int, int], dtype, seed: int = 0):
    """(hidden [N, D], W [V, D], labels [N]); the same for the same arguments."""
    n, d, v = shape
    of_tokens, of_columns, of_states, of_labels = jax.random.split(
        jax.random.key(seed), 4
    )
    sharpness, share, popularity = KINDS[kind]
    values, shares = jnp.array(sharpness), jnp.array(share)
    s = jax.random.choice(of_tokens, values, (n, 1), p=shares)
    h = s * jax.random.normal(of_states, (n, d))
    h = h.at[:, 0].set(1).astype(dtype)
    W = jax.random.normal(of_columns, (v, d), dtype) * jnp.asarray(d**-0.5, dtype)
    rank = jnp.arange(v, dtype=jnp.float32)
    W = W.at[:, 0].set((-popularity * jnp.log(rank + 2.7)).astype(dtype))
    return h, W, _labels(h, W, of_labels)


def _labels(h, W, key, rows=256):
    """One of each token's distribution: the largest of logits with Gumbel noise."""
    rows = min(rows, len(h))
    n_chunks = -(-len(h) // rows)
    padded = jnp.pad(h, ((0, n_chunks * rows - len(h)), (0, 0)))

    def chunk(i):
        here = jax.lax.dynamic_slice_in_dim(padded, i * rows, rows)
        z = jnp.matmul(here, W.T, preferred_element_type=jnp.float32)
        noise = jax.random.gumbel(jax.random.fold_in(key, i), z.shape)
        return jnp.argmax(z + noise, axis=1).astype(jnp.int32)

    return jax.lax.map(chunk, jnp.arange(n_chunks)).reshape(-1)[: len(h)]
