"""Model FLOPs utilisation: how much of the devices' peak a model's own products take.

    MFU = (tokens per second) · (FLOPs per token) / (devices · peak)
    FLOPs per token = 4 N + 2 N_trained + 12 Σ_layers heads · head_dim · min(T, window)

N counts the weights that a token is multiplied with: all matrices, the head's among
them, but not the embedding's look-up. Where all are trained the first terms are 6 N.
Attention counts T keys per query although causal attention computes half of them, and
what is recomputed does not count, both as in the reference. Tokens are those of the
batch, padding included.

Reference: Chowdhery et al., "PaLM", 2022, arXiv:2204.02311, appendix B.
"""

import math
from typing import Any

import jax

from jaxmem import devices
from jaxmem.models.config import ModelConfig


def peak_of(kind: str, dtype: str) -> float | None:
    """FLOP/s of one device in that type; None where devices.toml does not say it.

    Args:
        kind: as `jax.Device.device_kind`.
        dtype: of the products' operands; their sums are float32.
    """
    device = devices.of_kind(kind)
    if device is None or dtype not in ("bfloat16", "float16"):
        return None
    return device.products


def flops_per_token(
    config: ModelConfig, trained: Any, frozen: Any, length: int
) -> float:
    """FLOPs of a training step, per token, as this module's formula has them.

    Args:
        config: of the decoder.
        trained: its weights, or their shapes, that have gradients.
        frozen: the others.
        length: tokens of a row, T.
    """
    with_gradients = _multiplied(config, trained)
    everything = with_gradients + _multiplied(config, frozen)
    kinds = (config.pattern * config.layers)[: config.layers]
    window = length if config.window is None else min(length, config.window)
    keys = sum(window if kind == "local" else length for kind in kinds)
    attention = 12 * config.heads * config.head_dim * keys
    return 4 * everything + 2 * with_gradients + attention


def _multiplied(config, weights) -> int:
    """Numbers in the matrices that every token is multiplied with."""
    ends = ("kernel", "lora_a", "lora_b") + ("embedding",) * config.tied
    return sum(
        math.prod(leaf.shape)
        for path, leaf in jax.tree_util.tree_leaves_with_path(weights)
        if getattr(path[-1], "key", "") in ends
    )
