"""Norm and rotation of heads in one pass over them, by Pallas's Triton backend.

XLA needs three kernels for norm and rotation, and four for their gradients, as it fuses
no reduction of rows with what reads its result, and it writes the gradient between the
two. Here each array is read or written once.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

# As measured on an H200. A warp alone waits for no other one.
_WARPS = 1
_TOKENS = 8  # of a program, at most
_GROUP = 2048  # numbers of a token in a program, at most
_TILE = 1024  # numbers of several tokens at a time, at most


def supports(width: int) -> bool:
    """Whether the kernels can run on heads of this width."""
    return 32 <= width <= 256 and width & (width - 1) == 0  # as Triton's tiles are


def forward(
    x: jax.Array, scale: jax.Array, tables: tuple[jax.Array, jax.Array],
    offset: float, epsilon: float,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Normalise heads, and rotate them.

        y = R(r x (offset + scale)),   r = 1 / sqrt(mean x² + epsilon)

    Args:
        x: [N, heads, head_dim].
        scale: [head_dim].
        tables: cosines and sines of each token's angles, [N, head_dim / 2] float32.
        offset: added to the scale.
        epsilon: added to the mean square.

    Returns:
        y like x, and r, [N, heads] float32.
    """
    sizes = _Sizes(x)
    return _call(
        functools.partial(_forward, sizes.tile, offset, epsilon),
        sizes, (x,), (scale, *tables), "normed_rotary",
        [(sizes.block, x.dtype), (sizes.block[:2], jnp.float32)],
    )  # fmt: skip


def backward(
    x: jax.Array, rms: jax.Array, dy: jax.Array, scale: jax.Array,
    tables: tuple[jax.Array, jax.Array], offset: float,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """The gradients of `forward`.

        u = r x,   g = R⁻¹(dy),   dx = r (g' - u mean(g' u)),   g' = g (offset + scale)
        dscale = sum_tokens sum_heads g u

    Args:
        x: as there.
        rms: r.
        dy: gradient with respect to y.
        scale: as there.
        tables: as there.
        offset: as there.

    Returns:
        dx like x, and dscale, [head_dim] float32.
    """
    sizes = _Sizes(x)
    dx, parts = _call(
        functools.partial(_backward, sizes.tile, offset),
        sizes, (x, dy, rms), (scale, *tables), "normed_rotary_backward",
        [(sizes.block, x.dtype), ((1, 1, x.shape[-1]), jnp.float32)],
    )  # fmt: skip
    return dx, jnp.sum(parts, axis=(0, 1))


class _Sizes:
    """How [N, heads, head_dim] is cut: blocks of programs, tiles of a loop."""

    def __init__(self, x):
        n, heads, width = x.shape
        group = _power(heads, _GROUP // width)
        tokens = _power(n, _TOKENS)
        self.grid = n // tokens, heads // group
        self.block = tokens, group, width
        self.tile = min(tokens, max(1, _TILE // (group * width)))


def _power(n, limit):
    """The largest power of two that divides n, up to a limit."""
    return min(n & -n, limit)


def _call(kernel, sizes, arrays, shared, name, results) -> Any:
    tokens, _, width = sizes.block
    n, heads = sizes.grid
    scale, *tables = shared

    def spec(shape):
        return pl.BlockSpec(shape, lambda i, j: (i, j, 0)[: len(shape)])

    def whole(shape):
        return tuple(k * m for k, m in zip(shape, (n, heads, 1), strict=False))

    half = pl.BlockSpec((tokens, width // 2), lambda i, j: (i, 0))
    return pl.pallas_call(
        kernel,
        grid=sizes.grid,
        in_specs=[
            *[spec(sizes.block[: a.ndim]) for a in arrays],
            pl.BlockSpec((width,), lambda i, j: (0,)), half, half,
        ],
        out_specs=[spec(shape) for shape, _ in results],
        out_shape=[jax.ShapeDtypeStruct(whole(s), dtype) for s, dtype in results],
        compiler_params=plgpu.CompilerParams(num_warps=_WARPS),
        name=name,
    )(*arrays, scale, *tables)  # fmt: skip


def _halves(width):
    # Halves of a head are tiles of their own: Triton cannot rotate within a tile.
    half = width // 2
    return pl.ds(0, half), pl.ds(half, half)


def _scales(scale_ref, offset):
    ats = _halves(scale_ref.shape[0])
    return [offset + scale_ref[at].astype(jnp.float32) for at in ats]


def _angles(cos_ref, sin_ref, tokens):
    return cos_ref[tokens, :][:, None, :], sin_ref[tokens, :][:, None, :]


def _read(ref, tokens):
    ats = _halves(ref.shape[2])
    return [ref[tokens, :, at].astype(jnp.float32) for at in ats]


def _write(ref, tokens, parts):
    for at, part in zip(_halves(ref.shape[2]), parts, strict=True):
        ref[tokens, :, at] = part.astype(ref.dtype)


def _forward(tile, offset, epsilon, *refs: Any):
    x_ref, scale_ref, cos_ref, sin_ref, y_ref, rms_ref = refs
    total, _, width = x_ref.shape
    scales = _scales(scale_ref, offset)

    @pl.loop(0, total // tile)
    def _(i):
        tokens = pl.ds(i * tile, tile)
        low, high = _read(x_ref, tokens)
        square = jnp.sum(low * low, -1) + jnp.sum(high * high, -1)
        rms = lax.rsqrt(square / width + epsilon)
        rms_ref[tokens, :] = rms
        low, high = (
            x * rms[..., None] * s for x, s in zip((low, high), scales, strict=True)
        )
        cos, sin = _angles(cos_ref, sin_ref, tokens)
        _write(y_ref, tokens, (low * cos - high * sin, high * cos + low * sin))


def _backward(tile, offset, *refs: Any):
    x_ref, dy_ref, rms_ref, scale_ref, cos_ref, sin_ref, dx_ref, sum_ref = refs
    total, _, width = x_ref.shape
    scales = _scales(scale_ref, offset)

    def add(i, sums):
        tokens = pl.ds(i * tile, tile)
        rms = rms_ref[tokens, :][..., None]
        units = [x * rms for x in _read(x_ref, tokens)]
        low, high = _read(dy_ref, tokens)
        cos, sin = _angles(cos_ref, sin_ref, tokens)
        slopes = low * cos + high * sin, high * cos - low * sin
        scaled = [g * s for g, s in zip(slopes, scales, strict=True)]
        low, high = (jnp.sum(g * u, -1) for g, u in zip(scaled, units, strict=True))
        along = (low + high)[..., None] / width
        _write(
            dx_ref, tokens,
            [rms * (g - u * along) for g, u in zip(scaled, units, strict=True)],
        )  # fmt: skip
        more = (g * u for g, u in zip(slopes, units, strict=True))
        return tuple(s + jnp.sum(m, (0, 1)) for s, m in zip(sums, more, strict=True))

    start = (jnp.zeros(width // 2, jnp.float32),) * 2
    sums = lax.fori_loop(0, total // tile, add, start)
    for at, part in zip(_halves(width), sums, strict=True):
        sum_ref[0, 0, at] = part
