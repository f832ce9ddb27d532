"""Token ids that a caller passes for each token: checks and columns."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.head.maths import checks
from jaxmem.head.maths.backend_operands import first_column
from jaxmem.head.maths.spec import CallOptions
from jaxmem.head.verbs import arguments


def ids_call(
    verb: str, ids, hidden, W, labels, options: CallOptions
) -> tuple[arguments.ColumnsCall, jax.Array, Any]:
    """(`arguments.columns_call`, checked ids, checked mask); the call is recorded."""
    call = arguments.columns_call(verb, hidden, W, options, labels)
    where = checks.read_where(options.where, call.shape)
    ids = check_ids("ids", ids, where, call.shape, call.spec.vocab_size)
    shapes = call.source.shapes(call.shape) | {"ids": ids.shape}
    arguments.record_only_xla(verb, call.spec, shapes, options.implementation)
    return call, ids, where


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


def existing_columns(spec, ids):
    """Columns of the ids in this shard; past the end for ids that are not in it."""
    exists = (ids >= 0) & (ids < spec.vocab_size)
    columns = ids - first_column(spec)
    return jnp.where(exists & (columns >= 0), columns, spec.columns)
