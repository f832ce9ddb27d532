"""A language model in plain Flax NNX, of the sizes that a gin file says."""

import jax.numpy as jnp
from flax import nnx


class Block(nnx.Module):
    def __init__(self, width, heads, rngs):
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.attend = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x, mask):
        x = x + self.attend(self.norm(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(x)))


class Model(nnx.Module):
    def __init__(self, config, rngs):  # config: the section `model` of the gin file
        width, blocks = config.hidden, range(config.layers)
        self.embed = nnx.Embed(config.vocab_size, width, rngs=rngs)
        self.places = nnx.Embed(512, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, config.heads, rngs) for _ in blocks])

    def hidden_states(self, tokens, positions, segment_ids):
        same = segment_ids[:, :, None] == segment_ids[:, None, :]
        mask = jnp.tril(same)[:, None]  # packed documents do not see each other
        x = self.embed(tokens) + self.places(positions)
        for block in self.blocks:
            x = block(x, mask)
        return x

    def head_weight(self):
        return self.embed.embedding
