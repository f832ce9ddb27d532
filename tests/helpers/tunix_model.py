"""Tunix's Qwen3, of the sizes that a gin file says, for `model.factory`."""

import jax.numpy as jnp
from flax import nnx
from tunix.models.qwen3 import model as qwen3


class Qwen3(nnx.Module):
    def __init__(self, config, rngs):
        sizes = qwen3.ModelConfig(
            num_layers=config.layers,
            vocab_size=config.vocab_size,
            embed_dim=config.hidden,
            hidden_dim=config.ff,
            num_heads=config.heads,
            head_dim=config.head_dim,
            num_kv_heads=config.kv_heads,
            rope_theta=10_000,
            norm_eps=1e-6,
            use_tied_embedding=True,
            dtype=jnp.float32,
            param_dtype=jnp.float32,
        )
        self.model = qwen3.Qwen3(sizes, rngs=rngs)

    def hidden_states(self, tokens, positions, segment_ids):
        mask = jnp.tril(segment_ids[:, :, None] == segment_ids[:, None, :])
        x = self.model.embedder.encode(tokens)
        for layer in self.model.layers:
            _, x = layer(x, positions, None, mask)
        return self.model.final_norm(x)

    def head_weight(self):
        return self.model.embedder.input_embedding
