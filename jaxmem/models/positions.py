"""Where tokens are, and which others each kind of layer sees: rotary angles, masks.

A layer is "global", and sees its whole document so far, or "local", and sees the last
`window` tokens of it; local layers may have wavelengths of their own. A decoder's
blocks run in one loop, so what a kind sees is made once and looked up by the layer.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.models.config import KINDS, ModelConfig

Ids = jax.Array | np.ndarray  # integers, on the device or on the host

# Cosines and sines from `rope_tables`; or those of all kinds, and a layer's kind.
Rope = tuple[jax.Array, jax.Array] | tuple[jax.Array, jax.Array, jax.Array]


def layer_kinds(config: ModelConfig) -> np.ndarray | None:
    """[layers] number of each layer's kind in `KINDS`; None where all are of one."""
    if len(set(config.pattern)) == 1:
        return None
    times = -(-config.layers // len(config.pattern))
    kinds = (config.pattern * times)[: config.layers]
    return np.array([KINDS.index(kind) for kind in kinds], np.int32)


def by_kind(config: ModelConfig, make: Callable[[str], Any]) -> Callable[[Any], Any]:
    """Make something for each kind of layer that there is.

    Args:
      config: of the decoder.
      make: kind to a pytree of arrays, of the same shapes for every kind.

    Returns:
      A layer's entry of `layer_kinds`, which a loop may trace, to what its kind has.
    """
    if len(set(config.pattern)) == 1:
        only = make(config.pattern[0])
        return lambda _: only
    stacked = jax.tree.map(lambda *made: jnp.stack(made), *map(make, KINDS))
    return lambda kind: jax.tree.map(lambda made: made[kind], stacked)


def rope_frequencies(config: ModelConfig, kind: str = "global") -> jax.Array:
    """Rotary angles of one position's step, as a layer of that kind has them.

        f_i = theta^(-2i / head_dim),   then, where the config scales,
        linear:  f_i / factor
        llama3:  f_i (1 - s_i) / factor + f_i s_i,
                 s_i = clip((original f_i / 2π - low) / (high - low), 0, 1)

    Args:
      config: of the decoder.
      kind: "local" layers with a `local_rope_theta` are not scaled.

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
      cosines: [B, T, 1, head_dim / 2] from `rope_tables`, or those of several kinds of
        layers on a leading axis.
      sines: likewise.
      kind: which of several.

    Returns:
      An array like `x`.

    **Memory** for the backward pass, which rotates back: the tables, which all layers
    share. They have no gradients.
    """
    return _rotate(x, 1, cosines, sines, kind)


def _rotate(x, direction, cosines, sines, kind):
    if kind is not None:
        cosines, sines = cosines[kind], sines[kind]
    # Halves of a row on an axis of their own, which is reversed: XLA fuses that with
    # what comes before and after, while it would store halves that are split apart.
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
    """Which keys the queries of a layer see, besides that none is after the query.

    A layer builds its mask [B, 1, T, T] where it is used, from this.
    """

    segment_ids: Ids | None = None  # [B, T] document of each token; None: one a row
    window: Ids | int | None = None  # tokens that a query sees, its own too; None: all

    @property
    def mask(self) -> jax.Array | None:
        """`document_mask`, or None where a query sees all before it."""
        if self.segment_ids is None:
            return None
        return document_mask(self.segment_ids, self.window)


def document_mask(segment_ids: Ids, window: Ids | int | None = None) -> jax.Array:
    """[B, 1, T, T], true where query and key are of one document, and near enough.

    Causality is left to attention.  Padding (segment 0) sees padding, so that no row of
    the softmax is empty.

    Args:
      segment_ids: [B, T] document of each token.
      window: tokens that a query sees, itself among them; None: all.
    """
    mask = segment_ids[:, :, None] == segment_ids[:, None, :]
    if window is not None:
        place = jnp.arange(segment_ids.shape[1])
        mask = mask & (place[:, None] - place < window)
    return mask[:, None]
