"""Columns of token ids among the logits of this device."""

import jax
import jax.numpy as jnp

from jaxmem.head.maths.backend_operands import first_column
from jaxmem.head.maths.spec import Spec


def existing_columns(spec: Spec, ids: jax.Array) -> jax.Array:
    """Columns of the ids in this shard; past the end for ids that are not in it."""
    exists = (ids >= 0) & (ids < spec.vocab_size)
    columns = ids - first_column(spec)
    return jnp.where(exists & (columns >= 0), columns, spec.columns)


def distinct_columns(spec: Spec, ids: jax.Array) -> jax.Array:
    """Columns of ids in this shard; past the end for repeats of the id before."""
    repeats = jnp.pad(ids[:, 1:] == ids[:, :-1], ((0, 0), (1, 0)))
    return existing_columns(spec, jnp.where(repeats, -1, ids))


def indices_of(spec: Spec, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rows and columns of ids in this shard's logits; out of bounds where not in it."""
    row = jnp.arange(ids.shape[0], dtype=jnp.int32)[:, None]
    return row, existing_columns(spec, ids)


def logits_at(spec: Spec, z: jax.Array, ids: jax.Array) -> jax.Array:
    """This shard's logits z [C, V] at ids [C, K]; -inf where they are not in it."""
    return z.at[indices_of(spec, ids)].get(mode="fill", fill_value=-jnp.inf)
