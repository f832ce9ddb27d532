"""Rows of logits for kernels, and their results against XLA."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem import devices
from tests.helpers import hlo
from tests.helpers.divergence import make
from tests.helpers.targets import loss_of_two_heads

EPS = float(np.finfo(np.float32).eps)


def rows_of_logits(columns):
    """Flat, confident, very confident with a tie, masked columns, and one NaN."""
    rng = np.random.default_rng(0)
    z = rng.standard_normal((6, columns)).astype(np.float32)
    z[1] *= 20
    z[2] = -30
    z[2, -1] = 0
    z[3] = 1e4
    z[4, ::3] = -np.inf
    z[5, columns // 2] = np.nan
    return z


def lowered_loss(verb, monkeypatch):
    """A loss of a divergence, for a GPU."""
    monkeypatch.setattr(devices, "backend", lambda: "gpu")

    def loss(h, W, *reference):
        labels = jnp.zeros(len(h), jnp.int32)
        of = loss_of_two_heads(verb, lambda stats, divergence: divergence)
        return of(h, W, labels, *reference)[0]

    operands = [jnp.asarray(x, jnp.bfloat16) for x in make(v=3000)]
    return hlo.lowered_for_an_h200(jax.grad(loss, (0, 1)), *operands)


def by_sorting(x, k):
    """Largest first; equal ones, 0 and -0 among them, in the order of their indices."""
    indices = np.argsort(-x, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(x, indices, axis=1), indices
