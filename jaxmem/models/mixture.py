"""A mixture of experts: a feed-forward layer of which each token uses a few parts."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

from jaxmem import remat
from jaxmem.models import coded_weights, interfaces, linears, lora, partitioning
from jaxmem.models.balance import Choice
from jaxmem.models.coded_linear import CodedArrays, draw_codes
from jaxmem.models.config import ModelConfig
from jaxmem.models.experts import grouped, grouped_rows, routing
from jaxmem.models.feed_forward import DenseFeedForward, gated
from jaxmem.models.norms import make_norm

_TENSOR = "tensor"


def _float32_linear(config: ModelConfig, outputs: int, rngs: nnx.Rngs, use_bias: bool):
    return nnx.Linear(
        config.hidden, outputs, use_bias=use_bias, dtype=jnp.float32,
        param_dtype=jnp.dtype(config.param_dtype), precision="highest", rngs=rngs,
    )  # fmt: skip


class Mixture(interfaces.FeedForward):
    """Σ_k weight_k expert_k(x), plus shared experts.

    Routing is in float32. On a mesh, each device has a part of every expert's width,
    and runs it on its tokens.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        assert config.experts.count is not None
        bias = config.router.bias
        self.router = _float32_linear(config, config.experts.count, rngs, use_bias=bias)
        if config.router.correction:
            self.correction = nnx.Param(jnp.zeros(config.experts.count))
        self.experts = Experts(config, rngs=rngs)
        if config.experts.shared_ff is not None:
            own = dataclasses.replace(config, ff=config.experts.shared_ff)
            self.shared = DenseFeedForward(own, rngs=rngs)
        if config.experts.shared_gate:
            self.shared_gate = _float32_linear(config, 1, rngs, use_bias=False)
        self.whole = Whole()
        self.config = config

    @property
    def readers(self) -> tuple["Whole"]:
        return (self.whole,)

    def join(
        self, *projected: jax.Array, chosen: jax.Array | None = None
    ) -> tuple[jax.Array, Choice]:
        (x,) = projected
        return remat.recompute(self._mix_experts)(x, chosen)

    def _mix_experts(
        self, x: jax.Array, chosen: jax.Array | None
    ) -> tuple[jax.Array, Choice]:
        correction = self.correction[...] if self.config.router.correction else None
        logits = self.router(x)
        choice, weights = routing.decide(logits, correction, self.config, chosen)
        out = self.experts(x, choice.chosen, weights)
        if self.config.experts.shared_ff is None:
            return out.astype(x.dtype), choice
        shared = self.shared(x).astype(jnp.float32)
        if self.config.experts.shared_gate:
            shared = shared * jax.nn.sigmoid(self.shared_gate(x))
        return (out + shared).astype(x.dtype), choice


class Whole(nnx.Module):
    """The identity, as a module that reads the normalised residual stream."""

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return x."""
        return x


class Experts(nnx.Module):
    """The matrices of all experts, each with a leading axis."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        assert config.experts.ff is not None
        matrix = functools.partial(Matrices, config, rngs=rngs)
        sizes = config.hidden, config.experts.ff
        self.gate, self.up = matrix("gate", *sizes), matrix("up", *sizes)
        self.down = matrix("down", *sizes[::-1], gain=0.5 / config.layers)
        self.config = config

    def __call__(self, x: jax.Array, chosen: jax.Array, weights: jax.Array):
        """The weighted sum, f32 [B, T, hidden], of x through its chosen experts."""
        config, mesh = self.config, partitioning.current()
        run = Expert(
            config.dtype,
            config.mlp.activation,
            config.experts.gate_limit,
            config.experts.up_plus_one,
            lora.scale(config),
            config.router.scales_inputs,
        )
        arrays = {name: getattr(self, name).arrays for name in ("gate", "up", "down")}

        def on_device(arrays, x, chosen, weights):
            arrays = {name: _decoded(each, config) for name, each in arrays.items()}
            x = x.astype(config.dtype)
            flat = [a.reshape(-1, a.shape[-1]) for a in (x, chosen, weights)]
            return grouped.apply(run, arrays, *flat).reshape(x.shape)

        if mesh is None:
            return on_device(arrays, x, chosen, weights)

        def on_mesh(arrays, *rest):
            # Each device adds a part of the width: one of them adds the last bias.
            if "bias" in arrays["down"]:
                is_first = lax.axis_index(_TENSOR) == 0
                bias = jnp.where(is_first, arrays["down"]["bias"], 0)
                arrays = arrays | {"down": arrays["down"] | {"bias": bias}}
            return lax.psum(on_device(arrays, *rest), _TENSOR)

        specs = {name: _matrix_specs(each, name) for name, each in arrays.items()}
        return jax.shard_map(
            on_mesh,
            in_specs=(specs, *(partitioning.TOKENS,) * 3),
            out_specs=partitioning.TOKENS,
        )(arrays, x, chosen, weights)


def _matrix_specs(
    arrays: Mapping[str, jax.Array], name: str
) -> dict[str, PartitionSpec]:
    """Partition specs of one matrix of all experts, by the names of its arrays."""
    split = "kernel", "lora_a" if name == "down" else "lora_b"
    if name != "down":
        split = *split, "bias"
    axis = 1 if name == "down" else -1

    def spec(key: str, array: jax.Array) -> PartitionSpec:
        axes: list[str | None] = [None] * array.ndim
        if key in split:
            axes[axis] = _TENSOR
        elif coded_weights.is_coded(key) and array.shape[-axis] > 1:
            axes[-axis] = _TENSOR  # of [experts, outputs, inputs]
        return PartitionSpec(*axes)

    return {key: spec(key, array) for key, array in arrays.items()}


def _decoded(
    arrays: Mapping[str, jax.Array], config: ModelConfig
) -> dict[str, jax.Array]:
    """The arrays of a matrix of all experts, with a kernel in the place of codes."""
    others = {k: v for k, v in arrays.items() if not coded_weights.is_coded(k)}
    if "kernel" in others:
        return others
    codes = {name: arrays[f"kernel_{name}"] for name in ("codes", "scales")}
    kernel = coded_weights.decode(codes, config.dtype).swapaxes(-1, -2)
    return others | {"kernel": kernel}


class Matrices(CodedArrays):
    """One matrix of every expert [experts, inputs, outputs], with or without adapters.

    `lora_targets` and `base_targets` may have its name; `gain` is the factor of its
    results' variance.
    """

    def __init__(
        self,
        config: ModelConfig,
        name: str,
        inputs: int,
        outputs: int,
        *,
        gain: float = 1.0,
        rngs: nnx.Rngs,
    ):
        assert config.experts.count is not None
        dtype, count = jnp.dtype(config.param_dtype), config.experts.count
        draw = nnx.initializers.variance_scaling(
            gain, "fan_in", "truncated_normal", batch_axis=(0,)
        )
        shape = count, inputs, outputs
        base, self.names = config.base_of(name), ("kernel",)
        if base is None:
            self.kernel = nnx.Param(draw(rngs.params(), shape, dtype))
        else:
            linears.check_inputs(base, name, inputs)
            self.names = ()
            key, double = rngs.params(), config.base_double
            self.set_arrays(draw_codes(key, shape, draw, dtype, base, double))
        if config.experts.bias:
            self.bias = nnx.Param(jnp.zeros((count, outputs), dtype))
            self.names += ("bias",)
        if config.lora_rank and name in config.lora_targets:
            self.lora_a, self.lora_b = lora.matrices(config, shape, dtype, rngs)
            self.names += ("lora_a", "lora_b")

    @property
    def arrays(self) -> dict[str, jax.Array]:
        """The arrays of all matrices, by name; scales of coded ones are in float32."""
        arrays = {name: getattr(self, name)[...] for name in self.names}
        if "kernel" in arrays:
            return arrays
        # A shard's scales could not be decoded: 256 that share one may cross shards.
        codes = self.codes
        scales = coded_weights.decode_scales(codes)
        return arrays | {"kernel_codes": codes["codes"], "kernel_scales": scales}


@dataclasses.dataclass(frozen=True)
class Expert:
    """down(scale activation(gate(x)) up(x)) of one expert, for `grouped.apply`.

    Or down(activation(gate(scale x)) up(scale x)).
    """

    dtype: str  # of the products' operands
    activation: str
    limit: float | None  # the gate is at most this, and up within ± this
    plus_one: bool  # True: up + 1 takes the place of up
    lora_scale: float  # factor of adapters
    scales_inputs: bool  # True: the scale multiplies x, not the result

    def __call__(
        self, rows: grouped_rows.GroupedRows, weights: Mapping[str, Any], x, scale
    ) -> jax.Array:
        """Map [R, hidden] to [R, hidden], with the scale [R] of each row."""
        if self.scales_inputs:
            x = (x.astype(jnp.float32) * scale[:, None]).astype(x.dtype)
            scale = jnp.ones_like(scale)
        gate, up = self._products(rows, x, weights["gate"], weights["up"])
        if self.limit is not None:
            gate = jnp.minimum(gate, self.limit)
            up = jnp.clip(up, -self.limit, self.limit)
        up = up + 1 if self.plus_one else up
        wide = gated(gate, up, self.activation).astype(jnp.float32)
        scaled = (wide * scale[:, None]).astype(gate.dtype)
        return self._products(rows, scaled, weights["down"], scale=scale)[0]

    def _products(self, rows: grouped_rows.GroupedRows, x, *matrices, scale=None):
        """Products of x with each matrix and its adapters, plus the scaled bias."""
        out = rows.products(x, *(each["kernel"] for each in matrices))
        for i, each in enumerate(matrices):
            if "lora_a" in each:
                (low,) = rows.products(x, each["lora_a"])
                low = low * self.lora_scale
                out[i] = out[i] + rows.products(low, each["lora_b"])[0]
            if "bias" in each:
                bias = rows.own(each["bias"].astype(self.dtype))
                scaled = bias if scale is None else bias * scale[:, None]
                out[i] = (out[i] + scaled).astype(self.dtype)
        return out


class DenseAndExperts(DenseFeedForward):
    """norm(dense(x)) + norm(Σ_k weight_k expert_k(norm(s))), s the residual stream.

    The router reads s, normalised without a scale of the norm's own. The dense part has
    the paths of a dense layer.
    """

    reads_stream = True

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        dtype, count = jnp.dtype(config.param_dtype), config.experts.count
        assert count is not None
        self.router = _float32_linear(config, count, rngs, use_bias=False)
        self.router_scale = nnx.Param(jnp.ones(config.hidden, dtype))
        self.expert_scale = nnx.Param(jnp.ones(count, dtype))
        plain = config.replaced({"norm.scale": False})
        self.router_norm = make_norm(plain, config.hidden, rngs)
        self.experts = Experts(config, rngs=rngs)
        norm = functools.partial(make_norm, config, config.hidden, rngs)
        self.dense_norm, self.mixed_norm, self.stream_norm = norm(), norm(), norm()
        self.config = config

    def join(
        self, *projected: jax.Array, chosen: jax.Array | None = None
    ) -> tuple[jax.Array, Choice]:
        *dense, stream = projected
        out = self.dense_norm(super().join(*dense)[0])
        mixed, choice = remat.recompute(self._mix_experts)(stream, chosen)
        return out + mixed, choice

    def _mix_experts(
        self, stream: jax.Array, chosen: jax.Array | None
    ) -> tuple[jax.Array, Choice]:
        scale = self.router_scale[...].astype(jnp.float32)
        x = self.router_norm(stream).astype(jnp.float32) * scale
        logits = self.router(x * self.config.hidden**-0.5)
        choice, weights = routing.decide(logits, None, self.config, chosen)
        scale = self.expert_scale[...].astype(jnp.float32)[choice.chosen]
        out = self.experts(self.stream_norm(stream), choice.chosen, weights * scale)
        return self.mixed_norm(out.astype(stream.dtype)), choice
