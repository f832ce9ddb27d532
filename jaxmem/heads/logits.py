"""The logits of a head, by the same operations as nnx.Linear and nn.Dense.

Results are then bitwise equal to theirs.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmem.core.explicit_axes import merged, spec_of, with_automatic_axes


def _sharding(arguments):
    """Logits are sharded like tokens, and over the vocabulary's other mesh axes."""
    tokens, weights = spec_of(arguments["hidden"], 1), arguments["weights"]
    of_W = spec_of(weights.W)[0 if weights.layout == "vd" else 1 :][:1]
    before = (None,) * len(tokens)
    return merged(tokens, (*before, *of_W), (*before, *spec_of(weights.bias)))


@with_automatic_axes(_sharding)
def logits(
    hidden: jax.Array, weights: Any, softcap: float | None, vocab_size: int | None
) -> jax.Array:
    """The logits [..., V] of hidden [..., D]; see `HeadVerbs.__call__`."""
    contract = ((hidden.ndim - 1,), (1 if weights.layout == "vd" else 0,))
    z = lax.dot_general(hidden, weights.W.astype(hidden.dtype), (contract, ((), ())))
    if weights.bias is not None:
        z = z + weights.bias.astype(z.dtype).reshape((1,) * (z.ndim - 1) + (-1,))
    if softcap is not None:
        z = _capped(z, softcap)
    return _without_padding(z, vocab_size)


def _capped(z, softcap):
    wide = z.astype(np.promote_types(z.dtype, np.float32))
    return (softcap * jnp.tanh(wide / softcap)).astype(z.dtype)


def _without_padding(z, vocab_size):
    if vocab_size is None or vocab_size == z.shape[-1]:
        return z
    column = lax.broadcasted_iota(jnp.int32, z.shape, z.ndim - 1)
    return jnp.where(column < vocab_size, z, jnp.asarray(-jnp.inf, z.dtype))
