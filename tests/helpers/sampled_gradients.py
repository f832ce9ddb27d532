"""Statistics, cotangents and draws of sampled gradients."""

import jax
import numpy as np

from jaxmem.head.maths import column_sampling

FLOATS = ("logprob", "entropy", "logsumexp", "sum_pi_squared")
SAVED = (*FLOATS, "max", "log_sum")


def random_draws(n, key=0):
    return column_sampling.draws(column_sampling.token_keys(jax.random.key(key), (n,)))


def cotangents(n, names=FLOATS, seed=5):
    rng = np.random.default_rng(seed)
    return {k: rng.standard_normal(n).astype(np.float32) for k in names}
