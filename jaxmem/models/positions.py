"""Positions and attention masks per kind of layer: rotary angles, documents, windows.

A "global" layer attends to its document up to the query; a "local" layer attends to the
last `window` tokens of that, and may have its own rotary wavelengths. All blocks of a
decoder run in one loop, so the tables of each kind are computed once, and each layer
indexes them by its kind.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.models.config import KINDS, ModelConfig

Ids = jax.Array | np.ndarray  # integers, on the device or on the host

# Cosines and sines from `rope_tables`; or those of all kinds, and the layer's kind.
Rope = tuple[jax.Array, jax.Array] | tuple[jax.Array, jax.Array, jax.Array]


def layer_kinds(config: ModelConfig) -> np.ndarray | None:
    """[layers] index of each layer's kind in `KINDS`; None if all have one kind."""
    if len(set(config.pattern)) == 1:
        return None
    times = -(-config.layers // len(config.pattern))
    kinds = (config.pattern * times)[: config.layers]
    return np.array([KINDS.index(kind) for kind in kinds], np.int32)


def by_kind(config: ModelConfig, make: Callable[[str], Any]) -> Callable[[Any], Any]:
    """Compute something for each kind of layer, and select it by a layer's kind.

    Args:
        config: of the decoder.
        make: maps a kind to a pytree of arrays, with the same shapes for every kind.

    Returns:
        A function from a layer's entry of `layer_kinds`, which may be traced, to the
        pytree of its kind.
    """
    if len(set(config.pattern)) == 1:
        only = make(config.pattern[0])
        return lambda _: only
    stacked = jax.tree.map(lambda *tables: jnp.stack(tables), *map(make, KINDS))
    return lambda kind: jax.tree.map(lambda tables: tables[kind], stacked)


def rope_frequencies(config: ModelConfig, kind: str = "global") -> jax.Array:
    """Rotary angle per position of each pair, for one kind of layer.

        f_i = theta^(-2i / head_dim),   then, if the config scales,
        linear:  f_i / factor
        llama3:  f_i (1 - s_i) / factor + f_i s_i,
                 s_i = clip((original f_i / 2π - low) / (high - low), 0, 1)

    Args:
        config: of the decoder.
        kind: "global" or "local"; "local" layers with a `local_rope_theta` are not
            scaled.

    Returns:
        f32 [head_dim / 2].

    Reference: Su et al., "RoFormer", 2021, arXiv:2104.09864; linear: Chen et al.,
    2023, arXiv:2306.15595; llama3: the Llama team, 2024, arXiv:2407.21783.
    """
    theta, scaling = config.rope_theta, config.rope_scaling
    if kind == "local" and config.local_rope_theta is not None:
        theta, scaling = config.local_rope_theta, None
    width = config.head_dim
    exponents = jnp.arange(0, width, 2, dtype=jnp.float32) / width
    frequencies = theta**-exponents
    if scaling is None:
        return frequencies
    if scaling == "linear":
        return frequencies / config.rope_factor
    low, high = config.rope_low_factor, config.rope_high_factor
    turns = config.rope_original * frequencies / (2 * jnp.pi)
    kept = jnp.clip((turns - low) / (high - low), 0, 1)
    return frequencies * ((1 - kept) / config.rope_factor + kept)


def rope_tables(positions: Ids, frequencies: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of the rotary angles, position x frequency.

    Args:
        positions: [B, T] position of each token in its document.
        frequencies: [head_dim / 2] from `rope_frequencies`.

    Returns:
        Two f32 arrays [B, T, 1, head_dim / 2], for `apply_rope`.
    """
    angles = positions.astype(jnp.float32)[..., None, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


@jax.custom_vjp
def apply_rope(
    x: jax.Array, cosines: jax.Array, sines: jax.Array, kind: jax.Array | None = None
) -> jax.Array:
    """Rotate each pair (x_i, x_{i + head_dim/2}) by its angle, in f32.

    Args:
        x: [B, T, heads, head_dim] queries or keys.
        cosines: [B, T, 1, head_dim / 2] from `rope_tables`, or those of several kinds
            of layers on a leading axis.
        sines: like `cosines`.
        kind: index on that leading axis; None if there is none.

    Returns:
        An array like `x`.

    **Memory** of residuals: only the tables, which all layers share, because the
    backward pass applies the inverse rotation. The tables have no gradients.
    """
    return _rotate(x, 1, cosines, sines, kind)


def _rotate(x, direction, cosines, sines, kind):
    if kind is not None:
        cosines, sines = cosines[kind], sines[kind]
    # Reverse an axis of size 2 instead of splitting the row: XLA fuses the reversal
    # with its neighbours, but would store halves that are split.
    halves = x.astype(jnp.float32).reshape(*x.shape[:-1], 2, -1)
    signed = direction * jnp.stack([-sines, sines], axis=-2)
    rotated = halves * cosines[..., None, :] + jnp.flip(halves, -2) * signed
    return rotated.reshape(x.shape).astype(x.dtype)


def _rope_forward(x, *tables):
    return _rotate(x, 1, *tables), tables


def _rope_backward(tables, gradient):
    return _rotate(gradient, -1, *tables), None, None, None


apply_rope.defvjp(_rope_forward, _rope_backward)


class Sight(NamedTuple):
    """The keys that a layer's queries see, in addition to causality.

    A layer builds its mask [B, 1, T, T] from this only where it needs it.
    """

    segment_ids: Ids | None = None  # [B, T] document per token; None: one per row
    window: Ids | int | None = None  # tokens a query sees, including its own; None: all

    @property
    def mask(self) -> jax.Array | None:
        """The `document_mask`, or None if a query sees all tokens before it."""
        if self.segment_ids is None:
            return None
        return document_mask(self.segment_ids, self.window)


def document_mask(segment_ids: Ids, window: Ids | int | None = None) -> jax.Array:
    """[B, 1, T, T], true where query and key share a document and the window.

    Causality is not included: attention applies it. Padding (segment 0) sees padding,
    so that no row of the softmax is empty.

    Args:
        segment_ids: [B, T] document of each token.
        window: tokens that a query sees, including itself; None: all.

    Returns:
        The mask.
    """
    mask = segment_ids[:, :, None] == segment_ids[:, None, :]
    if window is not None:
        place = jnp.arange(segment_ids.shape[1])
        mask = mask & (place[:, None] - place < window)
    return mask[:, None]


def window(config: ModelConfig, kind: str) -> int | None:
    """Tokens that a kind of layer attends to; None: all."""
    return config.window if kind == "local" else None


def documents(
    config: ModelConfig, tokens: Ids, segment_ids: Ids | None
) -> Callable[[Any], Sight]:
    """A function from a layer's entry of `layer_kinds` to its `Sight`.

    Args:
        config: of the decoder.
        tokens: [B, T].
        segment_ids: [B, T] document of each token; None: a row is one document.

    Returns:
        The function.
    """
    if "local" not in config.pattern:
        return lambda kind: Sight(segment_ids)
    if segment_ids is None:
        segment_ids = jnp.zeros_like(tokens)
    # Global layers have a window too: in one loop, layers may differ by data only.
    widest = tokens.shape[1]
    widths = by_kind(config, lambda kind: jnp.asarray(window(config, kind) or widest))
    return lambda kind: Sight(segment_ids, widths(kind))


def sights(
    config: ModelConfig, positions: Ids, visible: Callable[[Any], Any]
) -> Callable[[Any], tuple[Any, Rope]]:
    """A function from an entry of `layer_kinds` to what is seen and rotary tables.

    Args:
        config: of the decoder.
        positions: [B, T] of the tokens in their documents.
        visible: from an entry to what a layer of the kind sees.

    Returns:
        The function.
    """

    def tables(kind: str) -> tuple[jax.Array, jax.Array]:
        return rope_tables(positions, rope_frequencies(config, kind))

    kinds = dict.fromkeys(config.pattern)
    if len(kinds) == 1:
        only = tables(*kinds)
        return lambda kind: (visible(kind), only)
    # Index the tables where they are used: the loop would store each selection.
    stacked = jax.tree.map(lambda *each: jnp.stack(each), *map(tables, KINDS))
    return lambda kind: (visible(kind), (*stacked, kind))
