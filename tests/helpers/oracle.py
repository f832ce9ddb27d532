"""Dense float64 numpy, which every backend is held against; no code of jaxmem's."""

import numpy as np


def head(
    h, W, y, g, *, bias=0.0, softcap=None, temperature=1.0, vocab_size=None, on=True
):
    """Outputs by name, and (dh, dW, dbias) for cotangents g, of W [V, D]."""
    h, W, bias = (np.asarray(x).astype(np.float64) for x in (h, W, bias))
    live = np.asarray(on) & (y >= 0)
    h = np.where(live[:, None], h, 0)  # a masked row may hold NaN
    temperature = np.broadcast_to(np.float64(temperature), y.shape)[:, None]
    u = h @ W.T + bias
    z = (u if softcap is None else softcap * np.tanh(u / softcap)) / temperature
    z = np.where(np.arange(len(W)) < (vocab_size or len(W)), z, -np.inf)
    m = z.max(1, keepdims=True)
    lse = m + np.log(np.exp(z - m).sum(1, keepdims=True))
    p, onehot = np.exp(z - lse), np.arange(len(W)) == y[:, None]
    ln_p = np.where(p > 0, z - lse, 0)
    entropy, square = -(p * ln_p).sum(1), (p * p).sum(1)
    outputs = dict(logprob=np.where(onehot, ln_p, 0).sum(1), entropy=entropy,
                   logsumexp=lse[:, 0], sum_pi_squared=square)  # fmt: skip
    derivative = dict(logprob=onehot - p, entropy=-p * (ln_p + entropy[:, None]),
                      logsumexp=p,
                      sum_pi_squared=2 * p * (p - square[:, None]))  # fmt: skip
    dz = sum(np.where(live, g[k], 0)[:, None] * derivative[k] for k in g) / temperature
    du = dz if softcap is None else dz * (1 - np.tanh(u / softcap) ** 2)
    outputs = {k: np.where(live, v, 0) for k, v in outputs.items()}
    return outputs, (du @ W, du.T @ h, du.sum(0))
