"""Vectors of a token that every layer gets beside the residual stream.

p_l = (norm(x W)_l + E[token]_l) / sqrt(2),   l a layer, x the token's embedding
x + norm((activation(x G) p_l) P)   after a layer, with its own G and P
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmem.models import embedding
from jaxmem.models.config import ACTIVATIONS, ModelConfig
from jaxmem.models.linears import linear
from jaxmem.models.norms import RMSNorm, make_norm


class LayerInputs(nnx.Module):
    """The inputs of all layers, from tokens and their embeddings."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        assert config.embedding.per_layer_width is not None
        width = config.layers * config.embedding.per_layer_width
        rows = config.embedding.per_layer_vocab or config.vocab_size or 0
        self.table = embedding.table(config, rows, rngs, width)
        self.project = linear(config, "project", config.hidden, width, rngs)
        self.norm = make_norm(config, config.embedding.per_layer_width, rngs)
        self.config = config

    def __call__(self, tokens: jax.Array, x: jax.Array) -> jax.Array:
        """[layers, B, T, per_layer_width] from ids [B, T] and embeddings."""
        width = self.config.embedding.per_layer_width or 0
        shape = *x.shape[:2], self.config.layers, width
        own = embedding.rows(self.table, tokens, self.config.pad_row)
        own = own.astype(x.dtype).reshape(shape)
        projected = self.project(x) * jnp.asarray(self.config.hidden**-0.5, x.dtype)
        both = self.norm(projected.reshape(shape)) + own * jnp.asarray(
            width**0.5, x.dtype
        )
        return jnp.moveaxis(both * jnp.asarray(2**-0.5, x.dtype), 2, 0)


class Injection(nnx.Module):
    """Adds a layer's input to the residual stream after the layer."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        assert config.embedding.per_layer_width is not None
        hidden, width = config.hidden, config.embedding.per_layer_width
        self.inject_gate = linear(config, "inject_gate", hidden, width, rngs)
        self.inject = linear(config, "inject", width, hidden, rngs)
        self.norm: RMSNorm = make_norm(config, config.hidden, rngs)
        self.activation = config.mlp.activation

    def __call__(self, x: jax.Array, added: Any) -> jax.Array:
        """[B, T, hidden] from it and a layer's input [B, T, per_layer_width]."""
        activation: Any = ACTIVATIONS[self.activation]
        gate = activation(self.inject_gate(x).astype(jnp.float32))
        return x + self.norm(self.inject(gate.astype(x.dtype) * added))
