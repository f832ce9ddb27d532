"""Variance that an update gains by learning from a part of its tokens.

Tokens are drawn from simulated policies: their logits are normal, with a standard
deviation of each token's own. The variance is that of the sum of the tokens' gradients
by the logits, relative to the sum of the squared norms, which is the variance that
sampling them has already:

    added = Σ |g|² (1/π - 1) / Σ |g|²

with equal probabilities π, with those of `minibatches.keep_probabilities` from the
sampler's probability alone, as in a run, and with those from the norm |g| itself, which
also needs the sum of the squared probabilities.
"""

from collections.abc import Iterator

import numpy as np

from jaxmem.train.jobs.grpo.minibatches import keep_probabilities

# Mean and deviation of the logarithm of the standard deviation of a token's logits.
POLICIES = {"trained": (3.85, 1.3), "open": (2.5, 1.5)}
SHARES = (0.75, 0.5, 0.25, 0.15, 0.1)


def tokens(policy: str, count: int, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """(probabilities of sampled tokens, norms of their gradients by the logits)."""
    rng, (mean, deviation) = np.random.default_rng(0), POLICIES[policy]
    found = []
    for _ in range(count):
        z = rng.normal(size=vocab_size) * np.exp(rng.normal(mean, deviation))
        p = np.exp(z - z.max())
        p /= p.sum()
        label = rng.choice(vocab_size, p=p)
        g = -p
        g[label] += 1
        found.append((p[label], np.linalg.norm(g)))
    sampled, norms = np.array(found).T
    return sampled, norms


def variances(count: int, vocab_size: int) -> Iterator[dict]:
    """Rows of each policy and share of the tokens."""
    for policy in POLICIES:
        p, norms = tokens(policy, count, vocab_size)
        facts = {
            "policy": policy,
            "tokens": count,
            "vocab_size": vocab_size,
            "share_above_0_99": round(float(np.mean(p > 0.99)), 3),
            "mean_nll": round(float(-np.log(p).mean()), 3),
        }
        for share in SHARES:
            laws = {
                "uniform": np.full(count, share),
                "importance": keep_probabilities(1 - p, share),
                "by_norm": keep_probabilities(norms, share),
            }
            added = {
                f"added_{name}": round(_added(norms, law), 4)
                for name, law in laws.items()
            }
            largest = round(float(1 / laws["importance"].min()), 1)
            yield {**facts, "token_fraction": share, **added, "largest_weight": largest}


def _added(norms: np.ndarray, probability: np.ndarray) -> float:
    squares = norms**2
    return float((squares * (1 / probability - 1)).sum() / squares.sum())
