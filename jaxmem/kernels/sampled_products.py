"""Gradients of hidden and W from sampled entries: weighted sums of rows.

    dH_i = Σ_j dz_ij W_j         over the entries of a token
    dW_j = Σ_i dz_ij h_i         over the entries of a column

Both are bound by bandwidth. A program computes part of the depth; programs of one part
run at the same time, so that the part of W or hidden that they read stays in L2. What
else costs time is waiting: an index has to arrive before its row can be loaded. So the
next indices are loaded while rows arrive, and a program goes through the entries of
several columns, of which most may have few or none, without a break between them. A
column with many tokens is first summed in pieces, in parallel. The order of every sum
is that of the pairs sorted by column, without atomics: results are deterministic, and
do not depend on how they are computed (`Launch`).
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

_PIECE = 64  # pairs of a piece, at least
# Columns per piece, at least: pieces take 4 D bytes each during W's gradient, an eighth
# of a gradient in 16 bits.
_COLUMNS = 16
_MAX_UNROLL = 8  # divides a piece
_TRANSPOSED_DEPTH = 256  # of W at a time, whose rows are transposed from [D, V]
_ONES = 16  # columns of ones whose sums are the bias's gradient


@dataclasses.dataclass(frozen=True)
class Launch:
    """How a sum of rows is computed.

    Attributes:
        depth: columns of a row per program, a power of two.
        unroll: rows that are loaded before they are added, a power of two.
        warps: per program.
        sums: per program; neighbouring columns of W.
    """

    depth: int
    unroll: int
    warps: int
    sums: int = 1

    def params(self) -> plt.CompilerParams:
        """Compiler parameters; without pipelining, as loads are unrolled."""
        return plt.CompilerParams(num_warps=self.warps, num_stages=1)

    def fitted(self, depth: int) -> "Launch":
        """The launch for rows that may be shorter."""
        short = min(self.depth, pl.next_power_of_2(depth))
        warps = max(min(self.warps, short // 32), 1)
        return dataclasses.replace(self, depth=short, warps=warps)


# A thread loads 16 bytes of a row at once. The fastest of those that
# `benchmarks.run_sampled_parts --sweep` times, on one H100 with flat, policy-like and
# peaked data (`benchmarks/sampled_data.py`). Programs of more columns wait for the
# longest ones; those of fewer wait for indices.
TO_HIDDEN = Launch(depth=256, unroll=4, warps=1)
TO_W = Launch(depth=1024, unroll=4, warps=4, sums=8)
TO_PIECE = Launch(depth=1024, unroll=8, warps=4)


class Segments(NamedTuple):
    """The pairs of each sum."""

    first: jax.Array  # int32 [n]
    end: jax.Array  # int32 [n]
    rows: jax.Array  # int32 [n_pairs], indices; out of bounds for none
    values: jax.Array  # float32 [n_pairs]


class Pieces(NamedTuple):
    """Sums of `_piece` neighbouring pairs of one column."""

    whole: jax.Array  # int32 [n_pieces], 1 where one column has all pairs of a piece
    sums: jax.Array  # float32 [n_pieces, D]; undefined if it has not


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
    n_columns = like.shape[0 if layout == "vd" else 1]
    if layout == "vd":
        return sum_columns(launch, pairs, n_columns, hidden, like.dtype)

    def part(first, width):
        here = lax.dynamic_slice_in_dim(hidden, first, width, axis=1)
        return sum_columns(launch, pairs, n_columns, here, like.dtype).T

    zeros = alike(jnp.zeros(like.shape, like.dtype), pairs.values, hidden)[0]
    return _by_depth(part, zeros, axis=0)


def to_bias(pairs: Pairs, n_rows: int, columns: int) -> jax.Array:
    """Σ_i dz_ij of each column, float32 [V]."""
    ones = jnp.ones((n_rows, _ONES), jnp.bfloat16)
    return sum_columns(TO_W, pairs, columns, ones, jnp.float32)[:, 0]


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
    n_segments, depth = segments.first.shape[0], x.shape[1]
    launch, operands = launch.fitted(depth), alike(*segments, x)

    def kernel(first_ref, end_ref, rows_ref, values_ref, x_ref, out_ref):
        at, columns = _place(launch)
        add = _Add(launch, columns, rows_ref, values_ref, x_ref)
        sums = add(plt.load(first_ref.at[at]), plt.load(end_ref.at[at]))
        plt.store(out_ref.at[at, columns], sums.astype(out_ref.dtype), mask=add.inside)

    return pl.pallas_call(
        kernel,
        grid=(n_segments, pl.cdiv(depth, launch.depth)),
        out_shape=result((n_segments, depth), dtype, *operands),
        compiler_params=launch.params(),
        name="sampled_sum_rows",
    )(*operands)


def sum_columns(
    launch: Launch, pairs: Pairs, n_columns: int, x: jax.Array, dtype
) -> jax.Array:
    """Σ_k values_k x[tokens_k] over the pairs of each column, summed in float32.

    Args:
        launch: how it is computed.
        pairs: sorted by column; those past the last column are ignored.
        n_columns: number of sums.
        x: [N, D].
        dtype: of the result.

    Returns:
        The sums, [n_columns, D].
    """
    depth = x.shape[1]
    launch, piece = launch.fitted(depth), _piece(pairs.columns.shape[0], n_columns)
    n_programs = pl.cdiv(n_columns, launch.sums)
    begin = jnp.arange(n_programs + 1, dtype=jnp.int32) * launch.sums
    ends = jnp.searchsorted(
        pairs.columns, jnp.minimum(begin, n_columns), method="scan_unrolled"
    ).astype(jnp.int32)
    operands = alike(ends, *pairs, x, *_pieces(pairs, n_columns, x))

    def kernel(ends_ref, *refs):
        *refs, out_ref = refs
        program, columns = _place(launch)
        a, b = plt.load(ends_ref.at[program]), plt.load(ends_ref.at[program + 1])
        stream = _Stream(launch, columns, (a, b), piece, *refs)

        def store(at, sums):
            here = out_ref.at[at, columns]
            plt.store(here, sums.astype(out_ref.dtype), mask=columns < depth)
            return jnp.zeros_like(sums)

        def move(at, to, sums):
            """Stores sums of columns that are complete, and zeros of empty ones."""
            return lax.fori_loop(at, to, store, sums)

        first = program * launch.sums
        at, sums = stream.add(first, move)
        move(at, jnp.minimum(first + launch.sums, n_columns), sums)

    return pl.pallas_call(
        kernel,
        grid=(n_programs, pl.cdiv(depth, launch.depth)),
        out_shape=result((n_columns, depth), dtype, *operands),
        compiler_params=launch.params(),
        name="sampled_sum_columns",
    )(*operands)


def _piece(n_pairs, n_columns):
    """Pairs of a piece."""
    size = max(_PIECE, pl.cdiv(n_pairs, pl.cdiv(n_columns, _COLUMNS)))
    return pl.cdiv(size, _MAX_UNROLL) * _MAX_UNROLL


def _pieces(pairs, n_columns, x) -> Pieces:
    """Sums of the pieces of long columns."""
    depth, n_pairs = x.shape[1], pairs.columns.shape[0]
    launch, size = TO_PIECE.fitted(depth), _piece(n_pairs, n_columns)
    n_pieces = pl.cdiv(n_pairs, size)
    first = jnp.arange(n_pieces, dtype=jnp.int32) * size
    last = pairs.columns.at[first + size - 1].get(mode="fill", fill_value=n_columns)
    whole = (pairs.columns[first] == last) & (last < n_columns)
    operands = alike(whole.astype(jnp.int32), pairs.tokens, pairs.values, x)

    def kernel(whole_ref, tokens_ref, values_ref, x_ref, out_ref):
        at, columns = _place(launch)

        @pl.when(plt.load(whole_ref.at[at]) > 0)
        def _sum():
            add = _Add(launch, columns, tokens_ref, values_ref, x_ref)
            sums = add(at * size, (at + 1) * size)
            plt.store(out_ref.at[at, columns], sums, mask=add.inside)

    sums = pl.pallas_call(
        kernel,
        grid=(n_pieces, pl.cdiv(depth, launch.depth)),
        out_shape=result((n_pieces, depth), jnp.float32, *operands),
        compiler_params=launch.params(),
        name="sampled_sum_pieces",
    )(*operands)
    return Pieces(operands[0], sums)


def _place(launch):
    """(sum or sums, columns) of a program; programs of one part of the depth first."""
    columns = jnp.arange(launch.depth, dtype=jnp.int32)
    return pl.program_id(0), pl.program_id(1) * launch.depth + columns


@dataclasses.dataclass(frozen=True)
class _Add:
    """Adds weighted rows."""

    launch: Launch
    columns: jax.Array
    rows_ref: Any
    values_ref: Any
    x_ref: Any

    def __call__(self, first, end):
        """The sum of the pairs from first to end."""

        def step(i, carry):
            sums, pairs = carry
            following = self._pairs(first + (i + 1) * self.launch.unroll, end)
            for value, row in [(value, self._row(row)) for row, value in pairs]:
                sums = sums + value * row.astype(jnp.float32)
            return sums, following

        n_steps = pl.cdiv(end - first, self.launch.unroll)
        carry = jnp.zeros(self.launch.depth, jnp.float32), self._pairs(first, end)
        return lax.fori_loop(0, n_steps, step, carry)[0]

    @property
    def inside(self):
        return self.columns < self.x_ref.shape[1]

    def _pairs(self, first, end):
        """(row, value) of the next pairs; a row past the last one where none is."""
        at, none = [first + j for j in range(self.launch.unroll)], self.x_ref.shape[0]
        rows = [plt.load(self.rows_ref.at[k], mask=k < end, other=none) for k in at]
        values = [plt.load(self.values_ref.at[k], mask=k < end, other=0.0) for k in at]
        return list(zip(rows, values, strict=True))

    def _row(self, row):
        live = row < self.x_ref.shape[0]  # excludes empty slots
        at = self.x_ref.at[row, self.columns]
        return plt.load(at, mask=self.inside & live, other=0.0)


@dataclasses.dataclass(frozen=True)
class _Stream:
    """Adds the pairs of neighbouring columns, which follow each other."""

    launch: Launch
    columns: jax.Array  # of x
    ends: tuple[jax.Array, jax.Array]  # of the program's pairs
    piece: int  # its pairs
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

        def step(carry):
            at, column, sums, here = carry
            whole = here[-1]
            after = jnp.where(whole > 0, at + self.piece, at + self.launch.unroll)
            following = self._pairs(after)
            loaded = self._rows(at, here)
            for to, value, row in loaded:
                to = jnp.maximum(column, to)
                sums = move(column, to, sums) + value * row.astype(jnp.float32)
                column = to
            return after, column, sums, following

        a, b = self.ends
        at = lax.div(a, self.launch.unroll) * self.launch.unroll  # pieces are aligned
        carry = at, first, jnp.zeros(self.launch.depth, jnp.float32), self._pairs(at)
        return lax.while_loop(lambda carry: carry[0] < b, step, carry)[1:3]

    def _pairs(self, first):
        """(columns, tokens, values, whether a whole piece begins) from `first` on."""
        a, b = self.ends
        at = [first + j for j in range(self.launch.unroll)]
        live = [(k >= a) & (k < b) for k in at]
        whole = self.whole_ref.at[lax.div(first, self.piece)]
        whole = plt.load(whole, mask=live[0], other=0)

        def load(ref):
            masked = zip(at, live, strict=True)
            return [plt.load(ref.at[k], mask=m, other=0) for k, m in masked]

        refs = self.columns_ref, self.tokens_ref, self.values_ref
        return *map(load, refs), whole

    def _rows(self, first, pairs):
        """(column, value, row) of each; of a whole piece, its sum."""
        (a, b), (columns, tokens, values, whole) = self.ends, pairs
        inside = self.columns < self.x_ref.shape[1]
        piece = self.pieces_ref.at[lax.div(first, self.piece), self.columns]
        loaded = []
        for j, (column, token, value) in enumerate(
            zip(columns, tokens, values, strict=True)
        ):
            live = (first + j >= a) & (first + j < b) & (whole == 0)
            row = self.x_ref.at[token, self.columns]
            row = plt.load(row, mask=inside & live, other=0.0)
            loaded.append((column, jnp.where(live, value, 0.0), row))
        piece = plt.load(piece, mask=inside & (whole > 0), other=0.0)
        return [(columns[0], 1.0, piece), *loaded]


def _by_depth(part, array, axis):
    """`array` with part(first, width) written along an axis, in steps of the depth."""
    depth = array.shape[axis]
    width = min(depth, _TRANSPOSED_DEPTH)

    def step(i, array):
        first = jnp.minimum(i * width, depth - width)
        here = part(first, width)
        return lax.dynamic_update_slice_in_dim(array, here, first, axis)

    return lax.fori_loop(0, -(-depth // width), step, array)
