"""Dense float64 numpy, which every backend is held against; no code of jaxmem's.

A function of scaled logits z [N, V] returns its values, and a function from cotangents
of the values to the derivative by z, derived by hand. `Logits` has the derivative of z.
"""

import dataclasses

import numpy as np


def float64(*arrays):
    return [np.asarray(x).astype(np.float64) for x in arrays]


@dataclasses.dataclass(frozen=True)
class Logits:
    """z = softcap·tanh((h Wᵀ + bias) / softcap) / temperature of W [V, D]."""

    h: np.ndarray  # 0 where a token is masked, where the caller's may be NaN
    W: np.ndarray
    slope: np.ndarray  # ∂z/∂(h Wᵀ), [N, vocab_size]
    z: np.ndarray  # [N, vocab_size]

    @classmethod
    def of(
        cls, h, W, bias=0.0, softcap=None, temperature=1.0, vocab_size=None, on=True
    ):
        h, W, bias = float64(h, W, bias)
        h = np.where(np.reshape(on, (-1, 1)), h, 0)
        z, slope = scale(h @ W.T + bias, softcap, temperature, vocab_size)
        return cls(h, W, slope, z)

    def gradients(self, dz):
        """(dh, dW, dbias) for the derivative by z."""
        du = np.pad(dz * self.slope, [(0, 0), (0, len(self.W) - dz.shape[1])])
        return du @ self.W, du.T @ self.h, du.sum(0)

    def terms(self, dz):
        """Norms of the terms of which dh and dW are sums, for bounds of rounding."""
        squares = (dz * self.slope) ** 2
        of_W = self.W[: dz.shape[1]] ** 2
        dW = np.pad(squares.T @ self.h**2, [(0, len(self.W) - len(of_W)), (0, 0)])
        return np.sqrt(squares @ of_W), np.sqrt(dW)


def scale(u, softcap=None, temperature=1.0, vocab_size=None):
    """(z, ∂z/∂u) of logits u [N, V], without columns of padding."""
    temperature = np.reshape(np.float64(temperature), (-1, 1))
    tanh = np.zeros_like(u) if softcap is None else np.tanh(u / softcap)
    z = (u if softcap is None else softcap * tanh) / temperature
    return z[:, :vocab_size], ((1 - tanh**2) / temperature)[:, :vocab_size]


def log_softmax(z):
    """ln p; of the largest, -ln(1 + Σ others), with the digits of small others."""
    top = z.argmax(1)[:, None]
    m = np.take_along_axis(z, top, 1)
    others = np.exp(z - m)
    np.put_along_axis(others, top, 0, 1)
    return z - m - np.log1p(others.sum(1, keepdims=True))


def times(p, *ln):
    """p ln, or p (ln - other), which is 0 where p is."""
    first, *others = (np.where(p > 0, x, 0) for x in ln)
    return p * (first - sum(others))


def statistics(z, y):
    """Statistics of p = softmax(z) and of labels y, by name."""
    ln_p = log_softmax(z)
    p, onehot = np.exp(ln_p), np.arange(z.shape[1]) == y[:, None]
    entropy, square = -times(p, ln_p).sum(1), (p * p).sum(1)
    values = dict(
        logprob=np.where(onehot, ln_p, 0).sum(1), entropy=entropy,
        logsumexp=z.max(1) - ln_p.max(1), sum_pi_squared=square,
    )  # fmt: skip
    derivatives = dict(
        logprob=np.where(onehot, -np.expm1(ln_p), -p),
        entropy=-times(p, ln_p) - p * entropy[:, None], logsumexp=p,
        sum_pi_squared=2 * p * (p - square[:, None]),
    )  # fmt: skip

    def pull(g):
        return sum(np.reshape(g[k], (-1, 1)) * derivatives[k] for k in g)

    return values, pull


def is_argmax(z, y):
    """True of tokens whose label's logit is the largest."""
    onehot = np.arange(z.shape[1]) == y[:, None]
    return np.where(onehot, z, -np.inf).max(1) >= z.max(1)


def selected(z, ids):
    """ln p of ids [N, K]; 0 of those that are negative."""
    ln_p, exists, index = log_softmax(z), ids >= 0, np.maximum(ids, 0)

    def pull(g):
        g, at_ids = np.where(exists, g, 0), np.zeros(z.shape)
        np.add.at(at_ids, (np.arange(len(z))[:, None], index), g)
        # at_ids - p Σ g, which cancels where p is nearly 1
        own = at_ids * -np.expm1(np.where(at_ids == 0, 0, ln_p))
        return own - np.exp(ln_p) * (g.sum(1, keepdims=True) - at_ids)

    return np.where(exists, np.take_along_axis(ln_p, index, 1), 0), pull


def support(z, y, ids):
    """ln p of labels y in the softmax of the ids [N, K] that are not negative."""
    inside = (np.arange(z.shape[1]) == ids[:, :, None]).any(1)
    rows = inside.any(1)[:, None]  # of a token without ids, all
    values, pull = selected(np.where(inside | ~rows, z, -np.inf), y[:, None])
    return values[:, 0], lambda g: pull(g[:, None])


def topk(z, k):
    """(ids, ln p) of the k largest; the first of equal ones is first."""
    ids = np.argsort(-z, axis=1, kind="stable")[:, :k]
    return ids, *selected(z, ids)


def draws(z, uniform):
    """The id at which the sum of p exceeds each uniform number [N, n]."""
    sums = np.cumsum(np.exp(log_softmax(z)), 1)[:, None]
    return (sums <= uniform[:, :, None]).sum(2)


def divergence(kind, z, teacher, beta=0.5):
    """Divergence of softmax(z) from the softmax of a teacher's logits."""
    ln_p, ln_q = log_softmax(z), log_softmax(teacher)
    p, q = np.exp(ln_p), np.exp(ln_q)
    values, p_slope = compare(kind, p, q, ln_p, ln_q, beta)
    total = p_slope.sum(1, keepdims=True)
    return values, lambda g: g[:, None] * (p_slope - p * total)


def compare(kind, p, q, ln_p, ln_q, beta):
    """The divergence of p from q, [N, K] each, and p ∂D/∂p."""
    if kind == "ReverseKL":
        terms = times(p, ln_p, ln_q)
        return terms.sum(1), terms
    if kind == "ForwardKL":
        return times(q, ln_q, ln_p).sum(1), -q
    assert kind == "JSD"
    with np.errstate(divide="ignore"):
        ln_m = np.log(beta * q + (1 - beta) * p)
    of_p, of_q = times(p, ln_p, ln_m), times(q, ln_q, ln_m)
    return (beta * of_q + (1 - beta) * of_p).sum(1), (1 - beta) * of_p


def divergence_of_columns(kind, z, ids, ln_q, rest=True, beta=0.5):
    """Divergence over the ids of a token, each once, and over the rest of them."""
    exists = ids >= 0
    first = (ids[:, :, None] == ids[:, None]).argmax(2) == np.arange(ids.shape[1])
    groups = np.arange(z.shape[1]) == ids[:, :, None]  # [N, K, V]
    groups = groups & first[:, :, None]
    q = np.where(exists & first, np.exp(ln_q), 0)
    if rest:
        groups = np.append(groups, ~groups.any(1, keepdims=True), 1)
        q = np.append(q, np.maximum(1 - q.sum(1, keepdims=True), 0), 1)
    p = np.exp(log_softmax(z))
    mass = np.einsum("nkv,nv->nk", groups, p)
    shares = [x / np.where(x.sum(1) > 0, x.sum(1), 1)[:, None] for x in (mass, q)]
    with np.errstate(divide="ignore"):
        values, slope = compare(kind, *shares, *map(np.log, shares), beta)
    slope = slope - shares[0] * slope.sum(1, keepdims=True)
    within = slope / np.where(mass > 0, mass, 1)

    def pull(g):
        return g[:, None] * p * np.einsum("nk,nkv->nv", within, groups)

    return values, pull


def cross_entropy_of_draws(z, ids):
    """The mean of -ln p over ids that were drawn, of which some may be absent."""
    values, pull = selected(z, ids)
    count = np.maximum((ids >= 0).sum(1), 1)
    return -values.sum(1) / count, lambda g: pull(-(g / count)[:, None])


def head(h, W, y, g, *, on=True, **options):
    """Outputs by name, and (dh, dW, dbias) for cotangents g, of W [V, D]."""
    on = np.asarray(on) & (y >= 0)
    logits = Logits.of(h, W, on=on, **options)
    values, pull = statistics(logits.z, y)
    g = {k: np.where(on, x, 0) for k, x in g.items()}
    values = {k: np.where(on, x, 0) for k, x in values.items()}
    return values, logits.gradients(pull(g))
