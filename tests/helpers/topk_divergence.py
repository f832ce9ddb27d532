"""Divergences from k columns of a teacher, in float64."""

import numpy as np

from tests.helpers import oracle
from tests.helpers.targets import KINDS

N, D, V, K, CHUNK = 37, 24, 130, 6, 16
BETA = 0.3


def named(way):
    return f"jsd {BETA}" if way == "jsd" else way


def make(std=1.0, seed=0):
    """hidden, W, and a teacher: K distinct ids a token and their ln q, 0.8 at most."""
    rng = np.random.default_rng(seed)
    h = rng.standard_normal((N, D), np.float32)
    W = rng.standard_normal((V, D), np.float32) * std / D**0.5
    ids = np.stack([rng.permutation(100)[:K] for _ in range(N)]).astype(np.int32)
    ln_q = np.log(0.8 * rng.dirichlet(np.ones(K + 1), N)[:, :K]).astype(np.float32)
    return h, W.astype(np.float32), ids, ln_q


def exact(way, tail, g, operands, **options):
    """The divergence in float64, and gradients of hidden, W and bias by hand."""
    h, W, ids, ln_q = operands
    logits = oracle.Logits.of(h, W, **{"vocab_size": V} | options)
    kind = KINDS[way].__name__
    values, pull = oracle.divergence_of_columns(
        kind, logits.z, ids, np.asarray(ln_q).astype(np.float64), tail, BETA
    )
    return values, logits.gradients(pull(g))
