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
    add: bool  # whether to add to the block of `into`, or overwrite it
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
    return _launch(product, extent, dz, W, into, (0, 0), launch.add)


@functools.partial(jax.jit, static_argnames="launch")
def to_W(launch: ProductLaunch, dz, hidden, n_rows, block, into) -> jax.Array:
    """`into` with dzᵀ · hidden over the first `n_rows` rows at [block], in place.

    Rows of dz and hidden are zero from `n_rows` up to a multiple of `tiles.depth`; the
    block is int32 (first column, columns), whole tiles. `into` is like W, float32 if
    `launch.add`; None for a new array like `launch.new`, undefined outside of [block].
    """
    tiles, layout, n_blocks, add, new = launch
    first, columns = block
    depth = hidden.shape[1]
    n_steps = jnp.maximum(ceil_div(n_rows, tiles.depth), 1)
    if layout == "vd":
        lhs, rhs, at = dz, hidden, (first, 0)
        n_rows, n_columns = columns, depth
    else:
        lhs, rhs, at = hidden, dz, (0, first)
        n_rows, n_columns = depth, columns
    product = RingProduct(tiles, dz.dtype, "km", "kn", n_blocks)
    extent = Extent(n_rows, ceil_div(n_columns, tiles.columns), n_steps)
    return _launch(product, extent, lhs, (rhs, None), new or into, at, add)


class ProductRows(NamedTuple):
    """Rows of one launch."""

    hidden: jax.Array  # [R, D]
    derivative: Callable[..., jax.Array]  # (part, width) -> dz, as in `dlogits`
    n_rows: Any  # int32, number of active rows


class VocabBlocks(NamedTuple):
    """How the vocabulary is split into blocks, and the tiles of their products."""

    env: Env  # that of the derivative
    n_tiles: int  # of the vocabulary, per block
    single_block: bool  # all rows at once: sums.W is undefined, and only overwritten
    tiles: tuple[Tiles, Tiles]  # of the product for hidden, and of that for W


def into_hidden(env: Env, n_tiles: int, clusters: int, dtype, hidden) -> jax.Array:
    """What `gradients` computes hidden's gradient of a launch into.

    Zeros if there are several blocks; an undefined array, perhaps for sums over parts
    of the vocabulary, one below the other, if there is one block.
    """
    if n_tiles < env.n_tiles:
        return jnp.zeros(hidden.shape, jnp.float32)
    splits = block_sizes.hidden_splits(env.n_rows, env.depth, clusters)
    if splits == 1:
        return lax.empty(hidden.shape, dtype)
    return lax.empty((splits * len(hidden), hidden.shape[1]), jnp.float32)


def of_parts(sums: jax.Array, n_rows: int) -> jax.Array:
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
    env, n_tiles, single_block, _ = blocks
    columns, several = env.tiles.columns, len(parts) > 1
    apart = sums.W is not None and (several or padding.splits(sums.W, env.layout))

    def block(b, sums, last=False):
        first = b * n_tiles
        here = jnp.int32(jnp.minimum(n_tiles, env.n_tiles - first))
        column = first * columns
        at = jnp.int32(column), jnp.minimum(here * columns, env.columns - column)
        into, at_W, dbias, dhs = sums.W, at, sums.bias, []
        if apart:
            into = _block(env, n_tiles, jnp.float32 if several else sums.W.dtype)
            at_W = jnp.int32(0), at[1]
        for i, (part, dh) in enumerate(zip(parts, sums.hidden, strict=True)):
            # Without an active row, one tile of zeros still overwrites dW.
            n_here = jnp.maximum(part.n_rows, 1)
            if i:  # one part's derivatives at a time
                n_here, into, dhs = lax.optimization_barrier((n_here, into, dhs))
            which = jnp.stack([n_here, first, here])
            dz = part.derivative(part=which, width=n_tiles * columns)
            dh, into = _add_products(
                blocks, (W, part.hidden, dz), n_here, (at, at_W), (dh, into),
                (n_tiles < env.n_tiles, i > 0 or not single_block),
                last and overlap_all_reduce,
            )  # fmt: skip
            if dbias is not None:
                dbias = _add_to_bias(dz, n_here, at, dbias)
            dhs.append(dh)
        if apart:
            into = put_block(env.layout, into, sums.W, column, last)
        return sums._replace(hidden=tuple(dhs), W=into, bias=dbias)

    n_parts = -(-env.n_tiles // n_tiles)
    if sums.W is None or not (overlap_all_reduce or apart):
        return lax.fori_loop(0, n_parts, block, sums)
    if n_parts > 1:
        sums = lax.fori_loop(0, n_parts - 1, block, sums)
    return block(n_parts - 1, sums, last=True)


def add_block(
    blocks: VocabBlocks, W, part: ProductRows, first, sums: Factors
) -> Factors:
    """Gradients of some rows from one block of the vocabulary, from tile `first` on.

    Sums of hidden are those of the part, undefined and overwritten; to W's of the block
    and the bias's of all, in float32, is added.
    """
    env, columns = blocks.env, blocks.env.tiles.columns
    here = jnp.int32(jnp.minimum(blocks.n_tiles, env.n_tiles - first))
    column = first * columns
    at = jnp.int32(column), jnp.minimum(here * columns, env.columns - column)
    # Without an active row, one tile of zeros is added.
    n_rows = jnp.maximum(part.n_rows, 1)
    which = jnp.stack([n_rows, jnp.int32(first), here])
    dz = part.derivative(part=which, width=blocks.n_tiles * columns)
    dh, dW = _add_products(
        blocks, (W, part.hidden, dz), n_rows, (at, (jnp.int32(0), at[1])),
        (sums.hidden, sums.W), (False, True), False,
    )  # fmt: skip
    dbias = sums.bias
    if dbias is not None:
        dbias = _add_to_bias(dz, n_rows, at, dbias)
    return Factors(dh, dW, dbias)


def _add_products(blocks, operands, n_rows, at, into, add, overlap_all_reduce):
    """(hidden's gradient, W's), with the contribution of some rows and a block.

    at, into and add are pairs for `to_hidden` and `to_W`. into of W is an array, the
    shape and dtype of a new one, or None without a gradient.
    """
    (W, hidden, dz), env, tiles = operands, blocks.env, blocks.tiles
    launch = ProductLaunch(tiles[0], env.layout, env.n_blocks, add[0])
    dh = to_hidden(launch, dz, W, n_rows, at[0], into[0])
    dW, n_blocks = into[1], env.n_blocks
    if overlap_all_reduce:  # hidden's gradient first: its all-reduce overlaps W's
        dh, dz = lax.optimization_barrier((dh, dz))
        n_blocks = max(n_blocks - SUM_BLOCKS, 1)
    if dW is not None:
        new = dW if isinstance(dW, jax.ShapeDtypeStruct) else None
        launch = ProductLaunch(tiles[1], env.layout, n_blocks, add[1], new)
        dW = to_W(launch, dz, hidden, n_rows, at[1], None if new else dW)
    return dh, dW


def _block(env, n_tiles, dtype):
    """Shape and dtype of a block of W's gradient."""
    width = n_tiles * env.tiles.columns
    shape = (width, env.depth) if env.layout == "vd" else (env.depth, width)
    return jax.ShapeDtypeStruct(shape, dtype)


def put_block(layout: Layout, block, dW, first, last: bool) -> jax.Array:
    """W's gradient with a block written into it; the last one may exceed it.

    first is the first column of the block.
    """
    axis = 0 if layout == "vd" else 1
    if last:
        block = lax.slice_in_dim(block, 0, dW.shape[axis] - first, axis=axis)
    return lax.dynamic_update_slice_in_dim(dW, block.astype(dW.dtype), first, axis)


def has_room(env: Env, n_tiles: int) -> bool:
    """Whether an all-reduce that overlaps the last block of `n_tiles` saves time."""
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


def _launch(product, extent, lhs, rhs, into, at, add):
    """The product, which overwrites `into` or is added to it, from position `at` on.

    A new array may become part of a larger one by `dynamic_update_slice`: XLA then lets
    the kernel write into the larger array.
    """
    scalars = jnp.stack([jnp.int32(x) for x in (*extent, *at)])
    operands = [x for x in (scalars, lhs, *rhs) if x is not None]
    body = functools.partial(_kernel, product, add)
    if isinstance(into, jax.ShapeDtypeStruct):
        return plgpu.kernel(body, out_type=into, **product.launch())(*operands)
    kernel = pl.kernel(body, mesh=plgpu.Mesh(**product.launch()))

    def run(into):
        kernel(*operands, into)  # pyright: ignore[reportCallIssue]

    return ring.in_place(run, into)


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
    def _scope(buffers, out_smem):
        *extent, row0, column0 = (scalars[i] for i in range(len(Extent._fields) + 2))
        extent = Extent(*extent)
        row0, column0 = pl.multiple_of(row0, t.rows), pl.multiple_of(column0, t.columns)

        def unit(tile, n_tiles, step):
            mine = lax.axis_index("wg")

            def of_tile(i, step):
                at = tile(i)
                first = row0 + at.first_row + mine * t.rows
                if product.splits > 1:
                    first = first + at.split * (out_gmem.shape[0] // product.splits)
                rows = pl.ds(first, t.rows)
                place = rows, column0 + at.column * t.columns
                store = functools.partial(
                    _store, t.stored, out_gmem, place, out_smem.at[mine], add
                )
                ring.multiply(product, extent, Ring(**buffers), step, store)
                return step + extent.n_steps

            return lax.fori_loop(0, n_tiles, of_tile, step)

        ring.run(product, extent, Ring(**buffers), lhs_gmem, rhs_gmem, unit)


def _store(width, gmem, place, smem, add, sums):
    """Store a tile of the product at its rows and first column, by parts of `width`."""
    rows, column = place
    columns = parts(sums, width)
    to = [gmem.at[rows, pl.ds(column + j * width, width)] for j in range(len(columns))]
    ring.store(to, [lambda x=x: x.astype(gmem.dtype) for x in columns], smem, add)
