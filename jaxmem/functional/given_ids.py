"""What the verbs of given token ids share: the static facts and the ids' checks."""

import math

import jax.numpy as jnp
import numpy as np

from jaxmem.core import checks, partition, shards as _shards
from jaxmem.core.operands import first_column
from jaxmem.core.spec import Spec
from jaxmem.functional import arguments


def spec_of(source, options, numbers):
    """The static facts; numbers is the count of float32 per token of a chunk."""
    columns = arguments.columns_of(source, options.layout)
    shards = _shards.check_axis_name(options.axis_name)
    n_tokens = source.hidden.shape[0]
    return Spec(
        columns=columns,
        vocab_size=checks.check_vocab_size(
            options.vocab_size, columns * (shards.count if shards else 1)
        ),
        chunk=checks.check_chunk(options.chunk, n_tokens, numbers or columns),
        outputs=(),
        compute_dtype=source.hidden.dtype,
        layout=options.layout,
        softcap=checks.check_softcap(options.softcap),
        shards=shards,
        token_parallel=partition.is_possible(),
    )


def shapes_of(source, shape):
    """Shapes of the head's operands as given, for `jaxmem.report()`."""
    return {"hidden": (*shape, source.hidden.shape[-1]), "W": source.W.shape}


def check_ids(name: str, ids, where, shape: tuple[int, ...], vocab_size: int):
    """int32 ids [..., K], clipped so that none overflows.

    Raises:
        TypeError: they are not integers.
        ValueError: they have the wrong shape, or one is ≥ vocab_size.
    """
    ids = check_integers(name, ids)
    if ids.shape[:-1] != shape or ids.ndim == 0:
        raise ValueError(
            f"{name} must have some entries a token, shape {shape} and one more axis, "
            f"got {ids.shape}"
        )
    if checks.is_visible(ids) and checks.is_visible(where):
        counted = counted_tokens(where, shape)[..., None]
        check_below(name, np.asarray(ids), counted, vocab_size)
    return arguments.as_int32(ids, vocab_size)


def check_integers(name: str, values):
    """An array of integers; a numpy array stays one, to be readable under jit."""
    values = checks.as_visible_array(name, values)
    if not jnp.issubdtype(values.dtype, jnp.integer):
        raise TypeError(
            f"{name} must be integers, got {values.dtype}; convert them with "
            f"{name}.astype('int32')"
        )
    return values


def check_below(name: str, ids: np.ndarray, counted, vocab_size: int) -> None:
    """Raise a ValueError for a counted id that is ≥ vocab_size."""
    largest = np.max(ids, initial=0, where=counted)
    if largest >= vocab_size:
        raise ValueError(
            f"{name} must be below vocab_size={vocab_size}, got {largest}; mark "
            "what is absent with a negative id, or the token with where="
        )


def flat_ids(ids, shape):
    """Ids [N, K] from ids [..., K]."""
    return jnp.reshape(ids, (math.prod(shape), ids.shape[-1]))


def existing_columns(spec, ids):
    """Columns of the ids here; past the end if absent or beyond the vocabulary."""
    exists = (ids >= 0) & (ids < spec.vocab_size)
    columns = ids - first_column(spec)
    return jnp.where(exists & (columns >= 0), columns, spec.columns)


def counted_tokens(where, shape):
    """The visible mask of the tokens [...], all of them for None."""
    return np.broadcast_to(True if where is None else np.asarray(where), shape)
