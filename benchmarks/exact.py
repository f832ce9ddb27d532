"""The head in float64, and how far a path is from it; the same code for jax and torch.

A path is checked at the very shape that is timed: all rows take part, a few of them,
spread over all tokens, have cotangents, and their outputs, their dH and all of dW are
held against float64.
"""

from typing import Any

import numpy as np

N_ROWS = 32
WRONG = 0.5  # nats, or relative: what is this far off is something else, and not timed


def checked_rows(n_tokens: int) -> np.ndarray:
    """Even ids, spread over all tokens (odd ones are masked where half of them are)."""
    last = max(n_tokens // 2 - 1, 0)
    return 2 * np.unique(np.linspace(0, last, N_ROWS).astype(np.int64))


def head(xp, h, W, y, columns, g_logprob, g_entropy) -> tuple[dict, tuple]:
    """Outputs of the rows h [R, D], and (dH, dW); all of it in the type of h.

    Args:
        xp: the module jax.numpy or torch.
        columns: 0 … V-1, where W is.
        g_logprob, g_entropy: cotangents [R]; zeros for an output that a path lacks.
    """
    z = h @ W.T
    m = xp.amax(z, 1)[:, None]
    ln_p = z - m - xp.log(xp.exp(z - m).sum(1))[:, None]
    p = xp.exp(ln_p)
    onehot = 1.0 * (columns == y[:, None])
    entropy = -(p * ln_p).sum(1)
    dz = g_logprob[:, None] * (onehot - p)
    dz = dz - g_entropy[:, None] * p * (ln_p + entropy[:, None])
    outputs = {"logprob": (onehot * ln_p).sum(1), "entropy": entropy}
    return outputs, (dz @ W, dz.T @ h)


def errors(made: dict, grads: tuple, want: dict, want_grads: tuple) -> dict[str, Any]:
    """Columns: largest error of the outputs, in nats; relative error of dH and dW."""
    row = {
        f"{name}_error": f"{float(abs(made[name] - want[name]).max()):.1e}"
        if name in made
        else ""
        for name in ("logprob", "entropy")
    }
    for name, got, exact in zip(("dh", "dw"), grads, want_grads, strict=True):
        row[f"{name}_error"] = f"{_relative(got, exact):.1e}"
    return row


def is_wrong(row: dict[str, Any]) -> bool:
    """True if an error of `errors` is NaN or beyond all rounding."""
    said = [float(v) for k, v in row.items() if k.endswith("_error") and v]
    return not all(error < WRONG for error in said)


def _relative(got, want):
    return float((((got - want) ** 2).sum() / (want**2).sum()) ** 0.5)
