"""QK-norm and rotary embedding by one kernel on one GPU; XLA runs several."""

import functools

import jax

from jaxmem import devices, remat
from jaxmem.models import norms, partitioning
from jaxmem.models.positions import Rope


def is_fused(x: jax.Array) -> bool:
    """Whether heads like x, [B, T, heads, head_dim], take the kernel.

    They do on one GPU that has the backend: XLA would gather all shards for a kernel.
    """
    on_one_gpu = devices.backend() == "gpu" and partitioning.current() is None
    if not (on_one_gpu and devices.has_triton()):
        return False
    from jaxmem.kernels import normed_rotary  # Pallas takes a while to import

    return normed_rotary.supports(x.shape[-1])


def normalize_and_rotate(norm: norms.RMSNorm, x: jax.Array, rope: Rope) -> jax.Array:
    """Normalise heads and rotate them, in float32, and round once.

        y = apply_rope(norm(x), *rope)

    Args:
        norm: of the last axis.
        x: [B, T, heads, head_dim] queries or keys.
        rope: as `apply_rope` takes it.

    Returns:
        An array like x.

    **Memory** of residuals: x in its own dtype, and 4 bytes per head and token, under
    the checkpoint name "norm_rms"; and the tables, which all layers share.
    """
    assert norm.scale is not None  # created with a scale
    return _apply(x, norm.scale[...], rope, norm.offset, norm.epsilon)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _apply(x, scale, rope, offset, epsilon):
    return _forward(x, scale, rope, offset, epsilon)[0]


def _forward(x, scale, rope, offset, epsilon):
    from jaxmem.kernels import normed_rotary

    tables = _tables(*rope)
    y, rms = normed_rotary.forward(_flat(x), scale, tables, offset, epsilon)
    rms = remat.name(rms.reshape(x.shape[:-1]), "norm_rms")
    return y.reshape(x.shape), (x, rms, scale, rope)


def _backward(offset, epsilon, residuals, dy):
    del epsilon  # known from the residuals
    from jaxmem.kernels import normed_rotary

    x, rms, scale, rope = residuals
    dx, dscale = normed_rotary.backward(
        _flat(x), _flat(rms), _flat(dy), scale, _tables(*rope), offset
    )
    return dx.reshape(x.shape), dscale.astype(scale.dtype), None


_apply.defvjp(_forward, _backward)


def _tables(cosines, sines, kind=None, growth=None):
    """One kind's, [B·T, head_dim / 2]."""
    del growth  # of queries, after this
    both = (t if kind is None else t[kind] for t in (cosines, sines))
    return tuple(t.reshape(-1, t.shape[-1]) for t in both)


def _flat(x):
    return x.reshape(-1, *x.shape[2:])
