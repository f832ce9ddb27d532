"""A small but real decoder: RMSNorm, RoPE, grouped queries, SwiGLU, a lean head.

`Decoder` returns hidden states, never logits: the head is asked separately, so a
tensor of the size of the vocabulary cannot be built by accident.
"""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxmem.heads.nnx import LMHead
from jaxmem.train._checks import check_field

Ids = jax.Array | np.ndarray  # integers, on the device or on the host

_DTYPES = ("float32", "bfloat16", "float16")
_ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=True),
}


# Small enough that the first loss is about ln(vocab_size), whatever the width.
_VOCABULARY_INIT = nnx.initializers.normal(0.02)


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
    remat: Literal["full", "none"] = "full"  # recompute each block backward, or store

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
        _check_choice(self, "remat", ("full", "none"))


@dataclasses.dataclass(frozen=True)
class HeadConfig:
    """How training turns hidden states into a loss."""

    # fused: logits exist a chunk at a time; materialised: all at once, the usual way
    implementation: Literal["fused", "materialised"] = "fused"
    # tokens whose logits may be alive at once (fused only); None: no chunking
    chunk: int | Literal["auto"] | None = 1024

    def __post_init__(self):
        """Refuse unknown implementations and impossible chunks, by name."""
        _check_choice(self, "implementation", ("fused", "materialised"))
        if self.chunk is not None and self.chunk != "auto":
            if not isinstance(self.chunk, int) or self.chunk <= 0:
                raise ValueError(
                    "HeadConfig.chunk must be a positive number of tokens, 'auto' or "
                    f"None, got {self.chunk!r}"
                )


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


def _norm(config: ModelConfig, width: int, rngs: nnx.Rngs) -> nnx.RMSNorm:
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
            self.query_norm = _norm(config, width, rngs)
            self.key_norm = _norm(config, width, rngs)
        self.config = config

    def __call__(self, x: jax.Array, mask: jax.Array, rope) -> jax.Array:
        """[B, T, hidden] to [B, T, hidden]; mask [B, 1, T, T], rope the two tables."""
        query, key, value = (
            layer(x).reshape(*x.shape[:2], -1, self.config.head_dim)
            for layer in (self.query, self.key, self.value)
        )
        if self.config.qk_norm:
            query, key = self.query_norm(query), self.key_norm(key)
        mixed = jax.nn.dot_product_attention(
            apply_rope(query, *rope),
            apply_rope(key, *rope),
            value,
            mask=mask,
            is_causal=True,
            implementation=self.config.attention,
        )
        return self.output(mixed.reshape(*x.shape[:2], -1))


class FeedForward(nnx.Module):
    """down(activation(gate(x)) * up(x)): SwiGLU, or GeGLU with "gelu"."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.gate = _linear(config, config.hidden, config.ff, rngs)
        self.up = _linear(config, config.hidden, config.ff, rngs)
        self.down = _residual_linear(config, config.ff, rngs)
        self.activation = _ACTIVATIONS[config.activation]

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T, hidden] to [B, T, hidden]."""
        return self.down(self.activation(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    """One pre-norm layer: attention, then feed-forward, each added to its input."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.attention_norm = _norm(config, config.hidden, rngs)
        self.attention = Attention(config, rngs=rngs)
        self.feed_forward_norm = _norm(config, config.hidden, rngs)
        self.feed_forward = FeedForward(config, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array, rope) -> jax.Array:
        """[B, T, hidden] to [B, T, hidden]."""
        x = x + self.attention(self.attention_norm(x), mask, rope)
        return x + self.feed_forward(self.feed_forward_norm(x))


def _embedding(config: ModelConfig, rngs: nnx.Rngs) -> nnx.Embed:
    if config.vocab_size is None:
        raise ValueError(
            "ModelConfig.vocab_size is None: set it, or take it from the tokenizer "
            "with dataclasses.replace(config, vocab_size=...)"
        )
    return nnx.Embed(
        config.vocab_size,
        config.hidden,
        embedding_init=_VOCABULARY_INIT,
        # Looked up in the stored type and cast after, so that the gradients of a
        # frequent token are summed in that type too.
        dtype=jnp.dtype(config.param_dtype),
        param_dtype=jnp.dtype(config.param_dtype),
        rngs=rngs,
    )


def _head(
    config: ModelConfig, head: HeadConfig, embed: nnx.Embed, rngs: nnx.Rngs
) -> LMHead:
    dtype, chunk = jnp.dtype(config.dtype), head.chunk
    if config.tied:
        return LMHead(tied_to=embed, dtype=dtype, softcap=config.softcap, chunk=chunk)
    return LMHead(
        config.hidden,
        config.vocab_size,
        use_bias=False,
        kernel_init=_VOCABULARY_INIT,
        dtype=dtype,
        param_dtype=jnp.dtype(config.param_dtype),
        softcap=config.softcap,
        chunk=chunk,
        rngs=rngs,
    )


class Decoder(nnx.Module):
    """Token ids to final hidden states; `head` holds the way to the vocabulary.

    The weights of all blocks are stacked on a leading axis of size `layers`, and the
    blocks run in one `jax.lax.scan`: compile time does not grow with depth.

    Args:
      config: sizes and choices; `vocab_size` must be known.
      head: options of the head; its implementation matters to `head_loss` only.
      rngs: source of the initial weights.
    """

    def __init__(
        self, config: ModelConfig, head: HeadConfig | None = None, *, rngs: nnx.Rngs
    ):
        @nnx.split_rngs(splits=config.layers)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def stacked_blocks(rngs: nnx.Rngs) -> Block:
            return Block(config, rngs=rngs)

        self.embed = _embedding(config, rngs)
        self.blocks = stacked_blocks(rngs)
        self.norm = _norm(config, config.hidden, rngs)
        self.head = _head(config, head or HeadConfig(), self.embed, rngs)
        self.config = config

    def __call__(self, tokens: Ids, segment_ids: Ids, positions: Ids) -> jax.Array:
        """Run the blocks and the last norm.

        Args:
          tokens: [B, T] ids.
          segment_ids: [B, T] document of each token in its row; 0 is padding.
          positions: [B, T] position of each token in its document, from 0.

        Returns:
          Hidden states [B, T, hidden] in the compute dtype.
        """
        x = self.embed(jnp.asarray(tokens)).astype(self.config.dtype)
        if self.config.embed_scale:
            x = x * jnp.asarray(self.config.hidden**0.5, x.dtype)
        mask = document_mask(segment_ids)
        rope = rope_tables(positions, self.config.head_dim, self.config.rope_theta)
        # Plain arrays go into the scan: a module made outside must not be used inside.
        definition, weights = nnx.split(self.blocks)

        def block(x, layer_weights):
            return nnx.merge(definition, layer_weights)(x, mask, rope), None

        if self.config.remat == "full":
            # Inside a scan, XLA cannot merge the recomputation away: no barrier needed.
            block = jax.checkpoint(block, prevent_cse=False)
        return self.norm(jax.lax.scan(block, x, weights)[0])


def head_loss(
    head: LMHead,
    hidden: jax.Array,
    labels: Ids,
    normalizer: jax.Array,
    implementation: Literal["fused", "materialised"],
) -> jax.Array:
    """Sum of the tokens' cross-entropies, divided by `normalizer`.

    Args:
      head: of the decoder.
      hidden: [B, T, hidden] final hidden states.
      labels: [B, T] next token ids; negative where no loss is wanted.
      normalizer: how many tokens the whole step counts.
      implementation: "fused" never holds the logits; "materialised" is the way that
        most code has it, kept as the reference and for comparison.

    Returns:
      Float32 scalar, in nats; 0 where no token counts.
    """
    if implementation == "fused":
        return head.loss(hidden, labels, normalizer=normalizer)
    per_token = optax.softmax_cross_entropy_with_integer_labels(
        head(hidden).astype(jnp.float32), jnp.maximum(labels, 0)
    )
    return jnp.sum(jnp.where(labels >= 0, per_token, 0.0)) / jnp.maximum(normalizer, 1)
