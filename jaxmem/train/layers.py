"""What a decoder is made of, layer by layer, and the sizes of it all."""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmem import remat
from jaxmem.train import attention, lora, mesh, norms, positions, ulysses
from jaxmem.train import cache as kv_cache
from jaxmem.train._checks import check_field
from jaxmem.train.positions import Ids as Ids
from jaxmem.train.positions import Rope, Sight, apply_rope

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

    # None: random weights; or a directory of config.json and safetensors to start from,
    # which has the sizes and needs no others here
    checkpoint: str | None = None
    layers: int = 4  # number of blocks
    hidden: int = 160  # width of the residual stream
    ff: int = 448  # width inside the gated feed-forward layer
    heads: int = 4  # query heads
    kv_heads: int = 2  # key and value heads; divides heads
    head_dim: int = 40  # width of one head; even, because RoPE turns pairs
    vocab_size: int | None = None  # entries; None: as many as the tokenizer has
    rope_theta: float = 10_000.0  # base of the rotary wavelengths, in tokens
    # None, or "linear": all are rope_factor times longer; "llama3": the long ones are
    rope_scaling: Literal["linear", "llama3"] | None = None
    rope_factor: float = 1.0  # how much longer
    rope_low_factor: float = 1.0  # of llama3: long is above rope_original / this
    rope_high_factor: float = 4.0  # likewise: short is below rope_original / this
    rope_original: int = 8192  # tokens of context before rope_factor
    # kind of each layer, repeated: "global" sees its document, "local" a window of it
    pattern: tuple[str, ...] = ("global",)
    window: int | None = None  # tokens that local layers see, the query's among them
    local_rope_theta: float | None = None  # base in local layers, there not scaled
    tied: bool = True  # the head reads the embedding table
    softcap: float | None = None  # final logits become softcap*tanh(logits/softcap)
    attention_softcap: float | None = None  # scores of attention likewise
    attention_scale: float | None = None  # of the scores; None: 1 / sqrt(head_dim)
    embed_scale: bool = False  # multiply embeddings by sqrt(hidden), as Gemma does
    qk_norm: bool = False  # RMS-normalise queries and keys, as Qwen3 does
    qkv_bias: bool = False  # queries, keys and values have biases, as in Qwen2
    post_norms: bool = False  # what a block adds is normalised first, as in Gemma 2
    norm_offset: bool = False  # norms multiply by 1 + scale, as Gemma's do
    activation: Literal["silu", "gelu"] = "silu"  # gate of the feed-forward layer
    norm_eps: float = 1e-6  # added to the mean square in every norm
    dtype: str = "float32"  # activations and matrix products
    param_dtype: str = "float32"  # stored weights (the master copy)
    attention: Literal["xla", "cudnn"] | None = None  # None: jax chooses
    lora_rank: int = 0  # of adapters beside frozen matrices; 0: none
    lora_alpha: float = 16.0  # what they add is multiplied with this / lora_rank
    # matrices of a block that have them: also "gate", "up", "down"
    lora_targets: tuple[str, ...] = ("query", "key", "value", "output")
    lora_head: bool = False  # the head has one too

    def __post_init__(self):
        """Refuse sizes that cannot be built, by name."""
        _check_positive(self, "layers", "hidden", "ff", "heads", "kv_heads")
        _check_positive(self, "head_dim", "rope_theta", "norm_eps")
        _check_positive(self, "rope_factor", "rope_low_factor", "rope_original")
        for name in (
            "vocab_size", "softcap", "attention_softcap", "attention_scale", "window",
            "local_rope_theta",
        ):  # fmt: skip
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
        self._check_kinds()
        _check_choice(self, "rope_scaling", (None, "linear", "llama3"))
        above = self.rope_high_factor > self.rope_low_factor
        check_field(self, "rope_high_factor", above, "above rope_low_factor")
        _check_choice(self, "activation", tuple(_ACTIVATIONS))
        _check_choice(self, "dtype", _DTYPES)
        _check_choice(self, "param_dtype", _DTYPES)
        _check_choice(self, "attention", ("xla", "cudnn", None))
        problem = lora.check(
            self.lora_rank, self.lora_alpha, self.lora_targets, self.lora_head
        )
        if problem is not None:
            raise ValueError(f"ModelConfig.{problem}")
        if self.attention == "cudnn" and self.attention_softcap is not None:
            raise ValueError(
                "ModelConfig.attention='cudnn' cannot cap scores; leave it None, or "
                "'xla', with attention_softcap"
            )

    def _check_kinds(self):
        kinds = set(self.pattern) <= set(positions.KINDS) and len(self.pattern) > 0
        check_field(self, "pattern", kinds, "of 'global' and 'local', at least one")
        local = "local" in self.pattern
        wanted = "given where pattern has 'local', and only there"
        check_field(self, "window", local == (self.window is not None), wanted)

    @property
    def score_scale(self) -> float:
        """What products of queries and keys are multiplied with."""
        scale = self.attention_scale
        return self.head_dim**-0.5 if scale is None else scale


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


def rms_norm(config: ModelConfig, width: int, rngs: nnx.Rngs) -> nnx.RMSNorm:
    """The one norm of all layers, over the last axis."""
    kind, start = norms.RMSNorm, nnx.initializers.ones
    if config.norm_offset:
        kind, start = norms.OffsetRMSNorm, nnx.initializers.zeros
    return kind(
        width,
        epsilon=config.norm_eps,
        scale_init=start,
        dtype=jnp.dtype(config.dtype),
        param_dtype=jnp.dtype(config.param_dtype),
        rngs=rngs,
    )


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

    def __call__(self, x: jax.Array, sight: Sight, rope: Rope) -> jax.Array:
        """[B, T, hidden] to [B, T, hidden]."""
        query, key, value = self.project(x)
        return self.attend(*self.rotate(query, key, rope), value, sight)

    def project(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Products [B, T, heads, head_dim]: queries, keys and values."""
        batch, length, _ = x.shape

        def split(projected: jax.Array) -> jax.Array:
            return projected.reshape(batch, length, -1, self.config.head_dim)

        return split(self.query(x)), split(self.key(x)), split(self.value(x))

    def rotate(self, query: jax.Array, key: jax.Array, rope: Rope):
        """Queries and keys as attention reads them: normalised, if so, and rotated."""
        if not self.config.qk_norm:  # the rotation needs neither for its gradient
            query, key = apply_rope(query, *rope), apply_rope(key, *rope)
            return remat.name(query, "q"), remat.name(key, "k")
        query, key = remat.name(query, "q"), remat.name(key, "k")
        query, key = self.query_norm(query), self.key_norm(key)
        return apply_rope(query, *rope), apply_rope(key, *rope)

    def attend(
        self, query: jax.Array, key: jax.Array, value: jax.Array, sight: Sight
    ) -> jax.Array:
        """[B, T, hidden] of rotated queries and keys, and values."""
        value = remat.name(value, "v")
        mixed = ulysses.attend(self._attend, query, key, value, sight)
        return remat.recompute(self._join)(mixed)

    def decode(self, x: jax.Array, rope: Rope, layer: kv_cache.Layer, filled):
        """[B, 1, hidden] to [B, 1, hidden], and the tokens' keys and values."""
        query, key, value = self.project(x)
        query, key = self.rotate(query, key, rope)
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
        return self._join(mixed), token

    def _join(self, mixed: jax.Array) -> jax.Array:
        return self.output(mixed.reshape(*mixed.shape[:2], -1))

    def _attend(self, query, key, value, sight: Sight) -> jax.Array:
        config = self.config
        if query.dtype == jnp.float16 and jax.default_backend() == "cpu":
            raise ValueError(
                "model.dtype='float16' needs a GPU, as jax's attention has none on a "
                "CPU: set model.dtype='bfloat16' or 'float32'"
            )
        return attention.attend(
            query,
            key,
            value,
            sight,
            scale=config.score_scale,
            softcap=config.attention_softcap,
            implementation=config.attention,
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def gated(gate: jax.Array, up: jax.Array, activation: str) -> jax.Array:
    """activation(gate) * up, in f32, rounded once to the type of `gate`.

    **Memory** for the backward pass: gate and up.
    """
    wide = _ACTIVATIONS[activation](gate.astype(jnp.float32))
    return (wide * up.astype(jnp.float32)).astype(gate.dtype)


def _gated_backward(activation, residuals, gradient):
    gate, up = residuals
    gradient = gradient.astype(jnp.float32)
    active, pull = jax.vjp(_ACTIVATIONS[activation], gate.astype(jnp.float32))
    (dgate,) = pull(gradient * up.astype(jnp.float32))
    return dgate.astype(gate.dtype), (gradient * active).astype(up.dtype)


gated.defvjp(
    lambda gate, up, activation: (gated(gate, up, activation), (gate, up)),
    _gated_backward,
)


class FeedForward(nnx.Module):
    """down(activation(gate(x)) * up(x)): SwiGLU, or GeGLU with "gelu"."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.gate = _linear(config, "gate", config.hidden, config.ff, rngs)
        self.up = _linear(config, "up", config.hidden, config.ff, rngs)
        self.down = _residual_linear(config, "down", config.ff, rngs)
        self.activation = config.activation

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T, hidden] to [B, T, hidden]."""
        return self.join(*self.project(x))

    def project(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Gate and what it is multiplied with, [B, T, ff] each."""
        return self.gate(x), self.up(x)

    def join(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """[B, T, hidden] of both."""
        gate, up = remat.name(gate, "gate"), remat.name(up, "up")

        def join(gate: jax.Array, up: jax.Array) -> jax.Array:
            return self.down(gated(gate, up, self.activation))

        return remat.recompute(join)(gate, up)


class Block(nnx.Module):
    """One pre-norm layer: attention, then feed-forward, each added to its input.

    **Memory** for the backward pass, per token, where nothing else is asked for: in the
    type of activations, the residual stream before either part, all products but those
    that are added to it, rotated queries and keys, and attention's output; in float32,
    its logsumexp and one number for each row of a norm. What lies between these is
    elementwise, and recomputed.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.attention_norm = rms_norm(config, config.hidden, rngs)
        self.attention = Attention(config, rngs=rngs)
        self.feed_forward_norm = rms_norm(config, config.hidden, rngs)
        self.feed_forward = FeedForward(config, rngs=rngs)
        self.post_norms = config.post_norms
        if config.post_norms:
            self.post_attention_norm = rms_norm(config, config.hidden, rngs)
            self.post_feed_forward_norm = rms_norm(config, config.hidden, rngs)

    def __call__(self, x: jax.Array, sight: Sight, rope: Rope) -> jax.Array:
        """[B, T, hidden] to [B, T, hidden]."""
        return self.prefill(x, sight, rope)[0]

    def prefill(self, x: jax.Array, sight: Sight, rope: Rope):
        """The same, and the keys and values [B, T, kv_heads, head_dim]."""

        def project(x: jax.Array):
            return self.attention.project(self.attention_norm(x))

        query, key, value = remat.recompute(project, save=["norm_rms"])(x)
        query, key = self.attention.rotate(query, key, rope)
        mixed = self.attention.attend(query, key, value, sight)
        return self._finish(x, mixed), (key, value)

    def decode(self, x: jax.Array, rope: Rope, layer: kv_cache.Layer, filled):
        """[B, 1, hidden] to [B, 1, hidden], and the tokens' keys and values."""
        x_norm = self.attention_norm(x)
        mixed, made = self.attention.decode(x_norm, rope, layer, filled)
        return self._finish(x, mixed), made

    def _finish(self, x: jax.Array, mixed: jax.Array) -> jax.Array:
        x = x + (self.post_attention_norm(mixed) if self.post_norms else mixed)
        x = mesh.spread(x)

        def project(x: jax.Array):
            return self.feed_forward.project(self.feed_forward_norm(x))

        projected = remat.recompute(project, save=["norm_rms"])(x)
        made = self.feed_forward.join(*projected)
        made = self.post_feed_forward_norm(made) if self.post_norms else made
        return mesh.spread(x + made)
