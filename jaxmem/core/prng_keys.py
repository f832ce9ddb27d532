"""Checks of PRNG keys."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.core import checks
from jaxmem.core.gradients import Sample


def check_key(key, gradient, shape: tuple[int, ...]) -> jax.Array | None:
    """A typed PRNG key, or one for each token; None where nothing is sampled."""
    if not isinstance(gradient, Sample):
        if key is not None:
            raise ValueError(
                "key must not be given without gradient=jaxmem.Sample(k): the exact "
                "gradient draws no random numbers"
            )
        return None
    if key is None:
        raise ValueError(
            f"key must be given with gradient={gradient}, such as "
            "jax.random.fold_in(jax.random.key(seed), step)"
        )
    return check_keys(key, shape)


def check_keys(key, shape: tuple[int, ...]) -> jax.Array:
    """A typed PRNG key, or one for each token; those of `PRNGKey` are uint32."""
    is_array = isinstance(key, (jax.Array, np.ndarray))
    try:
        if not is_array:
            raise TypeError("no array")
        keys = jnp.asarray(key)
        if not jnp.issubdtype(keys.dtype, jax.dtypes.prng_key):
            keys = jax.random.wrap_key_data(keys)
    except TypeError as error:
        got = f"{key.dtype}{list(key.shape)}" if is_array else checks.brief(key)
        raise TypeError(
            f"key must be a PRNG key, as jax.random.key makes them, got {got}"
        ) from error
    if keys.shape not in ((), shape):
        raise ValueError(
            f"key must be one PRNG key or one for each token, {list(shape)}, got keys "
            f"of shape {list(keys.shape)}"
        )
    return keys
