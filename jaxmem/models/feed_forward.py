"""The feed-forward part of a layer, and its activations."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmem import remat
from jaxmem.models import interfaces
from jaxmem.models.config import ACTIVATIONS, ModelConfig
from jaxmem.models.linears import linear, residual_linear


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def gated(gate: jax.Array, up: jax.Array, activation: str) -> jax.Array:
    """Compute activation(gate) * up in f32, rounded once to the dtype of `gate`."""
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


class DenseFeedForward(interfaces.FeedForward):
    """down(activation(gate(x)) * up(x)), or down(activation(up(x))) without a gate.

    With "silu" the first is SwiGLU, with "gelu" GeGLU.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        sizes, bias = (config.hidden, config.ff), config.mlp.bias
        if config.mlp.gated:
            self.gate = linear(config, "gate", *sizes, rngs, use_bias=bias)
        self.up = linear(config, "up", *sizes, rngs, use_bias=bias)
        self.down = residual_linear(config, "down", config.ff, rngs, bias)
        self.activation, self.gated = config.mlp.activation, config.mlp.gated
        if config.mlp.activation == "xielu":
            start = jnp.full(1, _XIELU_START, jnp.dtype(config.param_dtype))
            self.positive, self.negative = nnx.Param(start), nnx.Param(start)

    @property
    def readers(self) -> tuple[nnx.Linear, ...]:
        return (self.gate, self.up) if self.gated else (self.up,)

    def join(
        self, *projected: jax.Array, chosen: jax.Array | None = None
    ) -> tuple[jax.Array, Any]:
        del chosen
        names = ("gate", "up") if self.gated else ("up",)
        named = [remat.name(x, n) for x, n in zip(projected, names, strict=True)]

        def join(*projected: jax.Array) -> jax.Array:
            if self.gated:
                return self.down(gated(*projected, self.activation))
            (up,) = projected
            active = ACTIVATIONS.get(self.activation, self._xielu)
            return self.down(active(up.astype(jnp.float32)).astype(up.dtype))

        return remat.recompute(join)(*named), None

    def _xielu(self, x: jax.Array) -> jax.Array:
        return xielu(x, self.positive[...], self.negative[...])


_XIELU_START = 0.5413  # softplus of it is 0.8 + 0.2


def xielu(x: jax.Array, positive: jax.Array, negative: jax.Array) -> jax.Array:
    """An activation whose curvature is learnt on both sides of 0; all of it is f32.

        p x² + x / 2                             where x > 0
        n (exp(min(x, -1e-6)) - 1 - x) + x / 2   elsewhere
        p = softplus(positive),   n = 1/2 + softplus(negative)

    Reference: Huang and Schlag, "Deriving Activation Functions Using Integration",
    2024, arXiv:2411.13010.
    """
    p, n = (jax.nn.softplus(w.astype(jnp.float32)) for w in (positive, negative))
    below = (0.5 + n) * (jnp.expm1(jnp.minimum(x, -1e-6)) - x)
    return jnp.where(x > 0, p * x * x, below) + 0.5 * x
