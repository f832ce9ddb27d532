"""RMS normalisation, whose residuals are its input and one number per row."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from jaxmem import remat
from jaxmem.models import partitioning
from jaxmem.models.config import ModelConfig


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def rms_normalize(
    x: jax.Array,
    scale: jax.Array,
    offset: float,
    epsilon: float,
    dtype: DTypeLike,
) -> jax.Array:
    """Divide each row by its root mean square, and multiply it by a scale [D].

        y_i = r x_i (offset + scale_i),   r = 1 / sqrt(mean_j x_j² + epsilon)

    Everything is computed in float32, in which the offset keeps the precision of a
    16-bit scale near 0; the result has the type `dtype`. Residuals are x in its own
    type, and r, with the checkpoint name "norm_rms".

    Reference: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019,
    arXiv:1910.07467.
    """
    return _normalize_forward(x, scale, offset, epsilon, dtype)[0]


class _NormResiduals(NamedTuple):
    """Arrays that the backward pass of `rms_normalize` reads."""

    x: jax.Array  # [..., D]
    rms: jax.Array  # f32 [..., 1], r of the formula
    scale: jax.Array  # [D]


def _normalize_forward(x, scale, offset, epsilon, dtype):
    wide = x.astype(jnp.float32)
    rms = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    rms = remat.name(rms, "norm_rms")
    y = wide * rms * (offset + scale.astype(jnp.float32))
    return y.astype(dtype), _NormResiduals(x, rms, scale)


def _normalize_backward(offset, epsilon, dtype, residuals: _NormResiduals, dy):
    del epsilon, dtype  # known from the residuals
    x, rms, scale = residuals.x, residuals.rms, residuals.scale
    unit = x.astype(jnp.float32) * rms
    dy = dy.astype(jnp.float32)
    dunit = dy * (offset + scale.astype(jnp.float32))
    along = jnp.mean(dunit * unit, axis=-1, keepdims=True)
    dx = rms * (dunit - unit * along)
    dscale = jnp.sum(dy * unit, axis=tuple(range(x.ndim - 1)))
    return dx.astype(x.dtype), dscale.astype(scale.dtype)


rms_normalize.defvjp(_normalize_forward, _normalize_backward)


class RMSNorm(nnx.RMSNorm):
    """`nnx.RMSNorm` over the last axis, computed by `rms_normalize`."""

    offset = 0.0

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """Normalise [..., features] to the same shape; `mask` must be None."""
        assert mask is None
        if self.scale is None:
            scale = jnp.ones(x.shape[-1])
        else:
            scale = self.scale[...]
        return rms_normalize(x, scale, self.offset, self.epsilon, self.dtype)


class OffsetRMSNorm(RMSNorm):
    """An RMSNorm that multiplies by 1 + scale, as Gemma does."""

    offset = 1.0


class LayerNorm(RMSNorm):
    """An RMSNorm of x minus its mean, plus a bias if `use_bias`."""

    def __init__(self, num_features: int, *, use_bias: bool, **keywords: Any):
        super().__init__(num_features, **keywords)
        self.bias: nnx.Param | None = nnx.data(None)
        if use_bias:
            self.bias = nnx.Param(jnp.zeros(num_features, keywords["param_dtype"]))

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """Normalise [..., features] to the same shape; `mask` must be None."""
        wide = x.astype(jnp.float32)
        y = super().__call__(wide - jnp.mean(wide, axis=-1, keepdims=True), mask)
        return y if self.bias is None else y + self.bias[...].astype(y.dtype)


class OffsetLayerNorm(LayerNorm):
    """A LayerNorm that multiplies by 1 + scale, as Nemotron does."""

    offset = 1.0


def make_norm(config: ModelConfig, width: int, rngs: nnx.Rngs) -> RMSNorm:
    """The norm that all layers use, over the last axis."""
    kind: Any = OffsetRMSNorm if config.norm.offset else RMSNorm
    if config.norm.kind == "layer":
        kind = OffsetLayerNorm if config.norm.offset else LayerNorm
        kind = functools.partial(kind, use_bias=config.norm.bias)
    initializers = nnx.initializers
    return kind(
        width,
        epsilon=config.norm.eps,
        use_scale=config.norm.scale,
        scale_init=initializers.zeros if config.norm.offset else initializers.ones,
        dtype=jnp.dtype(config.dtype),
        param_dtype=jnp.dtype(config.param_dtype),
        rngs=rngs,
    )


def normed_products(
    norm: RMSNorm | None,
    readers: Sequence[nnx.Linear],
    x: jax.Array,
    more: jax.Array | None = None,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Add to the residual stream, normalise it, and apply modules to the result.

        s = x + more,   out_i = readers_i(norm(s))

    Returns s [B, T, D], and each module's result. Without a norm the modules read s
    itself. With `more`, s has the checkpoint name "block_mid". Residuals are s, and 4
    bytes per token with the name "norm_rms": the modules' input is computed again.
    """
    if more is not None:
        x = remat.name(partitioning.constrain_activations(x + more), "block_mid")

    def project(x: jax.Array):
        y = x if norm is None else norm(x)
        return tuple(read(y) for read in readers)

    return x, remat.recompute(project, save=["norm_rms"])(x)
