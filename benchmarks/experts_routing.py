"""Experts of each token: a drawn, uneven choice, or a recorded one.

    logit_ne = b_e + noise,   b_e ~ N(0, 0.5),   the 8 largest of 128

A bias of each expert, which all tokens share, makes some experts many times as busy as
others: of 8192 tokens, the busiest has 4054 rows, the median 365, and the least busy 3.
`run_experts` writes how many rows each one has. A recorded choice has the rows of each
expert of the second layer in `experts_routing_cpu.csv`.
"""

import numpy as np

from benchmarks import results

SPREAD = 0.5  # standard deviation of the biases, that of the noise being 1


def choices(
    tokens: int, experts: int, chosen: int, routing: str = "drawn"
) -> np.ndarray:
    """Int32 [tokens, chosen], all different in a row."""
    rng = np.random.default_rng(0)
    if routing != "drawn":
        found = results.read("experts_routing_cpu.csv")
        found = [r for r in found if (r["routing"], r["layer"]) == (routing, "1")]
        # Each expert's rows are tokens that follow one another, at most all of them.
        each = np.repeat(np.arange(experts), [int(r["rows"]) for r in found])
        best = rng.permutation(each.reshape(chosen, tokens).T)
        return best.astype(np.int32)
    logits = rng.standard_normal((tokens, experts), np.float32)
    logits += SPREAD * rng.standard_normal(experts, np.float32)
    best = np.argpartition(-logits, chosen, axis=1)[:, :chosen]
    return best.astype(np.int32)
