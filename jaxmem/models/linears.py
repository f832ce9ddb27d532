"""Matrices of a decoder's blocks, with or without adapters."""

import functools

import jax.numpy as jnp
from flax import nnx

from jaxmem.models import lora
from jaxmem.models.config import ModelConfig


def linear(
    config: ModelConfig,
    name: str,
    inputs: int,
    outputs: int,
    rngs: nnx.Rngs,
    gain: float = 1.0,
    use_bias: bool = False,
) -> nnx.Linear:
    """A matrix of a block, with an adapter if the config names it."""
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


def residual_linear(
    config: ModelConfig, name: str, inputs: int, rngs: nnx.Rngs, use_bias: bool
) -> nnx.Linear:
    """A matrix whose result is added to the residual stream."""
    # 2 x layers outputs are added to the residual stream; this keeps its variance at 1.
    gain = 0.5 / config.layers
    return linear(config, name, inputs, config.hidden, rngs, gain, use_bias)
