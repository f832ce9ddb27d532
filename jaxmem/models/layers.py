"""What a decoder is made of, layer by layer, and the sizes of it all."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxmem import devices, remat
from jaxmem.models import kv_cache, lora, partitioning as mesh, positions, ulysses
from jaxmem.models.config import ACTIVATIONS, ModelConfig
from jaxmem.models.positions import Ids as Ids


def _linear(
    config: ModelConfig,
    name: str,
    inputs: int,
    outputs: int,
    rngs: nnx.Rngs,
    gain: float = 1.0,
    use_bias: bool = False,
) -> nnx.Linear:
    kind = nnx.Linear
    if config.lora_rank and name in config.lora_targets:
        kind = functools.partial(lora.LoraLinear, config)
    return kind(
        inputs,
        outputs,
        use_bias=use_bias,
        kernel_init=nnx.initializers.variance_scaling(
            gain, "fan_in", "truncated_normal"
        ),
        dtype=jnp.dtype(config.dtype),
        param_dtype=jnp.dtype(config.param_dtype),
        rngs=rngs,
    )


def _residual_linear(
    config: ModelConfig, name: str, inputs: int, rngs: nnx.Rngs
) -> nnx.Linear:
    # 2 x layers such outputs are summed; this gain keeps the sum's variance at 1.
    gain = 0.5 / config.layers
    return _linear(config, name, inputs, config.hidden, rngs, gain=gain)


class OffsetRMSNorm(nnx.RMSNorm):
    """x / rms(x) * (1 + scale), in float32: a scale in 16 bits keeps its small part."""

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """[..., features], likewise."""
        del mask  # every entry counts
        wide = x.astype(jnp.float32)
        mean = jnp.mean(wide * wide, axis=-1, keepdims=True)
        assert self.scale is not None  # made with the default use_scale
        scale = 1 + self.scale[...].astype(jnp.float32)
        return (wide * lax.rsqrt(mean + self.epsilon) * scale).astype(self.dtype)


def rms_norm(config: ModelConfig, width: int, rngs: nnx.Rngs) -> nnx.RMSNorm:
    """The one norm of all layers, over the last axis."""
    kind, start = nnx.RMSNorm, nnx.initializers.ones
    if config.norm_offset:
        kind, start = OffsetRMSNorm, nnx.initializers.zeros
    return kind(
        width,
        epsilon=config.norm_eps,
        scale_init=start,
        dtype=jnp.dtype(config.dtype),
        param_dtype=jnp.dtype(config.param_dtype),
        rngs=rngs,
    )


def softcapped_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array | None,
    scale: float, softcap: float,
) -> jax.Array:  # fmt: skip
    """Causal attention whose scores are capped, which `jax.nn`'s cannot.

        out = softmax(softcap tanh(scale q·k / softcap)) v,   where mask allows

    Args:
      query: [B, T, heads, head_dim].
      key, value: [B, T, kv_heads, head_dim].
      mask: [B, 1, T, T]; None: all allowed.
      scale: of the scores.
      softcap: that they stay below.

    Returns:
      An array like `query`.

    **Memory**: the scores, 4·B·heads·T².
    """
    batch, length, _, width = query.shape
    grouped = query.reshape(batch, length, key.shape[2], -1, width)
    scores = scale * jnp.einsum(
        "bqkgd,btkd->bkgqt", grouped, key, preferred_element_type=jnp.float32
    )
    seen = jnp.tril(jnp.ones((length, length), bool))
    seen = seen if mask is None else seen & mask[:, :, None]
    capped = jnp.where(seen, softcap * jnp.tanh(scores / softcap), -jnp.inf)
    weights = jax.nn.softmax(capped).astype(value.dtype)
    return jnp.einsum("bkgqt,btkd->bqkgd", weights, value).reshape(query.shape)


class Attention(nnx.Module):
    """Causal grouped-query attention within documents."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        width = config.head_dim
        queries, keys = config.heads * width, config.kv_heads * width

        def project(name: str, outputs: int) -> nnx.Linear:
            bias = config.qkv_bias
            return _linear(config, name, config.hidden, outputs, rngs, use_bias=bias)

        self.query = project("query", queries)
        self.key, self.value = project("key", keys), project("value", keys)
        self.output = _residual_linear(config, "output", queries, rngs)
        if config.qk_norm:
            self.query_norm = rms_norm(config, width, rngs)
            self.key_norm = rms_norm(config, width, rngs)
        self.config = config

    def __call__(self, x: jax.Array, mask: jax.Array, rope) -> jax.Array:
        """[B, T, hidden] to [B, T, hidden]; mask [B, 1, T, T], rope the two tables."""
        return self.prefill(x, mask, rope)[0]

    def prefill(self, x: jax.Array, mask: jax.Array, rope):
        """The same, and the keys and values [B, T, kv_heads, head_dim]."""
        query, key, value = self._project(x, rope)
        query, key = remat.name(query, "q"), remat.name(key, "k")
        value = remat.name(value, "v")
        mixed = ulysses.attend(self._attend, query, key, value, mask)
        mixed = mixed.reshape(*x.shape[:2], -1)
        if self.config.attention != "cudnn":  # policies know its kernel: "attn_lse"
            mixed = remat.name(mixed, "attn_out")
        return self.output(mixed), (key, value)

    def decode(self, x: jax.Array, rope, layer: kv_cache.Layer, filled: jax.Array):
        """[B, 1, hidden] to [B, 1, hidden], and the tokens' keys and values."""
        query, key, value = self._project(x, rope)
        token = kv_cache.layer_of(key, value, 1)
        config = self.config
        mixed = kv_cache.attend(
            query,
            token,
            layer,
            filled,
            scale=config.score_scale,
            softcap=config.attention_softcap,
        )
        return self.output(mixed.reshape(*x.shape[:2], -1)), token

    def _attend(self, query, key, value, mask: jax.Array | None) -> jax.Array:
        scale, softcap = self.config.score_scale, self.config.attention_softcap
        if softcap is not None:
            return softcapped_attention(query, key, value, mask, scale, softcap)
        if query.dtype == jnp.float16 and devices.backend() == "cpu":
            raise ValueError(
                "model.dtype='float16' needs a GPU, as jax's attention has none on a "
                "CPU: set model.dtype='bfloat16' or 'float32'"
            )
        return jax.nn.dot_product_attention(
            query,
            key,
            value,
            mask=mask,
            scale=scale,
            is_causal=True,
            implementation=self.config.attention,
        )

    def _project(self, x: jax.Array, rope):
        query, key, value = (
            layer(x).reshape(*x.shape[:2], -1, self.config.head_dim)
            for layer in (self.query, self.key, self.value)
        )
        if self.config.qk_norm:
            query, key = self.query_norm(query), self.key_norm(key)
        query = positions.apply_rope(query, *rope)
        return query, positions.apply_rope(key, *rope), value


class FeedForward(nnx.Module):
    """down(activation(gate(x)) * up(x)): SwiGLU, or GeGLU with "gelu"."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.gate = _linear(config, "gate", config.hidden, config.ff, rngs)
        self.up = _linear(config, "up", config.hidden, config.ff, rngs)
        self.down = _residual_linear(config, "down", config.ff, rngs)
        self.activation = ACTIVATIONS[config.activation]

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T, hidden] to [B, T, hidden]."""
        gate, up = remat.name(self.gate(x), "gate"), remat.name(self.up(x), "up")
        return self.down(self.activation(gate) * up)


class Block(nnx.Module):
    """One pre-norm layer: attention, then feed-forward, each added to its input."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.attention_norm = rms_norm(config, config.hidden, rngs)
        self.attention = Attention(config, rngs=rngs)
        self.feed_forward_norm = rms_norm(config, config.hidden, rngs)
        self.feed_forward = FeedForward(config, rngs=rngs)
        self.post_norms = config.post_norms
        if config.post_norms:
            self.post_attention_norm = rms_norm(config, config.hidden, rngs)
            self.post_feed_forward_norm = rms_norm(config, config.hidden, rngs)

    def __call__(self, x: jax.Array, mask: jax.Array, rope) -> jax.Array:
        """[B, T, hidden] to [B, T, hidden]."""
        return self.prefill(x, mask, rope)[0]

    def prefill(self, x: jax.Array, mask: jax.Array, rope):
        """The same, and the keys and values [B, T, kv_heads, head_dim]."""
        mixed, made = self.attention.prefill(self.attention_norm(x), mask, rope)
        return self._finish(x, mixed), made

    def decode(self, x: jax.Array, rope, layer: kv_cache.Layer, filled: jax.Array):
        """[B, 1, hidden] to [B, 1, hidden], and the tokens' keys and values."""
        x_norm = self.attention_norm(x)
        mixed, made = self.attention.decode(x_norm, rope, layer, filled)
        return self._finish(x, mixed), made

    def _finish(self, x: jax.Array, mixed: jax.Array) -> jax.Array:
        x = x + (self.post_attention_norm(mixed) if self.post_norms else mixed)
        x = mesh.spread(x)
        made = self.feed_forward(self.feed_forward_norm(x))
        made = self.post_feed_forward_norm(made) if self.post_norms else made
        return mesh.spread(x + made)
