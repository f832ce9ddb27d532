"""Latent attention: keys and values of all heads from one short vector a token.

    c = norm(x W_c),   k_h = [rotate(x W_r), c W_kh],   v_h = c W_vh

The cache holds c and the rotated part alone. A new token then attends to the latents
themselves, with the matrices of keys and values applied to its query and its result:

    q_h·(c W_kh) = (q_h W_khᵀ)·c,   Σ_t p_t (c_t W_vh) = (Σ_t p_t c_t) W_vh

Reference: DeepSeek-AI, "DeepSeek-V2", 2024, arXiv:2405.04434.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmem import remat
from jaxmem.models import attention, kv_cache, ulysses
from jaxmem.models.config import ModelConfig
from jaxmem.models.interfaces import Mixer
from jaxmem.models.linears import linear, residual_linear
from jaxmem.models.norms import make_norm
from jaxmem.models.positions import Rotation, Sight


class LatentAttention(Mixer):
    """Causal attention whose keys and values are latents.

    A head has head_dim numbers, of which `latent.rope_head_dim` are rotated. The state
    is a `kv_cache.Layer` of one head: rotated keys and latents.
    """

    grow = staticmethod(kv_cache.append)

    @staticmethod
    def state(parts: tuple[jax.Array, jax.Array], max_length: int) -> kv_cache.Layer:
        rotated, latent = parts
        return kv_cache.layer_of(rotated, latent[:, :, None], max_length)

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        sizes, bias = config.latent, config.self_attn.qkv_bias
        assert sizes.kv_rank is not None and sizes.rope_head_dim is not None
        hidden, heads = config.hidden, config.heads
        rest = config.head_dim - sizes.rope_head_dim
        # As everywhere: the config's own addend is that of the residual stream's norms.
        own = config.replaced({"norm.eps": 1e-6})

        def down(name: str, outputs: int) -> nnx.Linear:
            return linear(config, name, hidden, outputs, rngs, use_bias=bias)

        queries = heads * config.head_dim
        if (rank := sizes.query_rank) is None:
            self.query = linear(config, "query", hidden, queries, rngs)
        else:
            self.query_down = down("query_down", rank)
            self.query_norm = make_norm(own, rank, rngs)
            self.query_up = linear(config, "query_up", rank, queries, rngs)
        self.latent = down("latent", sizes.kv_rank)
        self.rotated = down("rotated", sizes.rope_head_dim)
        self.latent_norm = make_norm(own, sizes.kv_rank, rngs)
        self.key = linear(config, "key", sizes.kv_rank, heads * rest, rngs)
        width = heads * config.value_width
        self.value = linear(config, "value", sizes.kv_rank, width, rngs)
        bias = config.self_attn.output_bias
        self.output = residual_linear(config, "output", width, rngs, bias)
        self.config = config

    @property
    def readers(self) -> tuple[nnx.Linear, nnx.Linear, nnx.Linear]:
        down = self.config.latent.query_rank is not None
        return (self.query_down if down else self.query), self.latent, self.rotated

    def mix(self, projected, sight: Sight, rope: Rotation, before=None):
        query, latent, rotated = self._project_tokens(rope, *projected)
        own = rotated, latent
        if before is not None:
            rotated, latent = kv_cache.after(before, rotated, latent[:, :, None])
            latent = latent[:, :, 0]
        key = self._split_heads(self.key(latent))
        wide = jnp.broadcast_to(rotated, (*key.shape[:3], rotated.shape[-1]))
        key = remat.name(jnp.concatenate([wide, key], axis=-1), "k")
        value = remat.name(self._split_heads(self.value(latent)), "v")
        mixed = ulysses.attend(self._attend, query, key, value, sight)
        return remat.recompute(self._join_heads)(mixed), own

    def _project_tokens(self, rope: Rotation, query, latent, rotated):
        """Queries [B, T, heads, head_dim], latents, and rotated keys [B, T, 1, width].

        The last three arguments are the results of `readers`.
        """
        if self.config.latent.query_rank is not None:
            query = self.query_up(self.query_norm(query))
        query = remat.name(rope.turn(self._split_heads(query)), "q")
        return query, self.latent_norm(latent), rope.turn(rotated[:, :, None])

    def _split_heads(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], self.config.heads, -1)

    def _attend(self, query, key, value, sight: Sight, sinks) -> jax.Array:
        del sinks
        scale = self.config.score_scale
        return attention.attend(query, key, value, sight, scale=scale)

    def _join_heads(self, mixed: jax.Array) -> jax.Array:
        return self.output(mixed.reshape(*mixed.shape[:2], -1))

    def decode(
        self, x: jax.Array, rope: Rotation, cached: kv_cache.Cached, seen, shared
    ):
        del shared
        projected = [read(x) for read in self.readers]
        query, latent, rotated = self._project_tokens(rope, *projected)
        turned, rest = jnp.split(query[:, 0], [rotated.shape[-1]], axis=-1)
        key_matrices, value_matrices = (
            self._head_matrices(self.key),
            self._head_matrices(self.value),
        )
        absorbed = jnp.einsum("bhd,chd->bhc", rest, key_matrices)
        token = kv_cache.layer_of(rotated, latent[:, :, None], 1)

        def scores(layer: kv_cache.Layer) -> jax.Array:
            options: Any = {"preferred_element_type": jnp.float32}
            by_key = jnp.einsum("bhd,btd->bht", turned, layer.keys[:, 0], **options)
            by_latent = jnp.einsum(
                "bhc,btc->bht", absorbed, layer.values[:, 0], **options
            )
            return (by_key + by_latent) * self.config.score_scale

        before = cached.layer
        old = jnp.where(seen[:, None], scores(before), -jnp.inf)
        weights = jax.nn.softmax(jnp.concatenate([old, scores(token)], axis=-1))
        weights = weights.astype(x.dtype)
        mixed = jnp.einsum("bht,btc->bhc", weights[..., :-1], before.values[:, 0])
        mixed = mixed + weights[..., -1:] * latent
        out = jnp.einsum("bhc,chd->bhd", mixed, value_matrices)
        return self._join_heads(out[:, None]), token

    def _head_matrices(self, module: nnx.Linear) -> jax.Array:
        """The kernel of a module as [latent, heads, width]."""
        kernel = module.kernel[...].astype(self.config.dtype)
        return kernel.reshape(len(kernel), self.config.heads, -1)
