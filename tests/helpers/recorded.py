"""Recorded entries: their starts one by one, and what they estimate, in float64."""

import jax.numpy as jnp
import numpy as np

import jaxmem
from jaxmem.head.maths import column_sampling, recorded

FLOATS = ("logprob", "entropy", "logsumexp", "sum_pi_squared")


def starts_of_each_set(p, k):
    """(starts, their weights, q): one start for each set of columns that can be kept.

    The set is the same between two starts at which a multiple of u enters or leaves a
    column's interval. Starts are in the middle, where rounding changes no set.
    """
    sampling = recorded.sampling_of(k, len(p))
    units = np.asarray(column_sampling.units(sampling, jnp.asarray(p)), np.int64)
    bounds = np.unique(np.append(-np.cumsum(units) % sampling.one, 0))
    counts = np.diff(np.append(bounds, sampling.one))
    return bounds + counts // 2, counts / sampling.one, units / sampling.one


def enumerate_starts(monkeypatch):
    """Draws that are starts, so that a test may go through all of them."""
    monkeypatch.setattr(
        column_sampling, "starts", lambda sampling, draws, shard=0: draws.astype(int)
    )


def scaled_logits(h, W, bias=0.0, softcap=None, temperature=1.0, vocab_size=None):
    """(z, dz/du) of z = softcap·tanh(u / softcap) / temperature, u = h Wᵀ + bias."""
    u = np.float64(h) @ np.float64(W).T + np.float64(bias)
    temperature = np.broadcast_to(np.float64(temperature), len(h))[:, None]
    z, slope = u / temperature, np.ones_like(u) / temperature
    if softcap is not None:
        z = softcap * np.tanh(u / softcap) / temperature
        slope = slope * (1 - np.tanh(u / softcap) ** 2)
    return np.where(np.arange(len(W)) < (vocab_size or len(W)), z, -np.inf), slope


def exact(h, W, y, entries, g, on=True, **options):
    """(results and `forward_error` by name, gradients by h, W and bias).

    The formulas of docs/sampled.md, from entries as they are; `g` has cotangents.
    """
    live = np.asarray(on) & (y >= 0)
    h = np.where(live[:, None], np.float64(h), 0)
    z, slope = scaled_logits(h, W, **options)
    n, v = z.shape
    row = np.arange(n)
    base, y = np.float64(entries.logsumexp), np.where(live, y, 0)
    sampling = recorded.sampling_of(entries.k, v)
    old = np.float64(entries.logits) - base[:, None]
    columns = np.asarray(entries.columns)
    kept = live[:, None] & (columns < (options.get("vocab_size") or v))
    columns = np.where(kept, columns, 0)
    p = jnp.where(kept, np.float32(np.exp(np.where(kept, old, 0))), 0)
    q = np.asarray(column_sampling.units(sampling, p), np.float64) / sampling.one
    weight = np.where(kept, 1 / np.where(kept, q, 1), 0)
    new = z[row[:, None], columns] - base[:, None]
    old_y, new_y = np.float64(entries.label_logit) - base, z[row, y] - base

    def total(of_record, f):
        change = np.where(kept, weight * (f(new) - f(old)), 0).sum(1)
        return of_record + f(new_y) - f(old_y) + change

    Z = total(1, np.exp)
    T = total(-np.float64(entries.entropy), lambda x: x * np.exp(x))
    Q = total(np.float64(entries.sum_pi_squared), lambda x: np.exp(2 * x))
    results = dict(logprob=new_y - np.log(Z), entropy=np.log(Z) - T / Z,
                   logsumexp=base + np.log(Z), sum_pi_squared=Q / Z**2)  # fmt: skip
    change = np.where(kept, weight * (np.exp(new) - np.exp(old)), 0)
    drawn = np.where(kept, 1 - q, 0)
    count, share = (drawn > 0).sum(1), np.maximum(drawn.sum(1), 1e-300)
    mean = (drawn * change).sum(1) / share
    spread = (drawn * (change - mean[:, None]) ** 2).sum(1)
    variance = count / np.maximum(count - 1, 1) * spread + mean**2 / 4
    variance = np.where(count > 1, variance, (drawn * change**2).sum(1))
    results["forward_error"] = np.sqrt(variance) / Z
    # Of the derivative by z: entries of p / q, and the label's.
    at = np.zeros((n, v))
    np.add.at(at, (row[:, None], columns), np.where(kept, weight, 0))
    at[row, y] += 1
    ln_p = np.where(at > 0, z - (base + np.log(Z))[:, None], 0)
    p = np.where(at > 0, np.exp(ln_p), 0)
    H, square = results["entropy"][:, None], results["sum_pi_squared"][:, None]
    onehot = np.arange(v) == y[:, None]
    derivative = dict(logprob=onehot - p, entropy=-p * (ln_p + H), logsumexp=p,
                      sum_pi_squared=2 * p * (p - square))  # fmt: skip
    # The derivative of the label's own logit is exact, of all others weighed.
    dz = sum(
        np.where(live, g[k], 0)[:, None]
        * np.where(onehot, derivative[k], at * derivative[k])
        for k in g
    )
    du = dz * slope
    results = {k: np.where(live, x, 0) for k, x in results.items()}
    return results, (du @ np.float64(W), du.T @ h, du.sum(0))


def moved(h, W, size, seed=5):
    """Hidden states and W after an update."""
    rng = np.random.default_rng(seed)
    dh, dW = (size * rng.standard_normal(x.shape) * x.std() for x in (h, W))
    return (h + dh).astype(np.float32), (W + dW / 3).astype(np.float32)


def dense_entries(h, W, y, k, draws, **options):
    """Entries of all tokens by `record`, of float64 logits."""
    z = scaled_logits(h, W, **options)[0]
    return recorded.record(jnp.float32(z), jnp.asarray(y), k, draws)


def take(entries, index):
    """Entries of some tokens."""
    return jaxmem.RecordedEntries(*(np.asarray(x)[index] for x in entries))
