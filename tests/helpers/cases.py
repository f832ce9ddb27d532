"""Named problems, each with the reason it is here. Data are float32 numpy."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest


def full(*values):
    """A case that `.ci/run` runs on every change, and `pytest` alone leaves out."""
    return pytest.param(*values, marks=pytest.mark.full)


def slow(*values):
    """A case that repeats what faster ones cover: in `pytest -m ''` alone."""
    return pytest.param(*values, marks=pytest.mark.slow)


def one_at_a_time(firsts, seconds):
    """All pairs; slow are those that differ from the first pair in both places."""
    return [
        slow(a, b) if i and j else (a, b)
        for i, a in enumerate(firsts)
        for j, b in enumerate(seconds)
    ]


class Problem(NamedTuple):
    h: np.ndarray  # [N, D]
    W: np.ndarray  # [V, D]
    y: np.ndarray  # [N]


@dataclasses.dataclass(frozen=True)
class Case:
    """Shapes, the standard deviation of the logits, and what is special."""

    n: int
    d: int
    v: int
    std: float = 1.0
    alter: Callable[[Problem], Problem] = lambda problem: problem
    chunk: int | None = 64

    def make(self, seed: int = 0) -> Problem:
        rng = np.random.default_rng(seed)
        h = rng.standard_normal((self.n, self.d), np.float32)
        W = rng.standard_normal((self.v, self.d), np.float32) * self.std / self.d**0.5
        y = rng.integers(0, self.v, self.n, dtype=np.int32)
        return self.alter(Problem(h, W.astype(np.float32), y))


def _through_first_axis(column):
    """Sets h[:, 0] to 1, so that W[:, 0] is added to the logits."""

    def alter(problem):
        problem.h[:, 0] = 1
        problem.W[:, 0] = column(problem)
        return problem

    return alter


def _label_at(logit):
    def column(problem):
        return np.where(np.isin(np.arange(len(problem.W)), problem.y), logit, 0)

    return _through_first_axis(column)


def _confident_labels(problem):
    """Every label leads by 25 nats: 1 + Σ others rounds to 1 in float32."""
    h = np.eye(problem.h.shape[1], dtype=np.float32)[problem.y % problem.h.shape[1]]
    W = np.zeros_like(problem.W)
    np.fill_diagonal(W, 25.0)
    return Problem(h, W, problem.y % problem.h.shape[1])


def _no_label(problem):
    return problem._replace(y=np.full_like(problem.y, -100))


def _some_labels(problem):
    return problem._replace(y=np.where(np.arange(len(problem.y)) % 3, problem.y, -1))


def _nan_in_masked_rows(problem):
    problem = _some_labels(problem)
    problem.h[problem.y < 0] = np.nan
    return problem


CASES = {
    # A normaliser that is wrong shows only where no logit dominates.
    "flat": Case(37, 16, 300, std=0.0),
    "ordinary": Case(150, 32, 517),
    "peaked": Case(150, 32, 517, std=20.0),
    # logsumexp - logit cancels, or exp underflows.
    "label at -50": Case(40, 16, 300, alter=_label_at(-50.0)),
    "label ahead by 25": Case(40, 64, 64, alter=_confident_labels),
    "logits to 1e4": Case(40, 16, 300, std=2500.0),
    # A running maximum that starts at 0 gives -inf here.
    "all logits about -120": Case(
        40, 16, 300, alter=_through_first_axis(lambda p: -120)
    ),
    # Tiles, blocks and their remainders.
    "V=1": Case(20, 8, 1),
    "V=127": Case(70, 8, 127),
    "V=2049": Case(70, 8, 2049),
    "V=50257": Case(20, 4, 50257, chunk=8),
    "V=151936": Case(10, 2, 151936, chunk=8),
    "D odd": Case(70, 33, 130),
    "N=1": Case(1, 16, 300),
    "N prime": Case(131, 16, 300),
    "one chunk": Case(131, 16, 300, chunk=None),
    "chunk of one": Case(7, 16, 300, chunk=1),
    # Masks.
    "label -100 everywhere": Case(70, 16, 300, alter=_no_label),
    "a third masked": Case(150, 16, 300, alter=_some_labels),
    "NaN in masked rows": Case(150, 16, 300, alter=_nan_in_masked_rows),
}
