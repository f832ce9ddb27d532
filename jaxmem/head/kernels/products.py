"""The gradients of hidden and W from the logits' derivatives, a block of V at a time.

    dH += dz · W[block]        dW[block] = dzᵀ h       (its transpose if W is [D, V])

These are kernels, and not XLA's GEMMs, because they read and write blocks without
copies, add to float32 sums in place, and stop after the active rows.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxmem.head.kernels import block_sizes, padding, ring
from jaxmem.head.kernels.logits import Env, parts
from jaxmem.head.kernels.ring import Extent, Ring, RingProduct, ceil_div
from jaxmem.head.kernels.tiles import N_COMPUTE, Tiles
from jaxmem.head.maths.backend_operands import Factors
from jaxmem.head.maths.spec import Layout

# SMs left free for an overlapping all-reduce, for which NCCL uses as many: a kernel on
# all SMs would delay it until the kernel ends, or wait for it. Two H200s, N=8192 D=4096
# V=131072: 27.9 ms with 16, 27.6 with 24, 27.7 with 32, 28.0 with 48; 28.1 with the
# all-reduce after all products, 28.5 with four times as many, shorter blocks.
SUM_BLOCKS = 24
# Tiles of W's gradient that may overlap it. Over NVLink the all-reduce takes as long as
# 13 to 25 of them (computed); with many more, the missing SMs cost more than it saves.
MAX_SUM_TILES = 64


class ProductLaunch(NamedTuple):
    """Static facts of one launch of a product."""

    tiles: Tiles  # of the result
    layout: Layout  # of W
    n_blocks: int  # of the launch
    add: bool  # True to add to the block of `into`, False to overwrite it
    new: jax.ShapeDtypeStruct | None = None  # of a new array, if `into` is None


# jitted, so that a program with several launches lowers it once.
@functools.partial(jax.jit, static_argnames="launch")
def to_hidden(launch: ProductLaunch, dz, W, n_rows, block, into) -> jax.Array:
    """`into` with dz · W[block] in its first `n_rows` rows, updated in place.

    The block is int32 (first column, columns), multiples of `tiles.depth`. `into` is
    [N, D], float32 if `launch.add`; if the block is the whole vocabulary, [S N, D] for
    sums over S parts of it, one below the other.
    """
    tiles, layout, splits = launch.tiles, launch.layout, len(into) // len(dz)
    rhs = "kn" if layout == "vd" else "nk"
    product = RingProduct(tiles, dz.dtype, "mk", rhs, launch.n_blocks, splits)
    first, columns = block
    depth = W.shape[1 if layout == "vd" else 0]
    # The last part may go beyond both factors, where zeros are loaded.
    n_steps = ceil_div(ceil_div(columns, tiles.depth), splits)
    extent = Extent(
        n_rows, -(-depth // tiles.columns), n_steps, 0, lax.div(first, tiles.depth)
    )
    W = padding.split(W, layout, tiles.depth)
    target = _ResultBlock(into, 0, 0, launch.add)
    return _launch_kernel(product, extent, dz, W, target)


@functools.partial(jax.jit, static_argnames="launch")
def to_W(launch: ProductLaunch, dz, hidden, n_rows, block, into) -> jax.Array:
    """`into` with dzᵀ · hidden over the first `n_rows` rows at [block], in place.

    Rows of dz and hidden are zero from `n_rows` up to a multiple of `tiles.depth`; the
    block is int32 (first column, columns), whole tiles. `into` is like W, float32 if
    `launch.add`; None for a new array like `launch.new`, undefined outside of [block].
    """
    tiles = launch.tiles
    first, columns = block
    depth = hidden.shape[1]
    n_steps = jnp.maximum(ceil_div(n_rows, tiles.depth), 1)
    result = launch.new or into
    if launch.layout == "vd":
        lhs, rhs = dz, hidden
        n_rows, n_columns = columns, depth
        target = _ResultBlock(result, first, 0, launch.add)
    else:
        lhs, rhs = hidden, dz
        n_rows, n_columns = depth, columns
        target = _ResultBlock(result, 0, first, launch.add)
    product = RingProduct(tiles, dz.dtype, "km", "kn", launch.n_blocks)
    extent = Extent(n_rows, ceil_div(n_columns, tiles.columns), n_steps)
    return _launch_kernel(product, extent, lhs, (rhs, None), target)


class _ResultBlock(NamedTuple):
    """The block of an array that a product overwrites, or is added to."""

    array: Any  # or the shape and dtype of a new one
    row: Any  # int32, the first one of the block
    column: Any
    add: bool


class ProductRows(NamedTuple):
    """Rows of one launch, and their derivative by the logits."""

    hidden: jax.Array  # [R, D]
    derivative: Callable[..., jax.Array]  # (part, width) -> dz, as in `dlogits`
    n_rows: Any  # int32, number of active rows
    # float32 [R], by which hidden is multiplied already, and hidden's gradient is to be
    # multiplied; None for 1.
    factors: Any = None


class VocabBlocks(NamedTuple):
    """Blocks of the vocabulary, and the tiles of the products of each."""

    env: Env  # that of the derivative
    n_tiles: int  # of the vocabulary, per block
    single_block: bool  # all rows at once: sums.W is undefined, and only overwritten
    to_hidden: Tiles  # of the product for hidden's gradient
    to_W: Tiles  # of the product for W's gradient

    def block_at(self, first_tile) -> "_VocabBlock":
        """The block from a tile on; the last one has fewer tiles and columns."""
        env, width = self.env, self.env.tiles.columns
        n_tiles = jnp.int32(jnp.minimum(self.n_tiles, env.n_tiles - first_tile))
        column = first_tile * width
        columns = jnp.int32(column), jnp.minimum(n_tiles * width, env.columns - column)
        return _VocabBlock(first_tile, n_tiles, column, columns)


class _VocabBlock(NamedTuple):
    """One block of the vocabulary."""

    first_tile: Any
    n_tiles: Any  # int32
    first_column: Any
    columns: tuple[Any, Any]  # int32 (first column, columns), as products take them


class _GradientBlock(NamedTuple):
    """The block of hidden's or W's gradient that a product overwrites, or is added to.

    Attributes:
        array: the gradient; of W also the shape and dtype of a new one, or None without
            a gradient.
        columns: int32 (first column of the vocabulary, columns).
        add: True to add to the block, False to overwrite it.
    """

    array: Any
    columns: tuple[Any, Any]
    add: bool


def into_hidden(env: Env, n_tiles: int, clusters: int, dtype, hidden) -> jax.Array:
    """The array that `gradients` computes hidden's gradient of a launch into.

    It is zeros if there are several blocks. If there is one, the array is undefined,
    perhaps for sums over parts of the vocabulary, one below the other.
    """
    if n_tiles < env.n_tiles:
        return jnp.zeros(hidden.shape, jnp.float32)
    splits = block_sizes.hidden_splits(env.n_rows, env.depth, clusters)
    if splits == 1:
        return lax.empty(hidden.shape, dtype)
    return lax.empty((splits * len(hidden), hidden.shape[1]), jnp.float32)


def sum_parts(sums: jax.Array, n_rows: int) -> jax.Array:
    """The sum over parts of the vocabulary, of rows from `into_hidden`."""
    if len(sums) == n_rows:
        return sums
    return jnp.sum(jnp.reshape(sums, (-1, n_rows, sums.shape[1])), axis=0)


def gradients(
    blocks: VocabBlocks,
    W,
    parts: Sequence[ProductRows],
    sums: Factors,
    overlap_all_reduce=False,
) -> Factors:
    """`sums`, with the rows' contribution added block by block of the vocabulary.

    Several parts of the rows are only for a `single_block`. Then each block of W's
    gradient is summed over them in float32 before it is written to sums.W; likewise if
    kernels cannot write to sums.W. Sums of hidden are those of `into_hidden` for each
    part; those of W and bias None without a gradient. With `overlap_all_reduce`,
    hidden's gradient is all-reduced afterwards while the last block of W's gradient is
    computed, which is then outside of the loop.
    """
    env, n_tiles, several = blocks.env, blocks.n_tiles, len(parts) > 1
    width = n_tiles * env.tiles.columns
    apart = sums.W is not None and (several or padding.splits(sums.W, env.layout))

    def add_one(b, sums, last=False):
        block = blocks.block_at(b * n_tiles)
        dW, columns_of_dW, dbias, dhs = sums.W, block.columns, sums.bias, []
        if apart:
            dtype = jnp.float32 if several else sums.W.dtype
            shape = (width, env.depth) if env.layout == "vd" else (env.depth, width)
            dW = jax.ShapeDtypeStruct(shape, dtype)
            columns_of_dW = jnp.int32(0), block.columns[1]
        for i, (part, dh) in enumerate(zip(parts, sums.hidden, strict=True)):
            # Without an active row, one tile of zeros still overwrites dW.
            n_rows = jnp.maximum(part.n_rows, 1)
            if i:  # one part's derivatives at a time
                n_rows, dW, dhs = lax.optimization_barrier((n_rows, dW, dhs))
            extent = jnp.stack([n_rows, block.first_tile, block.n_tiles])
            dz = part.derivative(part=extent, width=width)
            add_to_W = i > 0 or not blocks.single_block
            dh, dW = _add_products(
                blocks, W, part._replace(n_rows=n_rows), dz,
                _GradientBlock(dh, block.columns, n_tiles < env.n_tiles),
                _GradientBlock(dW, columns_of_dW, add_to_W),
                last and overlap_all_reduce,
            )  # fmt: skip
            if dbias is not None:
                dbias = _add_to_bias(dz, n_rows, block.columns, dbias)
            dhs.append(dh)
        if apart:
            dW = put_block(env.layout, dW, sums.W, block.first_column, last)
        return sums._replace(hidden=tuple(dhs), W=dW, bias=dbias)

    n_blocks = -(-env.n_tiles // n_tiles)
    if sums.W is None or not (overlap_all_reduce or apart):
        return lax.fori_loop(0, n_blocks, add_one, sums)
    if n_blocks > 1:
        sums = lax.fori_loop(0, n_blocks - 1, add_one, sums)
    return add_one(n_blocks - 1, sums, last=True)


def add_block(
    blocks: VocabBlocks, W, part: ProductRows, first_tile, sums: Factors
) -> Factors:
    """Gradients of some rows from one block of the vocabulary, from `first_tile` on.

    Hidden's sums are those of the part, undefined and overwritten. The contribution is
    added to the block's sums of W's gradient, and to the bias's over all columns, both
    in float32.
    """
    block = blocks.block_at(first_tile)
    # Without an active row, one tile of zeros is added.
    n_rows = jnp.maximum(part.n_rows, 1)
    extent = jnp.stack([n_rows, jnp.int32(first_tile), block.n_tiles])
    width = blocks.n_tiles * blocks.env.tiles.columns
    dz = part.derivative(part=extent, width=width)
    dh, dW = _add_products(
        blocks, W, part._replace(n_rows=n_rows), dz,
        _GradientBlock(sums.hidden, block.columns, False),
        _GradientBlock(sums.W, (jnp.int32(0), block.columns[1]), True), False,
    )  # fmt: skip
    dbias = sums.bias
    if dbias is not None:
        dbias = _add_to_bias(dz, n_rows, block.columns, dbias)
    return Factors(dh, dW, dbias)


def _add_products(
    blocks: VocabBlocks, W, part: ProductRows, dz, hidden_block: _GradientBlock,
    W_block: _GradientBlock, overlap_all_reduce: bool,
):  # fmt: skip
    """(hidden's gradient, W's), with the contribution of some rows and a block."""
    env = blocks.env
    launch = ProductLaunch(blocks.to_hidden, env.layout, env.n_blocks, hidden_block.add)
    dh = to_hidden(launch, dz, W, part.n_rows, hidden_block.columns, hidden_block.array)
    dW, n_blocks = W_block.array, env.n_blocks
    if overlap_all_reduce:  # hidden's gradient first: its all-reduce overlaps W's
        dh, dz = lax.optimization_barrier((dh, dz))
        n_blocks = max(n_blocks - SUM_BLOCKS, 1)
    if dW is not None:
        new = dW if isinstance(dW, jax.ShapeDtypeStruct) else None
        launch = ProductLaunch(blocks.to_W, env.layout, n_blocks, W_block.add, new)
        into = None if new else dW
        dW = to_W(launch, dz, part.hidden, part.n_rows, W_block.columns, into)
    return dh, dW


def put_block(layout: Layout, block, dW, first, last: bool) -> jax.Array:
    """W's gradient with a block written into it, from column `first` on.

    The `last` block may exceed the gradient.
    """
    axis = 0 if layout == "vd" else 1
    if last:
        block = lax.slice_in_dim(block, 0, dW.shape[axis] - first, axis=axis)
    return lax.dynamic_update_slice_in_dim(dW, block.astype(dW.dtype), first, axis)


def has_room(env: Env, n_tiles: int) -> bool:
    """True if an all-reduce that overlaps the last block of `n_tiles` saves time."""
    return (env.n_tiles - 1) % n_tiles < MAX_SUM_TILES


def _add_to_bias(dz, n_rows, block, dbias):
    """The bias's gradient, summed from derivatives in 16 bits, like W's."""
    first, columns = block
    rows, columns = (
        lax.broadcasted_iota(jnp.int32, dz.shape, axis) < n
        for axis, n in enumerate((n_rows, columns))
    )
    sums = jnp.sum(jnp.where(rows & columns, dz, 0), axis=0, dtype=jnp.float32)
    sums += lax.dynamic_slice(dbias, (first,), sums.shape)
    return lax.dynamic_update_slice(dbias, sums, (first,))


def _launch_kernel(product, extent, lhs, rhs, target: _ResultBlock):
    """The target's array, with the product in its block or added to it.

    A new array may become part of a larger one by `dynamic_update_slice`: XLA then lets
    the kernel write into the larger array.
    """
    scalars = jnp.stack([jnp.int32(x) for x in (*extent, target.row, target.column)])
    operands = [x for x in (scalars, lhs, *rhs) if x is not None]
    body, array = functools.partial(_kernel, product, target.add), target.array
    if isinstance(array, jax.ShapeDtypeStruct):
        return plgpu.kernel(body, out_type=array, **product.launch())(*operands)
    kernel = pl.kernel(body, mesh=plgpu.Mesh(**product.launch()))

    def run(array_ref):
        kernel(*operands, array_ref)  # pyright: ignore[reportCallIssue]

    return ring.in_place(run, array)


def _kernel(product, add, *refs):
    scalars, lhs_gmem, *rhs_gmem, out_gmem = refs
    rhs_gmem = (*rhs_gmem, None)[:2]
    t = product.tiles

    @functools.partial(
        pl.run_scoped,
        buffers=Ring.scratch(product),
        out_smem=plgpu.SMEM(
            (N_COMPUTE, t.slots, t.rows, t.stored),
            out_gmem.dtype,
            transforms=ring.swizzle(out_gmem.dtype, t.stored),
        ),
        collective_axes="wg",
    )
    def _run_with_buffers(buffers, out_smem):
        *extent, row0, column0 = (scalars[i] for i in range(len(Extent._fields) + 2))
        extent = Extent(*extent)
        row0, column0 = pl.multiple_of(row0, t.rows), pl.multiple_of(column0, t.columns)

        def unit(tile, n_tiles, step):
            wg = lax.axis_index("wg")

            def process_tile(i, step):
                position = tile(i)
                first = row0 + position.first_row + wg * t.rows
                if product.splits > 1:
                    n_rows = out_gmem.shape[0] // product.splits
                    first = first + position.split * n_rows
                rows = pl.ds(first, t.rows)
                column = column0 + position.column * t.columns

                def store(sums):
                    """Stores the tile by parts, rounded to the result's dtype."""
                    columns = parts(sums, t.stored)
                    targets = [
                        out_gmem.at[rows, pl.ds(column + j * t.stored, t.stored)]
                        for j in range(len(columns))
                    ]
                    values = [lambda x=x: x.astype(out_gmem.dtype) for x in columns]
                    ring.store(targets, values, out_smem.at[wg], add)

                ring.multiply(product, extent, Ring(**buffers), step, store)
                return step + extent.n_steps

            return lax.fori_loop(0, n_tiles, process_tile, step)

        ring.run(product, extent, Ring(**buffers), lhs_gmem, rhs_gmem, unit)
