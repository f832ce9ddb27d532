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
    """The ranges of pairs that are summed, and the pairs."""

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
        W_part = lax.dynamic_slice_in_dim(W, first, width, axis=0).T
        return sum_rows(launch, segments, W_part, dtype)

    zeros = typed.alike(jnp.zeros((n_rows, W.shape[0]), dtype), dz.values, W)[0]
    return _fill_by_depth(part, zeros, axis=1)


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
        hidden_part = lax.dynamic_slice_in_dim(hidden, first, width, axis=1)
        return sum_columns(launches, pairs, n_columns, hidden_part, like.dtype).T

    zeros = typed.alike(jnp.zeros(like.shape, like.dtype), pairs.values, hidden)[0]
    return _fill_by_depth(part, zeros, axis=0)


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
    whole = _at_least_threads(x)
    part, n_segments = _Part(whole, launch.at_once), len(segments.first)

    def sampled_sum_rows(first_ref, end_ref, rows_ref, values_ref, x_ref, out_ref):
        segment = lax.axis_index("sum")
        first, end = first_ref[segment], end_ref[segment]

        @pl.when(zeros | (end > first))
        def _sum_segment():
            reader = _RowSums(launch, part, rows_ref, values_ref, x_ref)
            part.store(out_ref, segment, reader.total(first, end))

    out = jax.ShapeDtypeStruct((n_segments, part.depth), dtype)
    grid, operands = {"part": part.count, "sum": n_segments}, (*segments, whole)
    sums = typed.launch(sampled_sum_rows, out, grid, _PARAMS, operands)
    return sums[:, : x.shape[1]]


def sum_columns(
    launches: ColumnLaunches, pairs: SortedEntries, n_columns: int, x: jax.Array, dtype
) -> jax.Array:
    """Σ_k values_k x[tokens_k] over the pairs of each column, summed in float32.

    Pairs past the last column are ignored.
    """
    whole, launch = _at_least_threads(x), launches.columns
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

        def store(column, sums):
            part.store(out_ref, column, sums)
            return part.zeros()

        def advance(column, next_column, sums):
            """Stores sums of columns that are complete, and zeros of empty ones."""
            return lax.fori_loop(column, next_column, store, sums)

        first = program * launch.sums
        last, sums = stream.add(first, advance)
        advance(last, jnp.minimum(first + launch.sums, n_columns), sums)

    out = jax.ShapeDtypeStruct((n_columns, part.depth), dtype)
    grid = {"part": part.count, "sum": n_programs}
    sums = typed.launch(sampled_sum_columns, out, grid, _PARAMS, operands)
    return sums[:, : x.shape[1]]


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


def _at_least_threads(x):
    """x, padded with zeros to at least one column for each thread of a program."""
    return jnp.pad(x, ((0, 0), (0, max(_THREADS - x.shape[1], 0))))


class _Part:
    """The part of the depth that a program computes.

    Of narrow rows it is the whole depth, in pieces of falling sizes. Otherwise a part
    has `at_once` columns for each thread, or fewer if that costs less. The last part or
    piece begins early enough to end with the depth: some columns may be computed twice.
    """

    def __init__(self, x: jax.Array, at_once: int):
        self.depth = depth = x.shape[1]
        fits = [
            n * _THREADS for n in _COSTS
            if n <= at_once and n * _THREADS <= depth and depth % n == 0
        ]  # fmt: skip

        def cost(columns):
            return pl.cdiv(depth, columns) * columns * _COSTS[columns // _THREADS]

        self.pieces, covered = [], 0
        self.size = depth if depth < at_once * _THREADS else min(fits, key=cost)
        self.count = pl.cdiv(depth, self.size)
        while covered < self.size:
            size = max((n for n in fits if n <= self.size - covered), default=_THREADS)
            self.pieces.append((min(covered, self.size - size), size))
            covered += size

    def _row_pieces(self, row):
        """Yields the index of each piece of a row, and the piece's layout."""
        part = jnp.minimum(lax.axis_index("part") * self.size, self.depth - self.size)
        for first, size in self.pieces:
            layout = plgpu.Layout.WG_STRIDED((size,), size // _THREADS)
            yield (row, pl.ds(part + first, size)), layout

    def zeros(self):
        """Zeros in place of a row's pieces, float32."""
        return tuple(
            plgpu.layout_cast(jnp.zeros(columns.size, jnp.float32), layout)
            for (_, columns), layout in self._row_pieces(0)
        )

    def load(self, ref, row):
        """The pieces of a row."""
        return tuple(
            plgpu.load(ref.at[index], layout=layout, optimized=False)
            for index, layout in self._row_pieces(row)
        )

    def load_live(self, ref, row, live):
        """The pieces of a row in float32; 0 if it is not live."""
        return tuple(
            jnp.where(lax.broadcast(live, x.shape), x, jnp.zeros_like(x)).astype(
                jnp.float32
            )
            for x in self.load(ref, jnp.where(live, row, 0))
        )

    def store(self, ref, row, sums):
        """Stores sums of the pieces of a row."""
        for (index, _), x in zip(self._row_pieces(row), sums, strict=True):
            ref[index] = x.astype(ref.dtype)


def _add_row(sums, row, value=1.0):
    return tuple(a + value * x for a, x in zip(sums, row, strict=True))


class _RowPair(NamedTuple):
    """A row of x, and the factor that it is added with."""

    row: jax.Array
    value: jax.Array
    is_live: jax.Array  # False in an empty slot


class _ColumnPair(NamedTuple):
    """A token's entry in a column of W, and its value."""

    column: jax.Array
    token: jax.Array
    value: jax.Array
    is_live: jax.Array  # False for a pair of another program


@dataclasses.dataclass(frozen=True)
class _RowSums:
    """Sums of weighted rows."""

    launch: SampledLaunch
    part: _Part
    rows_ref: Any
    values_ref: Any
    x_ref: Any

    def total(self, first, end):
        """The sum of the pairs from `first` up to `end`, exclusive."""

        def step(i, carry):
            sums, pairs = carry
            rows = [self.part.load_live(self.x_ref, x.row, x.is_live) for x in pairs]
            next_pairs = self._read_pairs(first + (i + 1) * self.launch.unroll, end)
            for pair, row in zip(pairs, rows, strict=True):
                sums = _add_row(sums, row, pair.value)
            return sums, next_pairs

        n_steps = lax.div(end - first + self.launch.unroll - 1, self.launch.unroll)
        carry = self.part.zeros(), self._read_pairs(first, end)
        return lax.fori_loop(0, n_steps, step, carry)[0]

    def _read_pairs(self, first, end):
        """The pairs of one step, from the index `first` on."""
        last, pairs = self.rows_ref.shape[0] - 1, []
        for position in [first + j for j in range(self.launch.unroll)]:
            index = jnp.minimum(position, last)
            row, value = self.rows_ref[index], self.values_ref[index]
            is_live = (position < end) & (row < self.x_ref.shape[0])
            pairs.append(_RowPair(row, value, is_live))
        return pairs


@dataclasses.dataclass(frozen=True)
class _Stream:
    """Sums of neighbouring columns, whose pairs follow each other."""

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

    def add(self, first, advance):
        """(last column with a pair, or `first`; its sum).

        Args:
            first: the first column of the program.
            advance: (column, next column, sums of column) to sums of the next column.
        """

        def add_piece(position, column, sums, pairs):
            next_column = jnp.maximum(column, pairs[0].column)
            piece = self.part.load(self.pieces_ref, position >> self.bits)
            next_position = position + (1 << self.bits)
            sums = _add_row(advance(column, next_column, sums), piece)
            return next_position, next_column, sums

        def add_pairs(position, column, sums, pairs):
            rows = [self.part.load_live(self.x_ref, x.token, x.is_live) for x in pairs]
            for pair, row in zip(pairs, rows, strict=True):
                next_column = jnp.maximum(column, pair.column)
                sums = advance(column, next_column, sums)
                sums = _add_row(sums, row, pair.value)
                column = next_column
            return position + self.launch.unroll, column, sums

        def step(carry):
            *state, (pairs, is_whole) = carry
            state = lax.cond(is_whole > 0, add_piece, add_pairs, *state, pairs)
            return *state, self._read_pairs(state[0])

        begin, end = self.ends
        # Pieces are aligned.
        position = lax.div(begin, self.launch.unroll) * self.launch.unroll
        carry = position, first, self.part.zeros(), self._read_pairs(position)
        return lax.while_loop(lambda carry: carry[0] < end, step, carry)[1:3]

    def _read_pairs(self, first):
        """(pairs of one step from `first` on, 1 if a whole piece begins there)."""
        (begin, end), last, pairs = self.ends, self.columns_ref.shape[0] - 1, []
        for position in [first + j for j in range(self.launch.unroll)]:
            index = jnp.minimum(position, last)
            is_live = (position >= begin) & (position < end)
            column = jnp.where(is_live, self.columns_ref[index], 0)
            token, value = self.tokens_ref[index], self.values_ref[index]
            pairs.append(_ColumnPair(column, token, value, is_live))
        piece = jnp.minimum(first >> self.bits, self.whole_ref.shape[0] - 1)
        return pairs, jnp.where(pairs[0].is_live, self.whole_ref[piece], 0)


def _fill_by_depth(part, array, axis):
    """`array` with part(first, width) written along an axis, in steps of the depth."""
    depth = array.shape[axis]
    width = min(depth, _TRANSPOSED_DEPTH)

    def step(i, array):
        first = jnp.minimum(i * width, depth - width)
        return lax.dynamic_update_slice_in_dim(array, part(first, width), first, axis)

    return lax.fori_loop(0, -(-depth // width), step, array)
