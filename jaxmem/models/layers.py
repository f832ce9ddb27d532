"""The modules of a decoder: attention, feed-forward layer, block."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmem import devices, remat
from jaxmem.models import (
    attention,
    kv_cache,
    lora,
    normed_products,
    normed_rotary,
    norms,
    partitioning as mesh,
    ulysses,
)
from jaxmem.models.config import ACTIVATIONS, ModelConfig
from jaxmem.models.positions import Ids as Ids, Rope, Sight, apply_rope


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
    # 2 x layers outputs are added to the residual stream; this keeps its variance at 1.
    gain = 0.5 / config.layers
    return _linear(config, name, inputs, config.hidden, rngs, gain=gain)


def rms_norm(config: ModelConfig, width: int, rngs: nnx.Rngs) -> norms.RMSNorm:
    """The norm that all layers use, over the last axis."""
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
    """Causal grouped-query attention within documents, an `interfaces.Mixer`.

    Its state is a `kv_cache.Layer`.
    """

    grow = staticmethod(kv_cache.append)

    @staticmethod
    def state(made: tuple[jax.Array, jax.Array], max_length: int) -> kv_cache.Layer:
        """Keys and values of prompts in the layout of the cache."""
        key, value = made
        return kv_cache.layer_of(key, value, max_length)

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
        """Map [B, T, hidden] to [B, T, hidden]."""
        return self.mix([read(x) for read in self.readers], sight, rope)[0]

    def mix(self, projected, sight: Sight, rope: Rope):
        """[B, T, hidden] from the results of `readers`, and rotated keys and values."""
        query, key, value = self.split(*projected)
        query, key = self.rotate(query, key, rope)
        return self.attend(query, key, value, sight), (key, value)

    def project(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values, [B, T, heads, head_dim] each."""
        return self.split(*(read(x) for read in self.readers))

    @property
    def readers(self) -> tuple[nnx.Linear, ...]:
        """The projections, or the joined one."""
        if hasattr(self, "joined"):
            return (self.joined,)
        return self.query, self.key, self.value

    def split(self, *projected: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values, as `project`, from the results of `readers`."""
        heads = [
            each.reshape(*each.shape[:2], -1, self.config.head_dim)
            for each in projected
        ]
        if len(heads) == 1:
            at = self.config.heads, self.config.heads + self.config.kv_heads
            heads = jnp.split(heads[0], at, axis=2)
        query, key, value = heads
        return query, key, value

    def join(self) -> None:
        """Replace the three projections by `joined`, one product for all of them.

        Few rows are bound by reading the matrices, and those of keys and values alone
        are too small to occupy a GPU. With adapters of these projections, and if they
        are joined already, nothing changes.

        **Memory**: layers · hidden · (heads + 2 · kv_heads) · head_dim numbers, as long
        as the projections are held elsewhere, too.
        """
        lora_targets = self.config.lora_targets if self.config.lora_rank else ()
        if hasattr(self, "joined") or {"query", "key", "value"} & {*lora_targets}:
            return
        parts = self.query, self.key, self.value
        joined = self.query
        joined.out_features = sum(part.out_features for part in parts)
        for name in ("kernel", "bias") if self.config.qkv_bias else ("kernel",):
            arrays = [getattr(part, name)[...] for part in parts]
            setattr(joined, name, nnx.Param(jnp.concatenate(arrays, axis=-1)))
        self.joined = joined
        del self.query, self.key, self.value

    def rotate(self, query: jax.Array, key: jax.Array, rope: Rope):
        """Queries and keys after QK-norm, if configured, and rotation."""
        if not self.config.qk_norm:  # the rotation's gradient needs neither of them
            query, key = apply_rope(query, *rope), apply_rope(key, *rope)
            return remat.name(query, "q"), remat.name(key, "k")
        query, key = remat.name(query, "q"), remat.name(key, "k")
        if normed_rotary.is_fused(query):
            fused = normed_rotary.normalize_and_rotate
            return fused(self.query_norm, query, rope), fused(self.key_norm, key, rope)
        query, key = self.query_norm(query), self.key_norm(key)
        return apply_rope(query, *rope), apply_rope(key, *rope)

    def attend(
        self, query: jax.Array, key: jax.Array, value: jax.Array, sight: Sight
    ) -> jax.Array:
        """[B, T, hidden] from rotated queries and keys, and values."""
        value = remat.name(value, "v")
        mixed = ulysses.attend(self._attend, query, key, value, sight)
        return remat.recompute(self._join)(mixed)

    @property
    def shared(self) -> tuple[jax.Array, ...]:
        """The scales of QK-norm; of a stack of layers, those of all layers."""
        both = (self.query_norm, self.key_norm) if self.config.qk_norm else ()
        return tuple(norm.scale[...] for norm in both if norm.scale is not None)

    def decode(self, x: jax.Array, rope: Rope, cached: kv_cache.Cached, filled, scales):
        """[B, 1, hidden] from [B, 1, hidden], and the new tokens' keys and values.

        `scales` are `shared` of all layers.
        """
        query, key, value = self._of_token(x, rope, cached.index, scales)
        token = kv_cache.layer_of(key, value, 1)
        config = self.config
        mixed = kv_cache.attend_in_place(
            query,
            token,
            cached,
            filled,
            scale=config.score_scale,
            softcap=config.attention_softcap,
        )
        return self._join(mixed), token

    def _of_token(self, x: jax.Array, rope: Rope, index, scales):
        """Rotated queries and keys, and values; on one GPU, joined ones by a kernel."""
        on_one_gpu = devices.backend() == "gpu" and mesh.current() is None
        if hasattr(self, "joined") and on_one_gpu and devices.has_triton():
            from jaxmem.kernels import rotary  # Pallas takes a while to import

            if rotary.supports(self.config.head_dim):
                both = None
                if self.config.qk_norm:
                    norm = self.query_norm
                    both = rotary.Norms(index, scales, norm.offset, norm.epsilon)
                cosines, sines, *kind = rope
                tables = [t[kind[0]] if kind else t for t in (cosines, sines)]
                tables = tuple(t.reshape(len(x), -1) for t in tables)
                joined = self.joined(x).reshape(len(x), -1, self.config.head_dim)
                made = rotary.split(joined, self.config.kv_heads, tables, both)
                return (each[:, None] for each in made)
        query, key, value = self.project(x)
        return *self.rotate(query, key, rope), value

    def _join(self, mixed: jax.Array) -> jax.Array:
        return self.output(mixed.reshape(*mixed.shape[:2], -1))

    def _attend(self, query, key, value, sight: Sight) -> jax.Array:
        config = self.config
        if query.dtype == jnp.float16 and devices.backend() == "cpu":
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
    """Compute activation(gate) * up in f32, rounded once to the dtype of `gate`.

    **Memory** of residuals: gate and up.
    """
    wide = ACTIVATIONS[activation](gate.astype(jnp.float32))
    return (wide * up.astype(jnp.float32)).astype(gate.dtype)


def _gated_backward(activation, residuals, gradient):
    gate, up = residuals
    gradient = gradient.astype(jnp.float32)
    active, pull = jax.vjp(ACTIVATIONS[activation], gate.astype(jnp.float32))
    (dgate,) = pull(gradient * up.astype(jnp.float32))
    return dgate.astype(gate.dtype), (gradient * active).astype(up.dtype)


gated.defvjp(
    lambda gate, up, activation: (gated(gate, up, activation), (gate, up)),
    _gated_backward,
)


class FeedForward(nnx.Module):
    """down(activation(gate(x)) * up(x)): SwiGLU, or GeGLU with "gelu".

    It is an `interfaces.FeedForward`.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.gate = _linear(config, "gate", config.hidden, config.ff, rngs)
        self.up = _linear(config, "up", config.hidden, config.ff, rngs)
        self.down = _residual_linear(config, "down", config.ff, rngs)
        self.activation = config.activation

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [B, T, hidden] to [B, T, hidden]."""
        return self.join(*(read(x) for read in self.readers))

    @property
    def readers(self) -> tuple[nnx.Linear, nnx.Linear]:
        """The gate and up projections, to [B, T, ff] each."""
        return self.gate, self.up

    def join(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """[B, T, hidden] from the gate and up projections."""
        gate, up = remat.name(gate, "gate"), remat.name(up, "up")

        def join(gate: jax.Array, up: jax.Array) -> jax.Array:
            return self.down(gated(gate, up, self.activation))

        return remat.recompute(join)(gate, up)


MIXERS: dict[str, Any] = {"attention": Attention}
FEED_FORWARDS: dict[str, Any] = {"dense": FeedForward}


class Block(nnx.Module):
    """One pre-norm layer: attention, then feed-forward, each added to its input.

    Its config is that of one layer and names the class of each part; in a path both
    keep the names "attention" and "feed_forward", whatever they are.

    **Memory** of residuals per token, without a policy. In the dtype of activations:
    the residual stream before each sublayer, all matrix products except those added to
    it, rotated queries and keys, and attention's output. In float32: attention's
    logsumexp and one number for each row of a norm. Elementwise operations between
    these are recomputed.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.attention_norm = rms_norm(config, config.hidden, rngs)
        self.attention = MIXERS[config.mixers[0]](config, rngs=rngs)
        self.feed_forward_norm = rms_norm(config, config.hidden, rngs)
        self.feed_forward = FEED_FORWARDS[config.feed_forwards[0]](config, rngs=rngs)
        self.post_norms = config.post_norms
        if config.post_norms:
            self.post_attention_norm = rms_norm(config, config.hidden, rngs)
            self.post_feed_forward_norm = rms_norm(config, config.hidden, rngs)

    def __call__(self, x: jax.Array, sight: Sight, rope: Rope) -> jax.Array:
        """Map [B, T, hidden] to [B, T, hidden]."""
        return self.prefill(x, sight, rope)[0]

    def prefill(self, x: jax.Array, sight: Sight, rope: Rope):
        """The result of `__call__`, and what the state of its attention is made of."""
        attention = self.attention
        x, projected = normed_products.apply(self.attention_norm, attention.readers, x)
        mixed, made = attention.mix(projected, sight, rope)
        return self._finish(x, mixed), made

    def decode(self, x: jax.Array, rope: Rope, cached: kv_cache.Cached, filled, scales):
        """As `Attention.decode`, of the residual stream."""
        x_norm = self.attention_norm(x)
        mixed, token = self.attention.decode(x_norm, rope, cached, filled, scales)
        return self._finish(x, mixed), token

    def _finish(self, x: jax.Array, mixed: jax.Array) -> jax.Array:
        mixed = self.post_attention_norm(mixed) if self.post_norms else mixed
        readers = self.feed_forward.readers
        x, projected = normed_products.apply(self.feed_forward_norm, readers, x, mixed)
        output = self.feed_forward.join(*projected)
        output = self.post_feed_forward_norm(output) if self.post_norms else output
        return mesh.constrain_activations(x + output)
