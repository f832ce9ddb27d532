"""Bounds of the difference of float32 statistics between two orders of their sums."""

import numpy as np

import jaxmem


def assert_equal_up_to_order(got, want, h, W, rows=slice(None)):
    """`TokenStats` that differ by no more than two orders of the same sums may."""
    bound = rounding_of_any_order(h, W)
    for name, a, b in zip(got._fields, got, want, strict=True):
        if name == "is_argmax":
            np.testing.assert_array_equal(a[rows], b[rows])
        else:
            off = np.abs(np.asarray(a) - b)[rows]
            assert np.all(off <= 2 * getattr(bound, name)[rows]), (name, off.max())


def rounding_of_any_order(h, W):
    """Bounds on the errors of float32 statistics, however their sums are ordered.

    To first order in u = 2^-24. A sum of n terms in any order is off by at most (n - 1)
    u times the sum of their absolute values (Higham, Accuracy and Stability of
    Numerical Algorithms, 4.2). So a logit is off by δ = (D + 3) u max_j Σ|h||W_j|, with
    a rounding of each product and three of what scales the sum, and the sums over V of
    exponentials, whose own error is below 8 u, by a factor of at most 1 ± ε,
    ε = (V + 8) u + 2 δ. The other statistics follow by their derivatives:
    the entropy H is off by Σ p |ln p + H| ε <= 2 H ε through its exponentials and by
    H ε through the order of its own sum.
    """
    h, W = (np.asarray(x).astype(np.float64) for x in (h, W))
    u, (n_columns, depth) = 2.0**-24, W.shape
    largest = (np.abs(h) @ np.abs(W).T).max(1)
    logit = (depth + 3) * u * largest
    of_sum = (n_columns + 8) * u + 2 * logit
    p = np.exp(h @ W.T)
    p /= p.sum(1, keepdims=True)
    entropy, squares = -np.sum(p * np.log(p), axis=1), np.sum(p * p, axis=1)
    logsumexp = of_sum + u * (largest + np.log(n_columns))  # results are rounded, too
    return jaxmem.TokenStats(
        logprob=logit + logsumexp,
        entropy=3 * entropy * of_sum + u * entropy,
        logsumexp=logsumexp,
        sum_pi_squared=4 * squares * of_sum,
        is_argmax=None,
    )
