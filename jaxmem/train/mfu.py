"""Model FLOPs utilisation: the fraction of the devices' peak that the model uses.

    MFU = (tokens per second) · (FLOPs per token) / (devices · peak)
    FLOPs per token = 4 N + 2 N_trained + 12 Σ_layers heads · head_dim · min(T, window)

N is the number of weights that multiply a token: all matrices, including the head's,
but not the embedding look-up, and of the experts as many as a token is routed to. If
all are trained, the first terms are 6 N. As in the reference, attention counts T keys
per query although causal attention computes half of them, and recomputation does not
count. Tokens are those of the batch, including padding.

Reference: Chowdhery et al., "PaLM", 2022, arXiv:2204.02311, appendix B.
"""

from typing import Any

import jax

from jaxmem import devices
from jaxmem.models import coded_weights
from jaxmem.models.config import ModelConfig


def peak_of(kind: str, dtype: str) -> float | None:
    """Peak FLOP/s of one device for a dtype; None if devices.toml does not list it."""
    device = devices.of_kind(kind)
    if device is None or dtype not in ("bfloat16", "float16"):
        return None
    return device.products


def flops_per_token(
    config: ModelConfig, trained: Any, frozen: Any, length: int
) -> float:
    """FLOPs of a training step, per token, by this module's formula."""
    with_gradients = _count_multiplied(config, trained)
    everything = with_gradients + _count_multiplied(config, frozen)
    kinds = (config.pattern * config.layers)[: config.layers]
    window = min(length, config.self_attn.window or length)
    attention = 0
    for kind in kinds:
        width = config.head_dim + config.value_width
        if kind == "global" and config.self_attn.global_head_dim is not None:
            width = 2 * config.self_attn.global_head_dim
        keys = window if kind in ("local", "chunked") else length
        attention += 6 * config.heads * width * keys
    return 4 * everything + 2 * with_gradients + attention


def _count_multiplied(config, weights) -> float:
    """The number of weights in matrices that multiply a token."""
    ends = ("kernel", "kernel_codes", "lora_a", "lora_b") + ("embedding",) * config.tied
    total = 0.0
    for path, leaf in jax.tree_util.tree_leaves_with_path(weights):
        keys = [getattr(entry, "key", "") for entry in path]
        chosen = 1.0
        if "experts" in keys:
            chosen = config.experts.per_token / config.experts.count
        count = coded_weights.count_weights(keys[-1], leaf)
        total += chosen * count * (keys[-1] in ends)
    return total
