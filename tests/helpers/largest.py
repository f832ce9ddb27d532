"""Heads whose logits are exact in every type, with many equal ones."""

import numpy as np

N, D, CHUNK = 37, 8, 16


def make(v, std=1.0, seed=0):
    """Small integers: logits are exact in every type, and many are equal."""
    rng = np.random.default_rng(seed)
    h, W = rng.integers(-2, 3, (N, D)), rng.integers(-2, 3, (v, D))
    return std * h.astype(np.float32), W.astype(np.float32)
