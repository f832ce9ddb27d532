"""What a decoder is made of, layer by layer, and the sizes of it all."""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxmem import remat
from jaxmem.train import cache as kv_cache
from jaxmem.train._checks import check_field

Ids = jax.Array | np.ndarray  # integers, on the device or on the host

_DTYPES = ("float32", "bfloat16", "float16")
_ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=True),
}


def _check_positive(config: object, *names: str) -> None:
    for name in names:
        check_field(config, name, getattr(config, name) > 0, "above 0")


def _check_choice(config: object, name: str, known: tuple) -> None:
    wanted = f"one of {', '.join(map(repr, known))}"
    check_field(config, name, getattr(config, name) in known, wanted)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes and choices of a `Decoder`."""

    layers: int = 4  # number of blocks
    hidden: int = 160  # width of the residual stream
    ff: int = 448  # width inside the gated feed-forward layer
    heads: int = 4  # query heads
    kv_heads: int = 2  # key and value heads; divides heads
    head_dim: int = 40  # width of one head; even, because RoPE turns pairs
    vocab_size: int | None = None  # entries; None: as many as the tokenizer has
    rope_theta: float = 10_000.0  # base of the rotary wavelengths, in tokens
    tied: bool = True  # the head reads the embedding table
    softcap: float | None = None  # final logits become softcap*tanh(logits/softcap)
    embed_scale: bool = False  # multiply embeddings by sqrt(hidden), as Gemma does
    qk_norm: bool = False  # RMS-normalise queries and keys, as Qwen3 does
    activation: Literal["silu", "gelu"] = "silu"  # gate of the feed-forward layer
    norm_eps: float = 1e-6  # added to the mean square in every norm
    dtype: str = "float32"  # activations and matrix products
    param_dtype: str = "float32"  # stored weights (the master copy)
    attention: Literal["xla", "cudnn"] | None = None  # None: jax chooses
    remat: str = "full"  # of each block, a preset of jaxmem.remat: what is kept, where

    def __post_init__(self):
        """Refuse sizes that cannot be built, by name."""
        _check_positive(self, "layers", "hidden", "ff", "heads", "kv_heads")
        _check_positive(self, "head_dim", "rope_theta", "norm_eps")
        for name in ("vocab_size", "softcap"):
            if getattr(self, name) is not None:
                _check_positive(self, name)
        if self.heads % self.kv_heads:
            raise ValueError(
                "ModelConfig.kv_heads must divide heads, got "
                f"kv_heads={self.kv_heads} for heads={self.heads}"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"ModelConfig.head_dim must be even (RoPE), got {self.head_dim}"
            )
        _check_choice(self, "activation", tuple(_ACTIVATIONS))
        _check_choice(self, "dtype", _DTYPES)
        _check_choice(self, "param_dtype", _DTYPES)
        _check_choice(self, "attention", ("xla", "cudnn", None))
        _check_choice(self, "remat", tuple(remat.PRESETS))


def rope_tables(
    positions: Ids, head_dim: int, theta: float
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of the rotary angles, position x theta^(-2i / head_dim).

    Args:
      positions: [B, T] position of each token in its document.
      head_dim: width of one head, even.
      theta: base of the wavelengths.

    Returns:
      Two f32 arrays [B, T, 1, head_dim / 2], for `apply_rope`.
    """
    exponents = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    angles = positions.astype(jnp.float32)[..., None, None] * theta**-exponents
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(x: jax.Array, cosines: jax.Array, sines: jax.Array) -> jax.Array:
    """Rotate each pair (x_i, x_{i + head_dim/2}) by its angle, in f32.

    Args:
      x: [B, T, heads, head_dim] queries or keys.
      cosines: [B, T, 1, head_dim / 2] from `rope_tables`.
      sines: likewise.

    Returns:
      An array like `x`.
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = (first * cosines - second * sines, second * cosines + first * sines)
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def document_mask(segment_ids: Ids) -> jax.Array:
    """[B, 1, T, T], true where query and key are of one document.

    Causality is left to `jax.nn.dot_product_attention`.  Padding (segment 0) sees
    padding, so that no row of the softmax is empty.
    """
    return (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]


def _linear(config: ModelConfig, inputs: int, outputs: int, rngs: nnx.Rngs, gain=1.0):
    return nnx.Linear(
        inputs,
        outputs,
        use_bias=False,
        kernel_init=nnx.initializers.variance_scaling(
            gain, "fan_in", "truncated_normal"
        ),
        dtype=jnp.dtype(config.dtype),
        param_dtype=jnp.dtype(config.param_dtype),
        rngs=rngs,
    )


def _residual_linear(config: ModelConfig, inputs: int, rngs: nnx.Rngs) -> nnx.Linear:
    # 2 x layers such outputs are summed; this gain keeps the sum's variance at 1.
    return _linear(config, inputs, config.hidden, rngs, gain=0.5 / config.layers)


def rms_norm(config: ModelConfig, width: int, rngs: nnx.Rngs) -> nnx.RMSNorm:
    """The one norm of all layers, over the last axis."""
    return nnx.RMSNorm(
        width,
        epsilon=config.norm_eps,
        dtype=jnp.dtype(config.dtype),
        param_dtype=jnp.dtype(config.param_dtype),
        rngs=rngs,
    )


class Attention(nnx.Module):
    """Causal grouped-query attention within documents."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        width = config.head_dim
        self.query = _linear(config, config.hidden, config.heads * width, rngs)
        self.key = _linear(config, config.hidden, config.kv_heads * width, rngs)
        self.value = _linear(config, config.hidden, config.kv_heads * width, rngs)
        self.output = _residual_linear(config, config.heads * width, rngs)
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
        mixed = jax.nn.dot_product_attention(
            query,
            key,
            value,
            mask=mask,
            is_causal=True,
            implementation=self.config.attention,
        )
        mixed = remat.name(mixed.reshape(*x.shape[:2], -1), "attn_out")
        return self.output(mixed), (key, value)

    def decode(self, x: jax.Array, rope, layer: kv_cache.Layer, filled: jax.Array):
        """[B, 1, hidden] to [B, 1, hidden], and the tokens' keys and values."""
        query, key, value = self._project(x, rope)
        token = kv_cache.layer_of(key, value, 1)
        mixed = kv_cache.attend(query, token, layer, filled)
        return self.output(mixed.reshape(*x.shape[:2], -1)), token

    def _project(self, x: jax.Array, rope):
        query, key, value = (
            layer(x).reshape(*x.shape[:2], -1, self.config.head_dim)
            for layer in (self.query, self.key, self.value)
        )
        if self.config.qk_norm:
            query, key = self.query_norm(query), self.key_norm(key)
        return apply_rope(query, *rope), apply_rope(key, *rope), value


class FeedForward(nnx.Module):
    """down(activation(gate(x)) * up(x)): SwiGLU, or GeGLU with "gelu"."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.gate = _linear(config, config.hidden, config.ff, rngs)
        self.up = _linear(config, config.hidden, config.ff, rngs)
        self.down = _residual_linear(config, config.ff, rngs)
        self.activation = _ACTIVATIONS[config.activation]

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

    def __call__(self, x: jax.Array, mask: jax.Array, rope) -> jax.Array:
        """[B, T, hidden] to [B, T, hidden]."""
        return self.prefill(x, mask, rope)[0]

    def prefill(self, x: jax.Array, mask: jax.Array, rope):
        """The same, and the keys and values [B, T, kv_heads, head_dim]."""
        mixed, made = self.attention.prefill(self.attention_norm(x), mask, rope)
        return self._finish(x + mixed), made

    def decode(self, x: jax.Array, rope, layer: kv_cache.Layer, filled: jax.Array):
        """[B, 1, hidden] to [B, 1, hidden], and the tokens' keys and values."""
        x_norm = self.attention_norm(x)
        mixed, made = self.attention.decode(x_norm, rope, layer, filled)
        return self._finish(x + mixed), made

    def _finish(self, x: jax.Array) -> jax.Array:
        return x + self.feed_forward(self.feed_forward_norm(x))
