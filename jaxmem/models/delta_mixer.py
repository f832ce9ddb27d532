"""A layer's mixer of tokens that applies the gated delta rule."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmem import remat
from jaxmem.models import delta, kv_cache
from jaxmem.models.config import ModelConfig
from jaxmem.models.interfaces import Mixer
from jaxmem.models.linears import linear, residual_linear
from jaxmem.models.norms import make_norm
from jaxmem.models.positions import Rotation, Sight

_READERS = tuple(
    f"delta_{name}" for name in ("query", "key", "value", "gate", "rate", "decay")
)


class DeltaState(NamedTuple):
    """State of a layer after the tokens that it has read."""

    inputs: jax.Array  # [B, J - 1, C] of the convolution, the last ones
    matrix: jax.Array  # f32 [B, H, K, V]


class DeltaProjections(NamedTuple):
    """Results of a layer's projections, in the order of `_READERS`."""

    mixed: jax.Array  # [B, T, C] queries, keys and values as channels
    gate: jax.Array
    rate: jax.Array
    decay: jax.Array

    @classmethod
    def from_projected(cls, projected: Sequence[jax.Array]) -> "DeltaProjections":
        """Join the first three of `projected` to channels of the convolution."""
        return cls(jnp.concatenate(projected[:3], axis=-1), *projected[3:])


class DeltaMixer(Mixer):
    """The gated delta rule behind a short convolution.

    Padding and tokens of other documents change no state. On a mesh the layer is not
    split along `tensor`, and rows are not split along `sequence` inside it.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        assert config.delta.heads is not None
        keys = config.delta.key_heads * config.delta.key_dim
        values = config.delta.heads * config.delta.value_dim

        states = config.delta.heads
        widths = keys, keys, values, values, states, states
        for name, width in zip(_READERS, widths, strict=True):
            setattr(self, name, linear(config, name, config.hidden, width, rngs))
        dtype = jnp.dtype(config.param_dtype)
        shape = 2 * keys + values, 1, config.delta.conv_kernel_dim
        bound = config.delta.conv_kernel_dim**-0.5
        taps = jax.random.uniform(rngs.params(), shape, jnp.float32, -bound, bound)
        self.delta_taps = nnx.Param(taps.astype(dtype))
        ones = jnp.ones(config.delta.heads, dtype)
        self.delta_shift = nnx.Param(ones)
        speed = jax.random.uniform(rngs.params(), ones.shape, jnp.float32, 0.01, 16)
        self.delta_log_speed = nnx.Param(jnp.log(speed).astype(dtype))
        plain = config.replaced({"norm.offset": False})
        self.delta_norm = make_norm(plain, config.delta.value_dim, rngs)
        self.delta_output = residual_linear(
            config, "delta_output", values, rngs, use_bias=False
        )
        self.config = config

    @property
    def readers(self) -> tuple[nnx.Linear, ...]:
        return tuple(getattr(self, name) for name in _READERS)

    def mix(
        self, projected, sight: Sight, rope: Rotation, before: DeltaState | None = None
    ):
        del rope
        projections = DeltaProjections.from_projected(projected)
        x = projections.mixed
        shape = x.shape[:2]
        is_token, documents = jnp.ones(shape, bool), jnp.zeros(shape, jnp.int32)
        if sight.segment_ids is not None:
            is_token, documents = _split_segments(jnp.asarray(sight.segment_ids))
        widths, matrix = (0, 0), None
        if before is not None:
            widths, matrix = (before.inputs.shape[1], 0), before.matrix
            x = jnp.concatenate([before.inputs, x], axis=1)

        def run(x, gate, rate, decay):
            taps = self.delta_taps[...][:, 0]
            of_inputs = jnp.pad(documents, ((0, 0), widths), mode="edge")
            active = delta.convolve(x, taps, of_inputs)[:, widths[0] :]
            active = jax.nn.silu(active)
            inputs = self._rule_inputs(active, rate, decay, is_token, documents)
            out, after = delta.run(inputs, matrix)
            return self._gate_output(out, gate), after

        out, after = remat.recompute(run)(
            x, projections.gate, projections.rate, projections.decay
        )
        return out, DeltaState(self._last_inputs(x, is_token), after)

    def _last_inputs(self, x: jax.Array, is_token: jax.Array) -> jax.Array:
        """The convolution's inputs of each row's last tokens, 0 before the first.

        `x` may begin with inputs of earlier tokens, which `is_token` does not have.
        """
        back = jnp.arange(self.config.delta.conv_kernel_dim - 1, 0, -1)
        end = jnp.sum(is_token, axis=1, keepdims=True) + x.shape[1] - is_token.shape[1]
        index = end - back
        rows = jnp.take_along_axis(x, jnp.maximum(index, 0)[..., None], axis=1)
        return jnp.where(index[..., None] >= 0, rows, 0)

    def _rule_inputs(
        self, active, rate, decay, is_token, documents
    ) -> delta.DeltaInputs:
        """Inputs of the rule from the convolution's results and two projections."""
        config = self.config
        keys = config.delta.key_heads * config.delta.key_dim
        query, key, value = jnp.split(active, [keys, 2 * keys], axis=-1)

        def heads(x: jax.Array, width: int) -> jax.Array:
            return x.reshape(*x.shape[:2], -1, width)

        assert config.delta.heads is not None
        times = config.delta.heads // config.delta.key_heads

        def unit(x: jax.Array) -> jax.Array:
            x = heads(x, config.delta.key_dim)
            length = jnp.sum(x * x, axis=-1, keepdims=True)
            return jnp.repeat(x * jax.lax.rsqrt(length + 1e-6), times, axis=2)

        rate = jax.nn.sigmoid(rate.astype(jnp.float32))
        speed = jnp.exp(self.delta_log_speed[...].astype(jnp.float32))
        shift = self.delta_shift[...].astype(jnp.float32)
        decay = -speed * jax.nn.softplus(decay.astype(jnp.float32) + shift)
        decay, rate = (jnp.where(is_token[..., None], x, 0) for x in (decay, rate))
        scaled = unit(query) * config.delta.key_dim**-0.5
        value = heads(value, config.delta.value_dim)
        return delta.DeltaInputs(scaled, unit(key), value, decay, rate, documents)

    def _gate_output(self, out: jax.Array, gate: jax.Array) -> jax.Array:
        wide = gate.astype(jnp.float32).reshape(out.shape)
        out = self.delta_norm(out.astype(gate.dtype)).astype(jnp.float32)
        out = (out * jax.nn.silu(wide)).astype(gate.dtype)
        return self.delta_output(out.reshape(gate.shape))

    def decode(
        self, x: jax.Array, rope: Rotation, cached: kv_cache.Cached, seen, shared
    ):
        del rope, seen, shared
        before: DeltaState = cached.layer
        projections = DeltaProjections.from_projected(
            [read(x) for read in self.readers]
        )
        window = jnp.concatenate([before.inputs, projections.mixed], axis=1)
        taps = self.delta_taps[...][:, 0].astype(jnp.float32)
        active = jnp.einsum("btc,ct->bc", window.astype(jnp.float32), taps)
        active = jax.nn.silu(active)[:, None]
        is_token = jnp.ones(x.shape[:2], bool)  # all of one document
        inputs = self._rule_inputs(
            active, projections.rate, projections.decay, is_token, is_token
        )
        out, matrix = delta.step(before.matrix, inputs)
        return self._gate_output(out, projections.gate), DeltaState(
            window[:, 1:], matrix
        )

    @staticmethod
    def grow(
        states: DeltaState, added: DeltaState, slot: jax.Array, live: jax.Array
    ) -> DeltaState:
        del slot

        def replace(old: jax.Array, new: jax.Array) -> jax.Array:
            return jnp.where(live.reshape(-1, *(1,) * (new.ndim - 2)), new, old)

        return jax.tree.map(replace, states, added)


def _split_segments(segments: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A mask of tokens, and documents [B, T]; padding continues the one before it."""
    is_token = segments != 0
    index = jnp.where(is_token, jnp.arange(segments.shape[1]), 0)
    last = jax.lax.cummax(index, axis=1)
    return is_token, jnp.take_along_axis(segments.astype(jnp.int32), last, axis=1)
