"""Divergences from k columns of a teacher, in float64."""

import numpy as np

from tests.helpers.selected import scaled

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


def textbook(xp, way, p, q):
    ln_p, ln_q = (xp.log(xp.where(x > 0, x, 1)) for x in (p, q))
    if way == "jsd":
        m = BETA * q + (1 - BETA) * p
        ln_m = xp.log(xp.where(m > 0, m, 1))
        terms = BETA * q * (ln_q - ln_m) + (1 - BETA) * p * (ln_p - ln_m)
    else:
        terms = q * (ln_q - ln_p) if way == "forward_kl" else p * (ln_p - ln_q)
    return terms.sum(-1)


def by_p(way, p, q):
    """p ∂D/∂p."""
    if way == "forward_kl":
        return -q
    weight = 1 if way == "reverse_kl" else 1 - BETA
    other = q if way == "reverse_kl" else BETA * q + weight * p
    there = p > 0
    ratio = np.where(there, p, 1) / np.where(there, other, 1)
    return weight * p * np.log(ratio)


def exact(way, tail, g, operands, **options):
    """The divergence in float64, and gradients of hidden, W and bias by hand."""
    h, W, ids, ln_q = operands
    h, W, ln_q = (np.asarray(x).astype(np.float64) for x in (h, W, ln_q))
    z = scaled(np, h @ W.T, **options)
    z = z - z.max(1, keepdims=True)
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    of_id = (np.arange(p.shape[1]) == ids[:, :, None]).astype(float)  # [N, K, V]
    of_rest = 1 - of_id.sum(1, keepdims=True)
    groups = np.concatenate([of_id, of_rest], 1) if tail else of_id
    mass, q = np.einsum("nkv,nv->nk", groups, p), np.where(ids >= 0, np.exp(ln_q), 0)
    if tail:
        q = np.concatenate([q, 1 - q.sum(1, keepdims=True)], 1)
    total = mass.sum(1, keepdims=True)
    mass_s, q = mass / total, q / q.sum(1, keepdims=True)
    s = by_p(way, mass_s, q)
    s = s - mass_s * s.sum(1, keepdims=True)
    within = groups * (p[:, None] / np.where(mass > 0, mass, 1)[:, :, None])
    dz = g[:, None] * np.einsum("nk,nkv->nv", s, within)
    temperature = np.reshape(options.get("temperature", 1.0), (-1, 1))
    du, softcap = dz / temperature, options.get("softcap")
    if softcap is not None:
        cut = scaled(np, h @ W.T, **options) * temperature / softcap
        du = du * (1 - cut**2)
    du = np.pad(du, ((0, 0), (0, len(W) - du.shape[1])))
    return textbook(np, way, mass_s, q), (du @ W, du.T @ h, du.sum(0))
