"""Softcap and temperature: logits and their derivatives, for any columns of rows.

z = softcap·tanh(u / softcap) / temperature
"""

import jax
import jax.numpy as jnp

from jaxmem.head.maths import row_stats
from jaxmem.head.maths.backend_operands import TokenRows, take
from jaxmem.head.maths.spec import Spec


def scale(spec: Spec, rows: TokenRows, row_ids, z: jax.Array) -> jax.Array:
    """Logits after softcap and temperature, for any columns."""
    if spec.softcap is not None:
        z = spec.softcap * jnp.tanh(z / spec.softcap)
    if rows.temperature is not None:
        z = _divide(z, take(rows.temperature, row_ids, fill_value=1)[:, None])
    return z


def unscale(
    spec: Spec, rows: TokenRows, row_ids, z: jax.Array, dz: jax.Array
) -> jax.Array:
    """The derivative by logits before softcap and temperature.

    dz is that by the scaled logits z.
    """
    if rows.temperature is not None:
        temperature = take(rows.temperature, row_ids, fill_value=1)[:, None]
        z, dz = z * temperature, dz * (1 / temperature)
    if spec.softcap is not None:
        z = jnp.where(jnp.isfinite(z), z, 0)  # padded columns, whose dz is 0
        dz = dz * (1 - (z / spec.softcap) ** 2)
    return dz


def _divide(z, temperature):
    """The quotients, whose last operation is a sum.

    A compiler contracts a product and the difference that follows it into one operation
    without a rounding in between: for some uses of a logit, and not for its row's
    maximum. XLA turns quotients into products. Both factors are positive, as infinite
    logits times 0 are NaN, and one is a power of two, which does not round.
    """
    inverse = 1 / temperature
    power = row_stats.power_of_two(inverse)
    power = jnp.where(power * temperature < 1, power, power / 2)
    remainder = (
        1 - power * temperature
    ) * inverse  # the difference has no rounding error
    return z * power + z * remainder
