"""The largest of many numbers, by count or by share, without sorting all of them."""

import jax
import jax.numpy as jnp
from jax import lax

_BLOCK = 128  # numbers of which only the largest is compared at first


def top(x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The largest numbers of each row of [B, V] and their indices, as `jax.lax.top_k`.

    XLA sorts whole rows for `top_k`. The largest `count` numbers are in the `count`
    blocks with the largest maxima, and only these are sorted. Of equal numbers, those
    at lower indices come first.
    """
    size = x.shape[-1]
    if count == 1:
        indices = jnp.argmax(x, axis=-1, keepdims=True)
        return jnp.take_along_axis(x, indices, axis=-1), indices.astype(jnp.int32)
    blocks = -(-size // _BLOCK)
    if 2 * count >= blocks:  # nothing is left out
        return lax.top_k(x, count)
    unused = blocks * _BLOCK - size
    padded = jnp.pad(x, ((0, 0), (0, unused)), constant_values=-jnp.inf)
    maxima = jnp.max(padded.reshape(-1, blocks, _BLOCK), axis=-1)
    # In ascending order, so that of equal numbers the first is taken.
    chosen = jnp.sort(lax.top_k(maxima, count)[1], axis=-1)
    indices = (chosen[..., None] * _BLOCK + jnp.arange(_BLOCK)).reshape(len(x), -1)
    among = jnp.take_along_axis(x, indices, axis=-1, mode="fill", fill_value=-jnp.inf)
    values, order = lax.top_k(among, count)
    return values, jnp.take_along_axis(indices, order, axis=-1).astype(jnp.int32)


def nucleus(z: jax.Array, share: float) -> jax.Array:
    """A mask of the fewest largest numbers whose Σ exp(z) is a share of the whole.

    Bisects the bits of the smallest number that is needed, two at a time. The largest
    number in each row of z [B, V] must be 0. Of equal numbers, those at lower indices
    are taken first; the mask [B, V] is true at least once in each row.
    """
    # As integers, the sizes of float32 numbers are in the same order.
    sizes = lax.bitcast_convert_type(jnp.abs(z), jnp.uint32)
    weights = jnp.exp(z)
    target = share * jnp.sum(weights, axis=-1, keepdims=True)

    def lacking(bound: jax.Array) -> jax.Array:
        """1 where the sizes up to a bound have less than the target, else 0; [B, 1]."""
        within = jnp.where(sizes <= bound, weights, 0)
        has = jnp.sum(within, axis=-1, keepdims=True)
        return (has < target).astype(jnp.uint32)

    def two_bits(i: jax.Array, bound: jax.Array) -> jax.Array:
        unit = jnp.left_shift(jnp.uint32(1), (30 - 2 * i).astype(jnp.uint32))
        ends = (bound + digit * unit - 1 for digit in jnp.arange(1, 4, dtype="uint32"))
        return bound + unit * sum(map(lacking, ends))

    bound = lax.fori_loop(0, 16, two_bits, jnp.zeros(target.shape, jnp.uint32))
    smaller, equal = sizes < bound, sizes == bound
    has = jnp.sum(jnp.where(smaller, weights, 0), axis=-1, keepdims=True)
    each = jnp.exp(-lax.bitcast_convert_type(bound, jnp.float32))
    before = (jnp.cumsum(equal, axis=-1, dtype=jnp.int32) - 1) * each
    return smaller | (equal & (before < target - has))
