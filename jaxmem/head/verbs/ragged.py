"""Ragged supports, which are compressed sparse rows (CSR): checks and other forms."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmem.head.maths import checks
from jaxmem.head.maths.backend_operands import Ragged
from jaxmem.head.verbs import arguments
from jaxmem.head.verbs.token_ids import check_below


def read_ragged(
    ids, offsets, max_ids: int | None, where, tokens: tuple[tuple[int, ...], int]
) -> Ragged:
    """The checked supports of all tokens; the count of one that is not valid is -1.

    `tokens` are their shape and the size of the vocabulary. Ids are clipped so that
    none overflows.
    """
    if max_ids is None:
        raise ValueError(
            "max_ids must be given with offsets: the most ids that a token may have, "
            "such as the sampler's top_k"
        )
    max_ids = checks.check_count("max_ids", max_ids)
    shape, vocab_size = tokens
    n_tokens = int(np.prod(shape, dtype=np.int64))
    ids = checks.as_integers("support_ids", ids)
    offsets = checks.as_integers("offsets", offsets)
    if ids.ndim != 1:
        raise ValueError(
            "support_ids must have one axis with offsets, which say where each token's "
            f"ids begin, got shape {ids.shape}"
        )
    if offsets.shape != (n_tokens + 1,):
        raise ValueError(
            f"offsets must have one entry per token and one more, shape "
            f"({n_tokens + 1},), got {offsets.shape}"
        )
    _check_visible(ids, offsets, max_ids, where, tokens)
    # An empty array has nothing to gather from.
    ids = np.full(1, -1) if ids.shape[0] == 0 else ids
    ids, capacity = arguments.as_int32(ids, vocab_size), ids.shape[0]
    offsets = arguments.as_int32(offsets, capacity + 1)
    starts, ends = offsets[:-1], offsets[1:]
    counts = ends - starts
    valid = (starts >= 0) & (ends <= capacity) & (counts >= 0) & (counts <= max_ids)
    valid &= starts >= lax.cummax(offsets)[:-1]  # no list overlaps an earlier one
    return Ragged(starts, jnp.where(valid, counts, -1), ids)


def _check_visible(ids, offsets, max_ids, where, tokens):
    shape, vocab_size = tokens
    if not checks.is_visible(offsets):
        return
    offsets = np.asarray(offsets)
    _check_offsets(offsets, ids.shape[0])
    if not checks.is_visible(where):
        return
    counted = np.ravel(checks.counted_tokens(where, shape))
    _check_counts(offsets, counted, max_ids)
    if checks.is_visible(ids):
        owners, entries = entries_of(ids, offsets)
        check_below("support_ids", entries, counted[owners], vocab_size)


def entries_of(ids, offsets) -> tuple[np.ndarray, np.ndarray]:
    """The token of each entry that belongs to one, and its id; both visible."""
    ids, offsets = np.asarray(ids), np.asarray(offsets).astype(np.int64)
    owners = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    return owners, ids[offsets[0] : offsets[-1]]


def of_these_tokens(ragged: Ragged) -> tuple[jnp.ndarray, jnp.ndarray]:
    """Ids [M] and offsets [N + 1] of tokens, from their starts and counts [...].

    An invalid list becomes an empty one, which is invalid for any label.
    """
    counts = jnp.maximum(jnp.ravel(ragged.counts), 0)
    ends = jnp.cumsum(counts)
    offsets = jnp.concatenate([jnp.zeros_like(ends, shape=1), ends])
    entry = jnp.arange(ragged.ids.shape[0], dtype=jnp.int32)
    owner = jnp.searchsorted(ends, entry, side="right")
    fill = {"mode": "fill", "fill_value": -1}
    starts = jnp.ravel(ragged.starts) - offsets[:-1]
    index = jnp.where(entry < ends[-1], starts.at[owner].get(**fill) + entry, -1)
    index = jnp.where(index < 0, len(entry), index)  # a negative index would wrap
    return ragged.ids.at[index].get(**fill), offsets


def _check_offsets(offsets, capacity):
    for i in np.flatnonzero(offsets[1:] < offsets[:-1])[:1].tolist():
        raise ValueError(
            f"offsets must not decrease, got {offsets[i]} and then {offsets[i + 1]} at "
            f"{i + 1}"
        )
    if offsets[0] < 0 or offsets[-1] > capacity:
        raise ValueError(
            f"offsets must be from 0 to {capacity}, the entries of support_ids, got "
            f"{offsets[0]} to {offsets[-1]}"
        )


def _check_counts(offsets, counted, max_ids):
    counts = np.where(counted, np.diff(offsets), 0)
    for i in np.flatnonzero(counts > max_ids)[:1].tolist():
        raise ValueError(
            f"offsets must give a token at most max_ids={max_ids} ids, got "
            f"{counts[i]} at token {i}; raise max_ids, or mask the token with where="
        )
