"""RMSNorm of the residual stream, and its gradients, by Pallas's Triton backend.

XLA fuses no reduction of rows with what reads its result: the backward pass of a norm
reads its arrays twice, and the sum of its results' gradients is written and read again
or is another read of each. Here each array is read or written once.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

_ROWS = 16  # of a program of the backward pass, at most
_WIDEST = 8192  # a row is in the registers of one program
_PIECES = 32  # of a row, at most, and none narrower than:
_NARROWEST = 128


def supports(width: int) -> bool:
    """Whether the kernels can run on rows of this width."""
    piece = width & -width
    return width <= _WIDEST and piece >= _NARROWEST and width // piece <= _PIECES


def forward(
    x: jax.Array, more: jax.Array | None, scale: jax.Array,
    offset: float, epsilon: float,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Add to the residual stream, and normalise it.

        s = x + more,   y = r s (offset + scale),   r = 1 / sqrt(mean s² + epsilon)

    Args:
        x: [N, D].
        more: like x, or None for 0.
        scale: [D].
        offset: added to the scale.
        epsilon: added to the mean square.

    Returns:
        s and y like x; s is rounded before it is normalised.
    """
    arrays = (x,) if more is None else (x, more)
    results = _call(
        functools.partial(_forward, len(arrays), offset, epsilon),
        1, arrays, scale, "residual_norm", [(x.shape, x.dtype)] * len(arrays),
    )  # fmt: skip
    return (x, *results) if more is None else results


def backward(
    x: jax.Array, slopes: tuple[jax.Array, ...], beside: jax.Array,
    scale: jax.Array, offset: float, epsilon: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """The gradients of `forward`, and its y once more.

        u = r s,   g = sum of slopes,   g' = g (offset + scale)
        ds = beside + r (g' - u mean(g' u)),   dscale = sum_rows g u

    Args:
        x: s, [N, D].
        slopes: gradients with respect to y, each like s; they are added up.
        beside: gradient with respect to s of all that reads it but the norm, like s.
        scale: [D].
        offset: as there.
        epsilon: as there.

    Returns:
        ds and y like s, and dscale, [D] float32.
    """
    n, width = x.shape
    rows, like = _rows(n), (x.shape, x.dtype)
    ds, y, parts = _call(
        functools.partial(_backward, len(slopes), offset, epsilon),
        rows, (x, beside, *slopes), scale, "residual_norm_backward",
        [like, like, ((n // rows, width), jnp.float32)],
    )  # fmt: skip
    return ds, y, jnp.sum(parts, axis=0)


def _rows(n):
    """The largest power of two that divides n, up to a limit."""
    return min(n & -n, _ROWS)


def _warps(width):
    # As measured on an H200. A warp alone waits for no other one.
    return 1 if width <= 1024 else 1 << (width // 512).bit_length() - 1


def _call(kernel, rows, arrays, scale, name, results) -> Any:
    n, width = arrays[0].shape

    def spec(shape):
        return pl.BlockSpec((shape[0] * rows // n, width), lambda i: (i, 0))

    return pl.pallas_call(
        kernel,
        grid=n // rows,
        in_specs=[
            *[spec(a.shape) for a in arrays],
            pl.BlockSpec((width,), lambda i: (0,)),
        ],
        out_specs=[spec(shape) for shape, _ in results],
        out_shape=[jax.ShapeDtypeStruct(*each) for each in results],
        compiler_params=plgpu.CompilerParams(num_warps=_warps(width)),
        name=name,
    )(*arrays, scale)


def _pieces(width):
    # Triton's tiles are powers of two.
    piece = width & -width
    return [pl.ds(start, piece) for start in range(0, width, piece)]


def _scales(scale_ref, offset):
    width = scale_ref.shape[0]
    return [offset + scale_ref[at].astype(jnp.float32) for at in _pieces(width)]


def _read(refs, row):
    return [[ref[row, at] for at in _pieces(ref.shape[1])] for ref in refs]


def _write(ref, row, pieces):
    for at, piece in zip(_pieces(ref.shape[1]), pieces, strict=True):
        ref[row, at] = piece.astype(ref.dtype)


def _added(arrays):
    wide = [[piece.astype(jnp.float32) for piece in pieces] for pieces in arrays]
    return [_total(each) for each in zip(*wide, strict=True)]


def _total(pieces):
    return functools.reduce(jnp.add, pieces)


def _rms(pieces, width, epsilon):
    return lax.rsqrt(_total([jnp.sum(p * p) for p in pieces]) / width + epsilon)


def _forward(terms, offset, epsilon, *refs: Any):
    *read, scale_ref = refs[: terms + 1]
    *stream_ref, y_ref = refs[terms + 1 :]
    pieces = _added(_read(read, 0))
    for ref in stream_ref:  # the sum, as whoever reads it will see it
        pieces = [p.astype(ref.dtype).astype(jnp.float32) for p in pieces]
        _write(ref, 0, pieces)
    rms, scales = _rms(pieces, y_ref.shape[1], epsilon), _scales(scale_ref, offset)
    _write(y_ref, 0, [p * rms * s for p, s in zip(pieces, scales, strict=True)])


def _backward(terms, offset, epsilon, *refs: Any):
    read = refs[: terms + 2]
    scale_ref, dx_ref, y_ref, sum_ref = refs[terms + 2 :]
    rows, width = dx_ref.shape
    scales = _scales(scale_ref, offset)

    def one(row, carried):
        (x, beside, *slopes), sums = carried
        # Here, as the loads of the next row need not wait for the sums of this one.
        ahead = _read(read, jnp.minimum(row + 1, rows - 1))
        x, beside, slopes = _added([x]), _added([beside]), _added(slopes)
        rms = _rms(x, width, epsilon)
        units = [piece * rms for piece in x]
        _write(y_ref, row, [u * s for u, s in zip(units, scales, strict=True)])
        more = [g * u for g, u in zip(slopes, units, strict=True)]
        along = [jnp.sum(m * s) for m, s in zip(more, scales, strict=True)]
        along = _total(along) / width
        parts = zip(beside, slopes, scales, units, strict=True)
        _write(dx_ref, row, [b + rms * (g * s - u * along) for b, g, s, u in parts])
        return ahead, [s + m for s, m in zip(sums, more, strict=True)]

    start = [jnp.zeros(s.shape, jnp.float32) for s in scales]
    _, sums = lax.fori_loop(0, rows, one, (_read(read, 0), start))
    _write(sum_ref, 0, sums)
