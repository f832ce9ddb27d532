"""Token ids that a caller passes for each token: checks and columns."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.head.maths import checks
from jaxmem.head.maths.spec import CallOptions
from jaxmem.head.verbs import arguments


def ids_call(
    verb: str, ids, hidden, W, labels, options: CallOptions
) -> tuple[arguments.CheckedCall, jax.Array, Any]:
    """(the call of a verb that reads columns of ids, checked ids, checked mask)."""
    call = arguments.columns_call(verb, hidden, W, options, labels)
    spec, source, rows, shape = call
    where = checks.read_where(options.where, shape)
    ids = check_ids("ids", ids, where, shape, spec.vocab_size)
    shapes = source.shapes(shape) | {"ids": ids.shape}
    backend = arguments.choose_columns(
        verb, spec, source, options.implementation, shapes
    )
    return arguments.CheckedCall(spec, backend, source, rows, shape), ids, where


def check_ids(name: str, ids, where, shape: tuple[int, ...], vocab_size: int):
    """int32 ids [..., K], clipped so that none overflows; visible ones are checked."""
    ids = checks.as_integers(name, ids)
    if ids.shape[:-1] != shape or ids.ndim == 0:
        raise ValueError(
            f"{name} must have entries per token, shape {shape} and one more axis, "
            f"got {ids.shape}"
        )
    if checks.is_visible(ids) and checks.is_visible(where):
        counted = checks.counted_tokens(where, shape)[..., None]
        check_below(name, np.asarray(ids), counted, vocab_size)
    return arguments.as_int32(ids, vocab_size)


def check_below(name: str, ids: np.ndarray, counted, vocab_size: int) -> None:
    """Raise a ValueError for a counted id that is ≥ vocab_size."""
    largest = np.max(ids, initial=0, where=counted)
    if largest >= vocab_size:
        raise ValueError(
            f"{name} must be below vocab_size={vocab_size}, got {largest}; mark absent "
            "entries with a negative id, or exclude the token with where="
        )


def flat_ids(ids, shape):
    """Ids [N, K] from ids [..., K]."""
    return jnp.reshape(ids, (math.prod(shape), ids.shape[-1]))
