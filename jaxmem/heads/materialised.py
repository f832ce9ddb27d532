"""The logits of a head, by the same operations as nnx.Linear and nn.Dense.

Results are then bitwise equal to theirs.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmem.head.maths.explicit_axes import merged, spec_of, with_automatic_axes
from jaxmem.head.maths.head import Head


def _sharding(arguments):
    """Logits are sharded like tokens, and over the vocabulary's other mesh axes."""
    tokens, head = spec_of(arguments["hidden"], 1), arguments["head"]
    of_W = spec_of(head.W)[0 if head.layout == "vd" else 1 :][:1]
    before = (None,) * len(tokens)
    return merged(tokens, (*before, *of_W), (*before, *spec_of(head.bias)))


@with_automatic_axes(_sharding)
def logits(hidden: jax.Array, head: Head) -> jax.Array:
    """The logits [..., V] of hidden [..., D]; see `HeadVerbs.__call__`."""
    contract = ((hidden.ndim - 1,), (1 if head.layout == "vd" else 0,))
    z = lax.dot_general(hidden, head.W.astype(hidden.dtype), (contract, ((), ())))
    return _finished(z, head)


def in_float32(hidden: jax.Array, head: Head) -> jax.Array:
    """The logits [..., V] in float32, equal to those inside of the verbs."""
    z = jnp.einsum(
        "...d,vd->...v" if head.layout == "vd" else "...d,dv->...v",
        hidden,
        head.W.astype(hidden.dtype),
        preferred_element_type=jnp.float32,
    )
    return _finished(z, head)


def _finished(z, head):
    """The product with the bias, capped, and -inf in padding."""
    if head.bias is not None:
        z = z + head.bias.astype(z.dtype).reshape((1,) * (z.ndim - 1) + (-1,))
    if head.softcap is not None:
        wide = z.astype(np.promote_types(z.dtype, np.float32))
        z = (head.softcap * jnp.tanh(wide / head.softcap)).astype(z.dtype)
    if head.vocab_size is None or head.vocab_size == z.shape[-1]:
        return z
    column = lax.broadcasted_iota(jnp.int32, z.shape, z.ndim - 1)
    return jnp.where(column < head.vocab_size, z, jnp.asarray(-jnp.inf, z.dtype))
