"""Derivative of logits from their kept exponentials, in place, without a product.

Where all exponentials of a row are relative to one logit, and the loss depends on log-
probabilities or normalisers only, they are the derivative except for a factor of the
row and the label's column: then the exponentials are not read at all (`by_rows`).

Each block processes tiles in turn: a tile and its row data are loaded into an SMEM
buffer, overwritten by derivatives and stored back, while the next tiles are loaded.
ln p is the logarithm of an exponential kept to 8 bits, which a derivative in 16 bits
allows.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxmem.head.kernels import dlogits, logits, ring
from jaxmem.head.kernels.forward import Kept
from jaxmem.head.kernels.logits import Env
from jaxmem.head.kernels.ring import ceil_div
from jaxmem.head.maths.row_stats import Coefficients, Outputs

_BUFFERS = 3  # per block: one being loaded, one computed, one stored
_BLOCKS = 2  # per SM: as many as shared memory holds
_TINY = 1.2e-38  # the smallest normal float32; p counts as 0 there
# Distance of the reference above the label's logit, in base 2. Logits may be up to 44
# nats above the label's, and probabilities below 2^-62 of the label's underflow.
_HEADROOM = 64
_LARGEST = 2.0**100  # of a row's factor, and of its label's derivative in units of it


def reference_of(label_logit: jax.Array) -> jax.Array:
    """The reference logits, in base 2, of rows with these logits of their labels."""
    return label_logit * logits.LOG2_E + _HEADROOM


class ByRows(NamedTuple):
    """dloss/d(h Wᵀ) as factors of rows and a matrix in 16 bits."""

    factors: jax.Array  # float32 [n_rows]; 0 or 1 for inactive rows
    dz: jax.Array  # [n_rows, columns], undefined where `derivative` is


class LossRows(NamedTuple):
    """Facts of the rows whose exponentials are kept."""

    n_active: jax.Array  # int32
    labels: jax.Array  # int32 [n_rows]
    outputs: Outputs
    coefficients: Coefficients
    inverse_temperature: jax.Array | None  # float32 [n_rows]

    def numbers(self, env: Env) -> dict:
        """See `dlogits.fold`."""
        of_rows = self.outputs, self.coefficients, self.inverse_temperature
        return dlogits.fold(*of_rows, env.softcap)


def by_rows(env: Env, kept: Kept, rows: LossRows) -> ByRows:
    """`derivative` of log-probabilities and normalisers, from exps with a reference.

    The exponentials are used as they are if every active row's logits fit its
    reference; otherwise they are overwritten by derivatives, and the factors are 1.
    """
    numbers, labels = rows.numbers(env), rows.labels
    above = kept.reference - numbers["max"]
    factors = numbers["slope"] * jnp.exp2(above)
    at_label = numbers["at_label"]
    at_label = jnp.where(at_label == 0, 0, at_label / factors)
    largest = jnp.maximum(jnp.abs(factors), jnp.abs(at_label))
    fits = (above >= 0) & (above <= _HEADROOM + 1) & (largest < _LARGEST)
    is_active = jnp.arange(env.n_rows) < rows.n_active
    fits = (rows.n_active > 0) & jnp.all(fits | ~is_active)
    dz = derivative(env, kept, rows, skip=fits)
    # Not by the kernel, which would read whole tiles.
    column = jnp.where(is_active & fits & (labels >= 0), labels, dz.shape[1])
    at_label = jnp.where(is_active, at_label, 0).astype(dz.dtype)
    dz = dz.at[jnp.arange(env.n_rows), column].set(
        at_label, mode="drop", unique_indices=True
    )
    return ByRows(jnp.where(fits, jnp.where(is_active, factors, 0), 1), dz)


def derivative(env: Env, kept: Kept, rows: LossRows, skip: Any = False) -> jax.Array:
    """dloss/d(h Wᵀ), [n_rows, columns] in hidden's type, in the buffer of kept.exps.

    0 where masked, and in inactive rows of a tile with active ones; other rows are
    undefined. env is that of the launch that kept them. If `skip`, a boolean of the
    device, is true, the result is kept.exps.
    """
    row_numbers, n_active = rows.numbers(env), rows.n_active
    if env.softcap is not None:
        row_numbers["row_max"] = rows.outputs.max
    # Without an active row, products still read one tile of rows.
    n_tiles = jnp.maximum(ceil_div(n_active, env.tiles.rows), 1) * env.n_tiles
    n_tiles = jnp.where(skip, 0, n_tiles)
    operands = dict(
        scalars=jnp.stack([n_active, n_tiles]), max=kept.max, labels=rows.labels,
        rows=jnp.stack(tuple(row_numbers.values())),
        marked=_marked_tiles(env, rows.labels, n_active),
    )  # fmt: skip
    names = *operands, "exps"
    kernel = pl.kernel(
        functools.partial(_kernel, env, names, tuple(row_numbers)),
        mesh=plgpu.Mesh(grid=(_BLOCKS * env.n_blocks,), grid_names=("block",)),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )

    def run(exps):
        kernel(*operands.values(), exps)  # pyright: ignore[reportCallIssue]

    # A scan over calls stacks their residuals.
    return ring.in_place(run, lax.optimization_barrier(kept.exps))


def _marked_tiles(env, labels, n_active):
    """Tiles with labels or masks, including those where active rows end."""
    first_row = jnp.arange(env.n_rows // env.tiles.rows) * env.tiles.rows
    ends = first_row + env.tiles.rows > n_active
    return logits.tiles_with_labels_or_mask(env, labels) | ends[:, None]


def _kernel(env, names, row_names, *refs):
    t, gmem = env.tiles, dict(zip(names, refs, strict=True))
    tile = _BUFFERS, t.rows, t.columns

    @functools.partial(
        pl.run_scoped,
        exps=plgpu.SMEM(tile, env.dtype, transforms=ring.swizzle(env.dtype)),
        max=plgpu.SMEM((_BUFFERS, t.rows), jnp.float32),
        labels=plgpu.SMEM((_BUFFERS, t.rows), jnp.int32),
        rows=plgpu.SMEM((_BUFFERS, len(row_names), t.rows), jnp.float32),
        full=plgpu.Barrier(num_arrivals=4, num_barriers=_BUFFERS),
    )
    def _run_with_buffers(full, **smem):
        block, n_blocks = lax.axis_index("block"), _BLOCKS * env.n_blocks
        n_mine = ceil_div(lax.max(gmem["scalars"][1] - block, 0), n_blocks)

        def load(i):
            slot = lax.rem(i, _BUFFERS)
            _fetch_tile(env, gmem, smem, slot, i * n_blocks + block, full.at[slot])

        for i in range(_BUFFERS - 1):
            pl.when(i < n_mine)(functools.partial(load, i))

        @pl.loop(0, n_mine)
        def _process_next_tile(i):
            slot = lax.rem(i, _BUFFERS)
            plgpu.barrier_wait(full.at[slot])
            buffers = {k: ref.at[slot] for k, ref in smem.items()}
            _process_tile(env, row_names, gmem, buffers, i * n_blocks + block)
            # The next tile overwrites the buffer of the previous one.
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            pl.when(i + _BUFFERS - 1 < n_mine)(lambda: load(i + _BUFFERS - 1))

        plgpu.wait_smem_to_gmem(0)


class _ExpsTile(NamedTuple):
    """A tile of exponentials in memory."""

    row: jax.Array  # index of the tile among those of rows
    column: jax.Array  # index of the tile among those of columns
    exps: Any


def _tile_at(env, gmem, index):
    """The `_ExpsTile` of an index; indices are ordered along V."""
    t = env.tiles
    row, column = lax.div(index, env.n_tiles), lax.rem(index, env.n_tiles)
    rows, columns = pl.ds(row * t.rows, t.rows), pl.ds(column * t.columns, t.columns)
    return _ExpsTile(row, column, gmem["exps"].at[rows, columns])


def _fetch_tile(env, gmem, smem, slot, index, full):
    """Starts loading a tile and its row data."""
    tile = _tile_at(env, gmem, index)
    rows = pl.ds(tile.row * env.tiles.rows, env.tiles.rows)
    with_max = lax.min(tile.column, gmem["max"].shape[0] - 1)  # padding has no maximum
    plgpu.copy_gmem_to_smem(tile.exps, smem["exps"].at[slot], full)
    plgpu.copy_gmem_to_smem(gmem["max"].at[with_max, rows], smem["max"].at[slot], full)
    plgpu.copy_gmem_to_smem(gmem["labels"].at[rows], smem["labels"].at[slot], full)
    plgpu.copy_gmem_to_smem(gmem["rows"].at[:, rows], smem["rows"].at[slot], full)


def _process_tile(env, row_names, gmem, smem, index):
    """Turns a tile of exponentials into derivatives and stores it."""
    tile = _tile_at(env, gmem, index)
    row = {k: smem["rows"][j] for j, k in enumerate(row_names)}
    # Rescales from the tile's maximum to the row's.
    shift = smem["max"][...] * logits.LOG2_E - row["max"]
    row |= {"shift": shift, "scale": jnp.exp2(shift)}
    is_marked = gmem["marked"][tile.row, tile.column] > 0

    @pl.when(is_marked)
    def _with_labels_or_masks():
        t, labels = env.tiles, {"label": smem["labels"][...]}
        marks = _Marks(tile.row * t.rows, tile.column * t.columns, gmem["scalars"][0])
        _differentiate_tile(env, smem["exps"], row | labels, marks)

    @pl.when(~is_marked)
    def _without_labels_or_masks():
        _differentiate_tile(env, smem["exps"], row)

    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(smem["exps"], tile.exps)


class _Marks(NamedTuple):
    """Facts of a tile that has labels or masks."""

    first_row: jax.Array
    first_column: jax.Array
    n_active: jax.Array


def _differentiate_tile(env, smem, row, marks=None):
    """Overwrites a tile's exponentials by derivatives, a swizzle of columns at a time.

    `row` has the numbers of the tile's rows by name; `marks` is None where neither
    labels nor masks lie.
    """
    width = 64
    for i in range(env.tiles.columns // width):
        part = smem.at[:, pl.ds(i * width, width)]
        exps = plgpu.load(part, layout=plgpu.Layout.WGMMA).astype(jnp.float32)
        dz = _differentiate_part(env, exps, row)
        if marks is not None:
            first = marks.first_column + i * width
            dz = dlogits.marked(env, dz, first, row["label"], row["at_label"])
            row_ids = marks.first_row + lax.broadcasted_iota(jnp.int32, dz.shape, 0)
            live = row_ids < marks.n_active
            dz = jnp.where(live, dz, 0.0)
        part[...] = dz.astype(env.dtype)


def _differentiate_part(env, exps, row):
    """Derivatives of a part of a tile, without labels and masks."""
    row = {k: logits.along(x, exps.shape) for k, x in row.items()}
    e, z = exps * row["scale"], None
    x = jnp.log2(jnp.maximum(exps, _TINY)) + row["shift"]
    if env.softcap is not None:
        z = x * logits.LN_2 + row["row_max"]
    return dlogits.of_exponentials(env, e, x, z, row)
