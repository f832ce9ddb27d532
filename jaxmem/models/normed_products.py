"""A norm of the residual stream, and the products that read it."""

import functools
from collections.abc import Sequence

import jax
from flax import nnx

from jaxmem import devices, remat
from jaxmem.models import norms, partitioning

_FEWEST = 1024  # rows; with fewer, launches take longer than reads


def is_fused(x: jax.Array) -> bool:
    """Whether a residual stream like x, [B, T, D], takes the kernels of the norm.

    It does on one GPU that has the backend, as in `normed_rotary`, with many rows that
    blocks of 16 divide.
    """
    on_one_gpu = devices.backend() == "gpu" and partitioning.current() is None
    if not (on_one_gpu and devices.has_triton()):
        return False
    from jaxmem.kernels import residual_norm  # Pallas takes a while to import

    rows = x.size // x.shape[-1]
    return rows >= _FEWEST and rows % 16 == 0 and residual_norm.supports(x.shape[-1])


def apply(
    norm: norms.RMSNorm | None,
    readers: Sequence[nnx.Linear],
    x: jax.Array,
    more: jax.Array | None = None,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Add to the residual stream, normalise it, and apply modules to the result.

        s = x + more,   out_i = readers_i(norm(s))

    Args:
        norm: of the last axis; None: the modules read s itself.
        readers: modules that are affine in what they get, such as `nnx.Linear`.
        x: [B, T, D].
        more: like x, or None for 0; with it, s has the checkpoint name "block_mid"
            wherever a policy decides.

    Returns:
        s like x, and each module's result.

    **Memory** of residuals: s in its own dtype; without the kernels, 4 bytes per token,
    too, under the checkpoint name "norm_rms". The modules' input is computed again.
    """
    fused = norm is not None and norm.has_kernel and norm.scale is not None
    fused = fused and is_fused(x)
    if more is not None and not (fused and remat.is_whole()):
        x, more = (
            remat.name(partitioning.constrain_activations(x + more), "block_mid"),
            None,
        )
    if not fused:

        def project(x: jax.Array):
            y = x if norm is None else norm(x)
            return tuple(read(y) for read in readers)

        return x, remat.recompute(project, save=["norm_rms"])(x)
    assert norm is not None and norm.scale is not None
    split = [nnx.split(module) for module in readers]
    definitions = tuple(definition for definition, _ in split)
    weights = tuple(state for _, state in split)
    options = norm.offset, norm.epsilon, definitions
    return _apply(options, x, more, norm.scale[...], weights)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _apply(options, x, more, scale, weights):
    return _forward(options, x, more, scale, weights)[0]


def _forward(options, x, more, scale, weights):
    from jaxmem.kernels import residual_norm

    *numbers, definitions = options
    flat = None if more is None else _flat(more)
    s, y = residual_norm.forward(_flat(x), flat, scale, *numbers)
    s, y = x if more is None else s.reshape(x.shape), y.reshape(x.shape)
    outputs = tuple(
        nnx.merge(definition, state)(y)
        for definition, state in zip(definitions, weights, strict=True)
    )
    return (s, outputs), (s, scale, weights, more is None)


def _backward(options, residuals, gradients):
    from jaxmem.kernels import residual_norm

    *numbers, definitions = options
    s, scale, weights, is_alone = residuals
    beside, slopes = gradients
    readers = tuple(zip(definitions, weights, slopes, strict=True))

    def by_input(definition, state, slope):
        # Of an affine module, it is the same at any input, and y is not known yet.
        _, pull = jax.vjp(nnx.merge(definition, state), s)
        return _flat(pull(slope)[0])

    def by_weights(definition, state, slope):
        _, pull = jax.vjp(lambda state: nnx.merge(definition, state)(y), state)
        return pull(slope)[0]

    ds, y, dscale = residual_norm.backward(
        _flat(s), tuple(by_input(*each) for each in readers), _flat(beside),
        scale, *numbers,
    )  # fmt: skip
    ds, y = ds.reshape(s.shape), y.reshape(s.shape)
    dweights = tuple(by_weights(*each) for each in readers)
    return ds, None if is_alone else ds, dscale.astype(scale.dtype), dweights


_apply.defvjp(_forward, _backward)


def _flat(x):
    return x.reshape(-1, x.shape[-1])
