"""Gradients of hidden and W from sampled entries: weighted sums of rows.

    dH_i = Σ_j dz_ij W_j         over the entries of a token
    dW_j = Σ_i dz_ij h_i         over the entries of a column

Both are bound by bandwidth. A program computes part of the depth; programs of one part
run at the same time, so that what they read stays in L2. An index has to arrive before
its row can be loaded, so the next indices are loaded while rows arrive, and a program
goes through several columns without a break. A column with many tokens is first summed
in pieces, in parallel. The order of every sum is that of the pairs sorted by column,
without atomics: results are the same for every `SampledLaunch`.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxmem.head.kernels import tuned, typed
from jaxmem.head.kernels.tiles import SampledLaunch
from jaxmem.head.maths.column_sampling import SortedEntries, SparseDerivative

_PIECE = 64  # pairs of a piece, at least; a power of two
# Columns per piece, at least: pieces take 4 D bytes each during W's gradient, an eighth
# of a gradient in 16 bits.
_COLUMNS = 16
_TRANSPOSED_DEPTH = 256  # of W at a time, whose rows are transposed from [D, V]
_THREADS = 128
# Time of a column by how many a thread loads at once, as measured on an H100, D=4096.
_COSTS = {8: 1.0, 4: 1.15, 2: 1.7, 1: 4.0}
# No program reads what it writes.
_PARAMS = plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True)


class Segments(NamedTuple):
    """The pairs of each sum."""

    first: jax.Array  # int32 [n]
    end: jax.Array  # int32 [n]
    rows: jax.Array  # int32 [n_pairs], indices; out of bounds for none
    values: jax.Array  # float32 [n_pairs]


class Pieces(NamedTuple):
    """Sums of 2^bits neighbouring pairs of one column."""

    whole: jax.Array  # int32 [n_pieces], 1 where one column has all pairs of a piece
    sums: jax.Array  # float32 [n_pieces, D]; undefined if it has not
    bits: jax.Array  # int32 [1]


def to_hidden(
    launch: SampledLaunch, dz: SparseDerivative, W: jax.Array, layout, dtype
) -> jax.Array:
    """The product dz · W, [N, D]."""
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

    zeros = typed.alike(jnp.zeros((n_rows, W.shape[0]), dtype), dz.values, W)[0]
    return _by_depth(part, zeros, axis=1)


class ColumnLaunches(NamedTuple):
    """Launches of W's gradient."""

    columns: SampledLaunch
    pieces: SampledLaunch  # of long columns, before


def to_weights(
    launches: ColumnLaunches, pairs: SortedEntries, hidden: jax.Array,
    like: jax.ShapeDtypeStruct, layout,
) -> jax.Array:  # fmt: skip
    """dzᵀ · hidden, of W's shape and dtype; zero for columns without an entry."""
    n_columns = like.shape[0 if layout == "vd" else 1]
    if layout == "vd":
        return sum_columns(launches, pairs, n_columns, hidden, like.dtype)

    def part(first, width):
        here = lax.dynamic_slice_in_dim(hidden, first, width, axis=1)
        return sum_columns(launches, pairs, n_columns, here, like.dtype).T

    zeros = typed.alike(jnp.zeros(like.shape, like.dtype), pairs.values, hidden)[0]
    return _by_depth(part, zeros, axis=0)


def to_bias(pairs: SortedEntries, n_rows: int, columns: int) -> jax.Array:
    """Σ_i dz_ij of each column, float32 [V]."""
    ones = jnp.ones((n_rows, _THREADS), jnp.bfloat16)
    launches = ColumnLaunches(
        tuned.LAUNCHES["sampled_to_W"], tuned.LAUNCHES["sampled_pieces"]
    )
    return sum_columns(launches, pairs, columns, ones, jnp.float32)[:, 0]


def sum_rows(
    launch: SampledLaunch, segments: Segments, x: jax.Array, dtype, zeros: bool = True
) -> jax.Array:
    """Σ_k values_k x[rows_k] of each segment, [n, D], summed in float32.

    Without `zeros`, sums of empty segments are undefined.
    """
    whole = _whole(x)
    part, n_segments = _Part(whole, launch.at_once), len(segments.first)

    def sampled_sum_rows(first_ref, end_ref, rows_ref, values_ref, x_ref, out_ref):
        at = lax.axis_index("sum")
        first, end = first_ref[at], end_ref[at]

        @pl.when(zeros | (end > first))
        def _some():
            sums = _Add(launch, part, rows_ref, values_ref, x_ref)(first, end)
            part.store(out_ref, at, sums)

    out = jax.ShapeDtypeStruct((n_segments, part.depth), dtype)
    grid, operands = {"part": part.count, "sum": n_segments}, (*segments, whole)
    found = typed.launch(sampled_sum_rows, out, grid, _PARAMS, operands)
    return found[:, : x.shape[1]]


def sum_columns(
    launches: ColumnLaunches, pairs: SortedEntries, n_columns: int, x: jax.Array, dtype
) -> jax.Array:
    """Σ_k values_k x[tokens_k] over the pairs of each column, summed in float32.

    Pairs past the last column are ignored.
    """
    whole, launch = _whole(x), launches.columns
    n_programs, part = pl.cdiv(n_columns, launch.sums), _Part(whole, launch.at_once)
    begin = jnp.arange(n_programs + 1, dtype=jnp.int32) * launch.sums
    ends = jnp.searchsorted(
        pairs.columns, jnp.minimum(begin, n_columns), method="scan_unrolled"
    ).astype(jnp.int32)
    pieces = sum_pieces(launches.pieces, pairs, ends[-1], n_columns, whole)
    operands = ends, *pairs, whole, *pieces

    def sampled_sum_columns(ends_ref, *refs):
        *refs, bits_ref, out_ref = refs
        program = lax.axis_index("sum")
        ends = ends_ref[program], ends_ref[program + 1]
        stream = _Stream(launch, part, ends, bits_ref[0], *refs)

        def store(at, sums):
            part.store(out_ref, at, sums)
            return part.zeros()

        def move(at, to, sums):
            """Stores sums of columns that are complete, and zeros of empty ones."""
            return lax.fori_loop(at, to, store, sums)

        first = program * launch.sums
        at, sums = stream.add(first, move)
        move(at, jnp.minimum(first + launch.sums, n_columns), sums)

    out = jax.ShapeDtypeStruct((n_columns, part.depth), dtype)
    grid = {"part": part.count, "sum": n_programs}
    found = typed.launch(sampled_sum_columns, out, grid, _PARAMS, operands)
    return found[:, : x.shape[1]]


def sum_pieces(
    launch: SampledLaunch, pairs: SortedEntries, n_live, n_columns: int, x: jax.Array
) -> Pieces:
    """Sums of the pieces of long columns, as short as there is memory for.

    Most slots may be empty: n_live pairs come first.
    """
    n_pairs = pairs.columns.shape[0]
    n_pieces = min(pl.cdiv(n_pairs, _PIECE), pl.cdiv(n_columns, _COLUMNS))
    at_least = lax.div(n_live + n_pieces - 1, n_pieces)
    bits = 32 - lax.clz(jnp.maximum(at_least, _PIECE) - 1)
    size = lax.shift_left(1, bits)
    first = jnp.arange(n_pieces, dtype=jnp.int32) * size
    last = pairs.columns.at[first + size - 1].get(mode="fill", fill_value=n_columns)
    begins = pairs.columns.at[first].get(mode="fill", fill_value=n_columns)
    whole = (begins == last) & (last < n_columns)
    segments = Segments(
        first, jnp.where(whole, first + size, first), pairs.tokens, pairs.values
    )
    sums = sum_rows(launch, segments, x, jnp.float32, zeros=False)
    return Pieces(whole.astype(jnp.int32), sums, bits[None])


def _whole(x):
    """x, or where a program's part has more columns, with zeros to fill it."""
    return jnp.pad(x, ((0, 0), (0, max(_THREADS - x.shape[1], 0))))


class _Part:
    """The part of the depth that a program computes.

    Of narrow rows it is all, in pieces of falling sizes. Else parts have so many
    columns for each thread, or fewer where that costs less. The last part or piece is
    moved to where it ends with the depth: some columns may be computed twice.
    """

    def __init__(self, x: jax.Array, at_once: int):
        self.depth = depth = x.shape[1]
        fits = [
            n * _THREADS for n in _COSTS
            if n <= at_once and n * _THREADS <= depth and depth % n == 0
        ]  # fmt: skip

        def cost(columns):
            return pl.cdiv(depth, columns) * columns * _COSTS[columns // _THREADS]

        self.pieces, at = [], 0
        self.size = depth if depth < at_once * _THREADS else min(fits, key=cost)
        self.count = pl.cdiv(depth, self.size)
        while at < self.size:
            size = max((n for n in fits if n <= self.size - at), default=_THREADS)
            self.pieces.append((min(at, self.size - size), size))
            at += size

    def _at(self, row):
        """Where a row's pieces are, and their layouts."""
        part = jnp.minimum(lax.axis_index("part") * self.size, self.depth - self.size)
        for first, size in self.pieces:
            layout = plgpu.Layout.WG_STRIDED((size,), size // _THREADS)
            yield (row, pl.ds(part + first, size)), layout

    def zeros(self):
        return tuple(
            plgpu.layout_cast(jnp.zeros(at.size, jnp.float32), layout)
            for (_, at), layout in self._at(0)
        )

    def load(self, ref, row):
        return tuple(
            plgpu.load(ref.at[at], layout=layout, optimized=False)
            for at, layout in self._at(row)
        )

    def load_live(self, ref, row, live):
        """A row in float32, 0 where it is not live."""
        return tuple(
            jnp.where(lax.broadcast(live, x.shape), x, jnp.zeros_like(x)).astype(
                jnp.float32
            )
            for x in self.load(ref, jnp.where(live, row, 0))
        )

    def store(self, ref, row, sums):
        for (at, _), x in zip(self._at(row), sums, strict=True):
            ref[at] = x.astype(ref.dtype)


def _add(sums, row, value=1.0):
    return tuple(a + value * x for a, x in zip(sums, row, strict=True))


@dataclasses.dataclass(frozen=True)
class _Add:
    """Adds weighted rows."""

    launch: SampledLaunch
    part: _Part
    rows_ref: Any
    values_ref: Any
    x_ref: Any

    def __call__(self, first, end):
        """The sum of the pairs from first to end."""

        def step(i, carry):
            sums, pairs = carry
            loaded = [
                (value, self.part.load_live(self.x_ref, row, live))
                for row, value, live in pairs
            ]
            following = self._pairs(first + (i + 1) * self.launch.unroll, end)
            for value, row in loaded:
                sums = _add(sums, row, value)
            return sums, following

        n_steps = lax.div(end - first + self.launch.unroll - 1, self.launch.unroll)
        carry = self.part.zeros(), self._pairs(first, end)
        return lax.fori_loop(0, n_steps, step, carry)[0]

    def _pairs(self, first, end):
        """(row, value, whether it counts) of the next pairs; none in empty slots."""
        last, pairs = self.rows_ref.shape[0] - 1, []
        for at in [first + j for j in range(self.launch.unroll)]:
            here = jnp.minimum(at, last)
            row, value = self.rows_ref[here], self.values_ref[here]
            pairs.append((row, value, (at < end) & (row < self.x_ref.shape[0])))
        return pairs


@dataclasses.dataclass(frozen=True)
class _Stream:
    """Adds the pairs of neighbouring columns, which follow each other."""

    launch: SampledLaunch
    part: _Part
    ends: tuple[jax.Array, jax.Array]  # of the program's pairs
    bits: jax.Array  # of `Pieces`
    columns_ref: Any  # of W
    tokens_ref: Any
    values_ref: Any
    x_ref: Any
    whole_ref: Any
    pieces_ref: Any

    def add(self, first, move):
        """(last column with a pair, or first; its sum).

        Args:
            first: column.
            move: (at, to, sums of column at) to sums of column `to`.
        """

        def add_piece(at, column, sums, pairs):
            to = jnp.maximum(column, pairs[0][0])
            piece = self.part.load(self.pieces_ref, at >> self.bits)
            return at + (1 << self.bits), to, _add(move(column, to, sums), piece)

        def add_pairs(at, column, sums, pairs):
            loaded = [
                (to, value, self.part.load_live(self.x_ref, token, live))
                for to, token, value, live in pairs
            ]
            for to, value, row in loaded:
                to = jnp.maximum(column, to)
                sums = _add(move(column, to, sums), row, value)
                column = to
            return at + self.launch.unroll, column, sums

        def step(carry):
            *state, (pairs, whole) = carry
            at, column, sums = lax.cond(whole > 0, add_piece, add_pairs, *state, pairs)
            return at, column, sums, self._pairs(at)

        a, b = self.ends
        at = lax.div(a, self.launch.unroll) * self.launch.unroll  # pieces are aligned
        carry = at, first, self.part.zeros(), self._pairs(at)
        return lax.while_loop(lambda carry: carry[0] < b, step, carry)[1:3]

    def _pairs(self, first):
        """([(column, token, value, whether it counts)], whether a piece begins)."""
        (a, b), last, pairs = self.ends, self.columns_ref.shape[0] - 1, []
        for at in [first + j for j in range(self.launch.unroll)]:
            here, live = jnp.minimum(at, last), (at >= a) & (at < b)
            column = jnp.where(live, self.columns_ref[here], 0)
            pairs.append((column, self.tokens_ref[here], self.values_ref[here], live))
        here = jnp.minimum(first >> self.bits, self.whole_ref.shape[0] - 1)
        return pairs, jnp.where(pairs[0][-1], self.whole_ref[here], 0)


def _by_depth(part, array, axis):
    """`array` with part(first, width) written along an axis, in steps of the depth."""
    depth = array.shape[axis]
    width = min(depth, _TRANSPOSED_DEPTH)

    def step(i, array):
        first = jnp.minimum(i * width, depth - width)
        here = part(first, width)
        return lax.dynamic_update_slice_in_dim(array, here, first, axis)

    return lax.fori_loop(0, -(-depth // width), step, array)
