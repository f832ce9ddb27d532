"""Stacks of layers that share a structure, and the order in which they run.

The weights of layers of one structure are stacked, and one loop runs them. A model of
one structure has one stack, "blocks"; the others are "blocks_1" and so on. Stacks that
alternate run in one loop, whose body has a layer of each.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxmem.models.config import BASE_TARGETS, ModelConfig


class Stack(NamedTuple):
    """Layers of one structure."""

    name: str  # attribute of the decoder, and the start of the weights' paths
    config: ModelConfig  # of each of these layers: its cycles have one entry
    layers: tuple[int, ...]  # their indices in the model, in ascending order
    source: str | None = None  # the stack whose last layer's keys and values they reuse


def runs(config: ModelConfig) -> tuple[tuple[Stack, ...], ...]:
    """The loops of a decoder in order: stacks, of which each runs a layer in turn."""
    parts = [_layer_parts(config, i) for i in range(config.layers)]
    loops, first = [], 0
    while first < len(parts):
        period, times = _find_repetition(parts[first:])
        stacks = []
        for layer in range(first, first + period):
            number = len(stacks) + sum(map(len, loops))
            name = f"blocks_{number}" if number else "blocks"
            own = _layer_config(config, parts[layer])
            layers = tuple(range(layer, first + period * times, period))
            source = None
            if own.mixers == ("reuse",):
                source = _source_stack(parts, layer, (*itertools.chain(*loops),))
            stacks.append(Stack(name, own, layers, source))
        loops.append(tuple(stacks))
        first += period * times
    return tuple(loops)


def _source_stack(
    parts: "Sequence[_LayerParts]", layer: int, earlier: Sequence[Stack]
) -> str:
    """The stack with the last layer of `layer`'s kind that has keys of its own."""
    last = max(
        i for i, other in enumerate(parts)
        if other.kind == parts[layer].kind and other.mixer != "reuse"
    )  # fmt: skip
    (name,) = (stack.name for stack in earlier if last in stack.layers)
    return name


def stacks(config: ModelConfig) -> dict[str, Stack]:
    """The stacks of all loops by name."""
    return {stack.name: stack for run in runs(config) for stack in run}


def _layer_config(config: ModelConfig, parts: "_LayerParts") -> ModelConfig:
    """The config of a layer, without the sizes of parts that it does not have."""
    mixer, feed_forward = parts.mixer, parts.feed_forward
    without: dict[str, Any] = {}
    if parts.is_wide:
        kv_heads = config.self_attn.global_kv_heads or config.kv_heads
        without |= {"head_dim": config.self_attn.global_head_dim, "kv_heads": kv_heads}
    elif config.has_global_heads:
        without |= {"self_attn.keys_are_values": False}
    if feed_forward == "dense":
        without |= {"experts.count": None, "experts.ff": None}
        without |= {"router_aux_loss_coef": None}
    if mixer != "latent":
        without |= {"latent.kv_rank": None, "latent.rope_head_dim": None}
    if mixer != "delta":
        without |= {"delta.heads": None}
    ff = config.mlp.reuse_ff if mixer == "reuse" else None
    without |= {"mlp.reuse_ff": None, "ff": ff or config.ff}
    if config.base_plain:
        targets = BASE_TARGETS if config.base_targets is None else config.base_targets
        coded = tuple(name for name in targets if name not in parts.plain)
        without |= {"base_targets": coded, "base_plain": ()}
    cycles = {"mixers": (mixer,), "feed_forwards": (feed_forward,)}
    return config.replaced(cycles | without)


class _LayerParts(NamedTuple):
    """Choices of one layer; layers with equal ones share a structure."""

    mixer: str
    feed_forward: str
    is_wide: bool  # True: heads have the width of global layers
    kind: str | None  # of the layer, where some reuse keys of their kind
    plain: frozenset[str]  # matrices that are not coded, others of these layers are


def _layer_parts(config: ModelConfig, layer: int) -> _LayerParts:
    cycles = config.mixers, config.feed_forwards, config.pattern
    mixer, feed_forward, kind = (cycle[layer % len(cycle)] for cycle in cycles)
    is_wide = kind == "global" and config.has_global_heads
    reuses = "reuse" in config.mixers
    plain = config.plain_matrices(layer)
    return _LayerParts(mixer, feed_forward, is_wide, kind if reuses else None, plain)


def _find_repetition(parts: Sequence[_LayerParts]) -> tuple[int, int]:
    """The period, and how often it is repeated, that covers most of the first parts."""
    best = 1, 1
    for period in range(1, len(parts) // 2 + 1):
        times = 1
        while parts[times * period : (times + 1) * period] == parts[:period]:
            times += 1
        if times > 1 and period * times > best[0] * best[1]:
            best = period, times
    return best
