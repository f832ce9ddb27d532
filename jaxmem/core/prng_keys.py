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
    """A typed PRNG key, or one for each token."""
    keys = _typed_keys(key)
    if keys.shape not in ((), shape):
        raise ValueError(
            f"key must be one PRNG key or one for each token, {list(shape)}, got keys "
            f"of shape {list(keys.shape)}"
        )
    return keys


def _typed_keys(key):
    """Keys of `jax.random.key`; those of `jax.random.PRNGKey` are uint32 numbers."""
    if not isinstance(key, (jax.Array, np.ndarray)):
        raise TypeError(
            "key must be a PRNG key, as jax.random.key makes them, got "
            f"{checks.brief(key)}"
        )
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return jnp.asarray(key)
    try:
        return jax.random.wrap_key_data(jnp.asarray(key))
    except TypeError as error:
        raise TypeError(
            "key must be a PRNG key, as jax.random.key makes them, got "
            f"{key.dtype}{list(key.shape)}"
        ) from error
