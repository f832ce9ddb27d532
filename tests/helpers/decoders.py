"""Decoders whose weights are drawn by numpy: to start with them compiles nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxmem.models.decoder import abstract_decoder


def drawn(config, *head, **options):
    """A decoder with matrices as large as at its start; vectors differ, none is 0."""
    shapes = abstract_decoder(config, *head, **options)
    definition, weights = nnx.split(shapes)
    rng = np.random.default_rng(0)

    def draw(path, shape):
        name, values = path[-1].key, rng.normal(size=shape.shape)
        if name == "embedding" or path[0].key == "head":
            values *= 0.02
        elif name == "kernel":
            values *= shape.shape[-2] ** -0.5
        else:
            offset = config.norm.offset and name == "scale"
            values = 0.1 * values + (name.endswith("scale") and not offset)
        return values.astype(shape.dtype)

    made = jax.tree_util.tree_map_with_path(draw, nnx.to_pure_dict(weights))
    return nnx.merge(definition, jax.device_put(made))


@jax.jit
def whole(model, tokens):
    """Hidden states [B, T, D] of sequences that are read at once, one a row."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return model(tokens, jnp.ones_like(tokens), positions)


@functools.partial(jax.jit, static_argnames="width")
def stepwise(model, tokens, lengths, width):
    """Hidden states [B, 1 + S, D] of each prompt's last token and the S that follow it.

    Prompts are up to `width` wide; the tokens that follow are read one by one.
    """
    definition, weights = nnx.split(model)
    steps = jnp.arange(tokens.shape[1] - width)
    after = tokens[jnp.arange(len(tokens)), lengths + steps[:, None]]
    hidden, cache = model.prefill(tokens[:, :width], lengths, tokens.shape[1])

    def step(cache, tokens):
        hidden, cache = nnx.merge(definition, weights).decode(tokens, cache)
        return cache, hidden

    cache, more = jax.lax.scan(step, cache, after)
    return jnp.moveaxis(jnp.concatenate([hidden[None], more]), 0, 1), cache
