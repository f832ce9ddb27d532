"""Matrices of a decoder's blocks, with or without adapters."""

import functools
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jaxmem.models import coded_weights, lora
from jaxmem.models.coded_linear import CodedLinear
from jaxmem.models.config import ModelConfig


def linear(
    config: ModelConfig,
    name: str,
    inputs: int,
    outputs: int,
    rngs: nnx.Rngs,
    gain: float = 1.0,
    use_bias: bool = False,
) -> Any:
    """A matrix of a block, coded and with an adapter if the config names it.

    Raises:
        ValueError: the base has blocks that do not divide the inputs.
    """
    kind: Any = nnx.Linear
    adapted: Any = lora.LoraLinear
    base = config.base_of(name)
    if base is not None:
        check_inputs(base, name, inputs)
        code = {"base": base, "double": config.base_double}
        kind = functools.partial(CodedLinear, **code)
        adapted = functools.partial(lora.LoraCodedLinear, **code)
    if config.lora_rank and name in config.lora_targets:
        kind = functools.partial(adapted, config)
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


def check_inputs(base: str, name: str, inputs: int) -> None:
    """Raise a ValueError for a matrix whose inputs are not whole blocks of a base."""
    block = coded_weights.BLOCKS[base]
    if base == "nf4" and inputs % block:
        raise ValueError(
            f"model.base={base!r} has blocks of {block} inputs, which must divide the "
            f"{inputs} inputs of {name!r}: name other matrices in model.base_targets"
        )


def residual_linear(
    config: ModelConfig, name: str, inputs: int, rngs: nnx.Rngs, use_bias: bool
) -> nnx.Linear:
    """A matrix whose result is added to the residual stream."""
    # 2 x layers outputs are added to the residual stream; this keeps its variance at 1.
    gain = 0.5 / config.layers
    return linear(config, name, inputs, config.hidden, rngs, gain, use_bias)
