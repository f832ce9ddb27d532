"""Gradients of hidden and W from sampled entries: weighted sums of rows.

    dH_i = Σ_j dz_ij W_j         over the entries of a token
    dW_j = Σ_i dz_ij h_i         over the entries of a column

Both are bound by bandwidth. A program computes part of one sum; programs of one part of
the depth run at the same time, so that the part of W or hidden that they read stays in
L2. A column with many tokens is first summed in pieces, in parallel. The order of every
sum is that of the pairs sorted by column, without atomics: results are deterministic.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.triton as plt
import jax.numpy as jnp
from jax import lax

from jaxmem.core.sampling import Derivative, Pairs
from jaxmem.kernels.typed import alike, result

# Pairs per piece, and number of pieces: 4 D bytes each during W's gradient.
_PIECE, _MAX_PIECES = 256, 2048
_TRANSPOSED_DEPTH = 256  # of W at a time, whose rows are transposed from [D, V]
_ONES = 16  # columns of ones whose sums are the bias's gradient


@dataclasses.dataclass(frozen=True)
class Launch:
    """How a sum of rows is computed.

    Attributes:
        depth: columns of a row per program, a power of two.
        unroll: rows that are loaded before they are added.
        warps: per program.
    """

    depth: int
    unroll: int
    warps: int

    def params(self) -> plt.CompilerParams:
        """Compiler parameters; without pipelining, as loads are unrolled."""
        return plt.CompilerParams(num_warps=self.warps, num_stages=1)

    def fitted(self, depth: int) -> "Launch":
        """The launch for rows that may be shorter."""
        short = min(self.depth, pl.next_power_of_2(depth))
        warps = max(min(self.warps, short // 32), 1)
        return dataclasses.replace(self, depth=short, warps=warps)


TO_HIDDEN = Launch(depth=512, unroll=8, warps=2)
TO_W = Launch(depth=4096, unroll=4, warps=8)


class Segments(NamedTuple):
    """The pairs of each sum."""

    first: jax.Array  # int32 [n]
    end: jax.Array  # int32 [n]
    rows: jax.Array  # int32 [n_pairs], indices; out of bounds for none
    values: jax.Array  # float32 [n_pairs]
    # int32 [n_pairs // piece], 1 where one segment has all pairs of a piece; None: no
    # segment is long.
    whole: jax.Array | None = None

    @property
    def piece(self) -> int:
        """Number of pairs of a piece."""
        return _piece(self.rows.shape[0])


def to_hidden(
    dz: Derivative, W: jax.Array, layout, dtype, launch: Launch = TO_HIDDEN
) -> jax.Array:
    """The product dz · W, [N, D].

    Args:
        dz: entries of the tokens.
        W: [V, D] or [D, V].
        layout: of W.
        dtype: of the result.
        launch: how it is computed.

    Returns:
        The product.
    """
    n_columns = W.shape[0 if layout == "vd" else 1]
    n_rows, n_slots = dz.columns.shape
    slots = jnp.arange(1, n_slots + 1, dtype=jnp.int32)
    count = jnp.max(jnp.where(dz.columns < n_columns, slots, 0), axis=1)
    first = jnp.arange(n_rows, dtype=jnp.int32) * n_slots
    segments = Segments(
        first, first + count, dz.columns.reshape(-1), dz.values.reshape(-1)
    )
    if layout == "vd":
        return sum_rows(launch, segments, W, dtype)

    def part(first, width):
        here = lax.dynamic_slice_in_dim(W, first, width, axis=0).T
        return sum_rows(launch, segments, here, dtype)

    zeros = alike(jnp.zeros((n_rows, W.shape[0]), dtype), dz.values, W)[0]
    return _by_depth(part, zeros, axis=1)


def to_weights(
    pairs: Pairs, hidden: jax.Array, like: jax.ShapeDtypeStruct, layout,
    launch: Launch = TO_W,
) -> jax.Array:  # fmt: skip
    """dzᵀ · hidden, with the shape and dtype of W; zero for columns without an entry.

    Args:
        pairs: of all tokens, sorted by column.
        hidden: [N, D].
        like: shape and dtype of W.
        layout: of W.
        launch: how it is computed.

    Returns:
        The product.
    """
    segments = of_columns(pairs, like.shape[0 if layout == "vd" else 1])
    if layout == "vd":
        return sum_rows(launch, segments, hidden, like.dtype)

    def part(first, width):
        here = lax.dynamic_slice_in_dim(hidden, first, width, axis=1)
        return sum_rows(launch, segments, here, like.dtype).T

    zeros = alike(jnp.zeros(like.shape, like.dtype), pairs.values, hidden)[0]
    return _by_depth(part, zeros, axis=0)


def to_bias(pairs: Pairs, n_rows: int, columns: int) -> jax.Array:
    """Σ_i dz_ij of each column, float32 [V]."""
    ones, segments = jnp.ones((n_rows, _ONES), jnp.bfloat16), of_columns(pairs, columns)
    return sum_rows(TO_W, segments, ones, jnp.float32)[:, 0]


def of_columns(pairs: Pairs, columns: int) -> Segments:
    """The pairs of each column."""
    ends = jnp.searchsorted(
        pairs.columns, jnp.arange(columns + 1, dtype=jnp.int32), method="scan_unrolled"
    ).astype(jnp.int32)
    piece = _piece(pairs.columns.shape[0])
    n_pieces = pairs.columns.shape[0] // piece
    pieces = pairs.columns[: n_pieces * piece].reshape(n_pieces, piece)
    whole = (pieces[:, 0] == pieces[:, -1]) & (pieces[:, 0] < columns)
    return Segments(
        ends[:-1], ends[1:], pairs.tokens, pairs.values, whole.astype(jnp.int32)
    )


def _piece(n_pairs):
    return max(_PIECE, -(-n_pairs // _MAX_PIECES))


def sum_rows(launch: Launch, segments: Segments, x: jax.Array, dtype) -> jax.Array:
    """Σ_k values_k x[rows_k] of each segment, [n, D], summed in float32.

    Args:
        launch: how it is computed.
        segments: of pairs.
        x: [rows, D].
        dtype: of the result.

    Returns:
        The sums.
    """
    launch = launch.fitted(x.shape[1])
    *operands, whole = (*segments[:4], x, segments.whole)
    if whole is not None and whole.shape[0]:
        operands.append(_pieces(launch, segments, x))
    operands = alike(*operands)
    n_segments, depth = segments.first.shape[0], x.shape[1]

    def kernel(first_ref, end_ref, rows_ref, values_ref, x_ref, *refs):
        *partial_refs, out_ref = refs
        at, columns = _place(launch)
        add = _Add(launch, columns, depth, rows_ref, values_ref, x_ref)
        a, b = plt.load(first_ref.at[at]), plt.load(end_ref.at[at])
        sums = jnp.zeros(launch.depth, jnp.float32)
        for partial_ref in partial_refs:
            n = segments.piece
            first = lax.div(a + n - 1, n)  # in this segment
            n_pieces = jnp.maximum(lax.div(b, n) - first, 0)
            sums = add(a, jnp.where(n_pieces > 0, first * n, b), sums)
            sums = add.pieces(first, n_pieces, partial_ref, sums)
            a = jnp.where(n_pieces > 0, (first + n_pieces) * n, b)
        sums = add(a, b, sums)
        inside = columns < depth
        plt.store(out_ref.at[at, columns], sums.astype(out_ref.dtype), mask=inside)

    return pl.pallas_call(
        kernel,
        grid=(n_segments, pl.cdiv(depth, launch.depth)),
        out_shape=result((n_segments, depth), dtype, *operands),
        compiler_params=launch.params(),
        name="sampled_sum_rows",
    )(*operands)


def _pieces(launch, segments, x):
    """Sums of whole pieces, float32 [pieces, D]; undefined for other pieces."""
    depth, n_pieces = x.shape[1], segments.whole.shape[0]
    operands = alike(segments.whole, segments.rows, segments.values, x)

    def kernel(whole_ref, rows_ref, values_ref, x_ref, out_ref):
        at, columns = _place(launch)

        @pl.when(plt.load(whole_ref.at[at]) > 0)
        def _sum():
            add = _Add(launch, columns, depth, rows_ref, values_ref, x_ref)
            sums = jnp.zeros(launch.depth, jnp.float32)
            sums = add(at * segments.piece, (at + 1) * segments.piece, sums)
            plt.store(out_ref.at[at, columns], sums, mask=columns < depth)

    return pl.pallas_call(
        kernel,
        grid=(n_pieces, pl.cdiv(depth, launch.depth)),
        out_shape=result((n_pieces, depth), jnp.float32, *operands),
        compiler_params=launch.params(),
        name="sampled_sum_pieces",
    )(*operands)


def _place(launch):
    """(segment, its columns) of a program; programs of one part of the depth first."""
    columns = jnp.arange(launch.depth, dtype=jnp.int32)
    return pl.program_id(0), pl.program_id(1) * launch.depth + columns


@dataclasses.dataclass(frozen=True)
class _Add:
    """Adds weighted rows, or sums of pieces, to a program's sums."""

    launch: Launch
    columns: jax.Array
    depth: int
    rows_ref: Any
    values_ref: Any
    x_ref: Any

    def __call__(self, first, end, sums):
        """`sums` plus the pairs from first to end."""

        def step(i, sums):
            at = first + i * self.launch.unroll
            loaded = [self._pair(at + j, end) for j in range(self.launch.unroll)]
            for value, row in loaded:
                sums = sums + value * row.astype(jnp.float32)
            return sums

        return lax.fori_loop(0, pl.cdiv(end - first, self.launch.unroll), step, sums)

    def _pair(self, at, end):
        live = at < end
        row = plt.load(self.rows_ref.at[at], mask=live, other=0)
        value = plt.load(self.values_ref.at[at], mask=live, other=0.0)
        live = live & (row < self.x_ref.shape[0])  # excludes empty slots
        return value, plt.load(
            self.x_ref.at[row, self.columns], mask=self.inside & live, other=0.0
        )

    @property
    def inside(self):
        return self.columns < self.depth

    def pieces(self, first, count, partial_ref, sums):
        """`sums` plus whole pieces."""

        def step(i, sums):
            at = partial_ref.at[first + i, self.columns]
            return sums + plt.load(at, mask=self.inside, other=0.0)

        return lax.fori_loop(0, count, step, sums)


def _by_depth(part, array, axis):
    """`array` with part(first, width) written along an axis, in steps of the depth."""
    depth = array.shape[axis]
    width = min(depth, _TRANSPOSED_DEPTH)

    def step(i, array):
        first = jnp.minimum(i * width, depth - width)
        here = part(first, width)
        return lax.dynamic_update_slice_in_dim(array, here, first, axis)

    return lax.fori_loop(0, -(-depth // width), step, array)
