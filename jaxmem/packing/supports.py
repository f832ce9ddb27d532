"""A sampler's supports as compressed sparse rows (CSR): from dense ones, and back."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from jaxmem.base import messages, ranges
from jaxmem.packing import checks

_MOST = 2**28  # entries of a result, 1 GiB


class Supports(NamedTuple):
    """Ragged supports: the ids of token i are `ids[offsets[i] : offsets[i + 1]]`.

    Attributes:
        ids: int32 [M]; -1 past the last offset.
        offsets: int32 [N + 1], from 0.
    """

    ids: np.ndarray
    offsets: np.ndarray


def support_to_csr(
    support_ids: ArrayLike,
    where: ArrayLike | None = None,
    capacity: int | None = None,
) -> Supports:
    """Ragged supports from dense ones, for `jaxmem.support_logprobs(offsets=)`.

        ids[offsets[i] : offsets[i + 1]] = the ids of token i that are not negative

    Args:
        support_ids: integers [..., K], where a negative one is absent.
        where: booleans that broadcast to [...]; False leaves a token without ids.
        capacity: M, the entries of the result, so that its shape does not depend on
            what was sampled; None for the ids there are.

    Returns:
        The supports of the tokens in row-major order.

    **Memory**: 4·(M + N) bytes, and 9·N·K while it runs.

    Raises:
        TypeError: ids are not integers, or where is not boolean.
        ValueError: there is no axis K, where does not broadcast, an id is ≥ 2³¹, or
            there are more ids than the capacity.

    >>> from jaxmem import packing
    >>> ids, offsets = packing.support_to_csr([[5, -1, 7], [2, -1, -1]], capacity=4)
    >>> ids.tolist(), offsets.tolist()
    ([5, 7, 2, -1], [0, 2, 3])
    """
    dense = _integers("support_ids", support_ids)
    if dense.ndim == 0:
        raise ValueError("support_ids must have an axis of entries, got a scalar")
    kept = dense >= 0
    if where is not None:
        kept &= _mask(where, dense.shape[:-1])[..., None]
    return _supports(dense[kept], np.ravel(kept.sum(-1)), capacity)


def csr_to_support(
    ids: ArrayLike, offsets: ArrayLike, max_ids: int | None = None
) -> np.ndarray:
    """Dense supports [N, K] from ragged ones: the inverse of `support_to_csr`.

        support_ids[i] = ids[offsets[i] : offsets[i + 1]], then -1

    Args:
        ids: integers [M].
        offsets: integers [N + 1] that do not decrease.
        max_ids: K; None for the most ids that a token has.

    Returns:
        int32 [N, K].

    **Memory**: 4·N·K bytes.

    Raises:
        TypeError: ids or offsets are not integers.
        ValueError: they do not have one axis, an id is ≥ 2³¹, offsets decrease or reach
            beyond the ids, or a token has more than max_ids.

    >>> from jaxmem import packing
    >>> packing.csr_to_support([5, 7, 2], [0, 2, 2, 3]).tolist()
    [[5, 7], [-1, -1], [2, -1]]
    """
    ids, offsets = _read_csr(ids, offsets)
    counts = np.diff(offsets)
    most = int(counts.max(initial=0))
    if max_ids is None:
        max_ids = most
    else:
        ranges.check("max_ids", max_ids, checks.COUNTS)
    if max_ids * len(counts) > _MOST:
        expected = f"at most {_MOST // len(counts)} for {len(counts)} tokens"
        raise ValueError(messages.must_be("max_ids", expected, max_ids))
    if most > max_ids:
        raise ValueError(
            f"max_ids must be at least {most}, the ids of token {counts.argmax()}, got "
            f"{max_ids}"
        )
    dense = np.full((len(counts), max_ids), -1, np.int32)
    dense[np.arange(max_ids) < counts[:, None]] = ids[offsets[0] : offsets[-1]]
    return dense


def take_supports(
    ids: ArrayLike, offsets: ArrayLike, tokens: ArrayLike, capacity: int | None = None
) -> Supports:
    """Ragged supports of chosen tokens in a new order, such as those of a micro-batch.

        support of result j = support of token tokens[j]

    Args:
        ids: integers [M'].
        offsets: integers [N' + 1] that do not decrease.
        tokens: integers [...] below N'; a negative one has no ids, as for padding.
        capacity: M, the entries of the result; None for the ids there are.

    Returns:
        The supports of the tokens in row-major order.

    **Memory**: 4·(M + N) bytes, and 16·M while it runs.

    Raises:
        TypeError: an argument does not hold integers.
        ValueError: ids or offsets do not describe supports, a token does not exist, or
            there are more ids than the capacity.

    >>> from jaxmem import packing
    >>> taken = packing.take_supports([5, 7, 2], [0, 2, 3], [[1, -1], [0, 1]])
    >>> taken.ids.tolist(), taken.offsets.tolist()
    ([2, 5, 7, 2], [0, 1, 1, 3, 4])
    """
    ids, offsets = _read_csr(ids, offsets)
    chosen = np.ravel(_integers("tokens", tokens))
    if chosen.max(initial=-1) >= len(offsets) - 1:
        raise ValueError(
            f"tokens must be below {len(offsets) - 1}, the number of tokens of "
            f"offsets, got {chosen.max()}"
        )
    present = chosen >= 0
    starts = offsets[np.where(present, chosen, 0)]
    counts = np.where(present, offsets[np.where(present, chosen + 1, 0)] - starts, 0)
    first = np.cumsum(counts) - counts
    places = np.repeat(starts - first, counts) + np.arange(counts.sum())
    return _supports(ids[places], counts, capacity)


def _supports(ids, counts, capacity):
    """Supports from the ids of all tokens and how many each has."""
    capacity = len(ids) if capacity is None else capacity
    ranges.check("capacity", capacity, ranges.integers(0, limit=_MOST))
    if len(ids) > capacity:
        raise ValueError(
            f"capacity must be at least the number of ids, {len(ids)}, got {capacity}"
        )
    filled = np.full(capacity, -1, np.int32)
    filled[: len(ids)] = ids
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return Supports(filled, offsets)


def _read_csr(ids, offsets):
    ids, offsets = _integers("ids", ids), _integers("offsets", offsets)
    for name, array in (("ids", ids), ("offsets", offsets)):
        if array.ndim != 1:
            raise ValueError(f"{name} must have one axis, got shape {array.shape}")
    if offsets.size == 0:
        raise ValueError("offsets must have one entry per token and one more, got none")
    if np.any(np.diff(offsets) < 0) or offsets[0] < 0 or offsets[-1] > len(ids):
        raise ValueError(
            f"offsets must not decrease and must be from 0 to {len(ids)}, the number "
            "of ids"
        )
    return ids, offsets


def _integers(name, value):
    """An array of int64; an empty list has no type, and counts."""
    array = checks.as_array(name, value)
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{name} must be integers, got {array.dtype}")
    if array.size and array.max() >= 2**31:
        raise ValueError(f"{name} must be below 2**31, got {array.max()}")
    return array.astype(np.int64)


def _mask(where, shape):
    mask = checks.as_array("where", where)
    if mask.dtype != np.bool_:
        raise TypeError(f"where must be boolean, got {mask.dtype}")
    try:
        return np.broadcast_to(mask, shape)
    except ValueError as error:
        raise ValueError(
            f"where must broadcast to the tokens' shape {shape}, got shape {mask.shape}"
        ) from error
