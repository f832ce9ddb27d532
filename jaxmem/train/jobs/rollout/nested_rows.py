"""Rows of rollouts: nested tuples of arrays [N, ...], of lists of N, and of numbers."""

import itertools
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import numpy as np

_Rows = TypeVar("_Rows")


def take(values: _Rows, rows: np.ndarray) -> _Rows:
    """Rows `rows` of every array and list in `values`; scalars are unchanged.

    >>> take((np.array([1, 2, 3]), ["a", "b", "c"], 0.5), np.array([2, 0]))
    (array([3, 1]), ['c', 'a'], 0.5)
    """

    def take_rows(x: Any) -> Any:
        if _is_list(x):
            return [x[i] for i in rows]
        return x if np.isscalar(x) else x[rows]

    return jax.tree.map(take_rows, values, is_leaf=_is_list)


def join(parts: Sequence[_Rows]) -> _Rows:
    """The rows of all parts, one part after the other; scalars become their mean.

    >>> join([(np.array([1]), ["a"], 1), (np.array([2]), ["b"], 2)])
    (array([1, 2]), ['a', 'b'], 1.5)
    """

    def join_leaves(*leaves: Any) -> Any:
        if _is_list(leaves[0]):
            return list(itertools.chain(*leaves))
        if np.isscalar(leaves[0]):
            return float(np.mean(leaves))
        return np.concatenate(leaves)

    return jax.tree.map(join_leaves, *parts, is_leaf=_is_list)


def padded(rows: Sequence[Any], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of numbers as int32 [N, width], right-padded by 0, and their lengths."""
    out = np.zeros((len(rows), width), np.int32)
    for padded_row, row in zip(out, rows, strict=True):
        padded_row[: len(row)] = row
    return out, np.array([len(row) for row in rows], np.int32)


def _is_list(x: Any) -> bool:
    return isinstance(x, list)
