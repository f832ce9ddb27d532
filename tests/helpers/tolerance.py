"""Errors against float64, bounded by the materialised computation's own."""

import numpy as np


def assert_close(got, alone, want, epsilon, what):
    ours, theirs = error(got, want), error(alone, want)
    assert ours <= 2 * theirs + epsilon, f"{what}: {ours:.2e}, alone {theirs:.2e}"


# Rounding of one result, of the size of the largest: a few units in the last place.
EPSILON = {"float32": 2e-6, "bfloat16": 2.0**-9, "float16": 2.0**-12}
# Statistics are float32 whatever the inputs.
STATS_EPSILON = 4e-6


def error(got, want):
    """Largest error, of the size of the largest value (at least 1)."""
    want = np.asarray(want, np.float64)
    if want.size == 0:
        return 0.0
    difference = np.abs(np.asarray(got).astype(np.float64) - want).max()
    return difference / max(1.0, np.abs(want).max())


def assert_as_good(got, naive, want, epsilon, what):
    ours, theirs = error(got, want), error(naive, want)
    assert ours <= 2 * theirs + epsilon, (
        f"{what}: {ours:.2e}, materialised {theirs:.2e}"
    )
