"""The kernels' gradients for one block of the vocabulary after another.

The order of loops and sums is that of `xla_blocks`. A block has as many tiles as one
launch: a product gives hidden's gradient of some rows, which is added to that from the
blocks before.
"""

import jax.numpy as jnp
from jax import lax

from jaxmem.head.backends import hopper
from jaxmem.head.kernels import active, block_sizes, padding
from jaxmem.head.maths import backend_operands, row_stats, vocab_shards
from jaxmem.head.maths.backend_operands import Factors, TokenRows
from jaxmem.head.maths.spec import Spec


def backward(
    spec: Spec, source: Factors, rows: TokenRows, saved: row_stats.Outputs, cotangents
) -> Factors:
    """See `hopper.backward`, which is as good where it needs no sums of all of W."""
    from jaxmem.head.kernels import products

    padded = padding.head(spec, source.cast(spec))
    columns, depth = padding.columns_and_depth(spec, padded)
    tokens, clusters = hopper.shard_chunk(spec), hopper.n_clusters()
    sizes, n_blocks = (len(rows.labels), tokens, columns, depth), spec.gradient_blocks
    if block_sizes.backward_rows(*sizes, False, clusters, n_blocks)[1]:
        return hopper.backward(spec, source, rows, saved, cotangents)
    n_rows, n_tiles = block_sizes.vocabulary_block(*sizes, n_blocks, clusters)
    env = hopper.launch_env(spec, padded, n_rows, "derivative")
    loop = hopper.Pass(spec, env, padded, single_block=False)
    values = hopper.OutputsAndCotangents(saved, cotangents)
    width = n_tiles * env.tiles.columns
    n_blocks = -(-env.n_tiles // n_tiles)

    def block(b, total, last=False):
        zero, W_total = jnp.float32(0), total.W
        if last:  # XLA might fill its sums while others are alive
            zero, W_total = lax.optimization_barrier((zero, W_total))
        sums = total._replace(W=jnp.full(shape, zero))
        sums = _add_block(loop, n_tiles, b * n_tiles, rows, values, sums)
        # Without padding along D.
        dW = lax.slice_in_dim(sums.W, 0, source.hidden.shape[1], axis=depth_axis)
        dW = products.put_block(env.layout, dW, W_total, b * width, last)
        return sums._replace(W=dW)

    shape = (width, env.depth) if spec.layout == "vd" else (env.depth, width)
    depth_axis = 1 if spec.layout == "vd" else 0
    total = _zero_gradients(spec, source, n_blocks * width)
    total = lax.fori_loop(0, n_blocks - 1, block, total)
    total = block(n_blocks - 1, total, last=True)
    total = vocab_shards.vary(total, spec.part_varying)
    total = backend_operands.sum_over_shards(spec, total)
    return backend_operands.rounded(spec, total, source)


def _zero_gradients(spec, source, columns):
    """Gradients before the first block; W's is undefined, to be overwritten."""
    dtype = spec.stats_dtype if spec.partial_hidden else spec.compute_dtype
    hidden = jnp.zeros(source.hidden.shape, dtype)
    bias = None if source.bias is None else jnp.zeros(columns, jnp.float32)
    hidden, bias = vocab_shards.vary((hidden, bias), spec.part_varying)
    return Factors(hidden, lax.empty(source.W.shape, source.W.dtype), bias)


def _add_block(loop, n_tiles, first_tile, rows, values, sums):
    """`sums`, with the contribution of all rows from one block of the vocabulary.

    W's sums are those of the block, which has n_tiles from first_tile on.
    """
    from jaxmem.head.kernels import products

    names = "to_hidden", "to_W"
    to_hidden, to_W = (hopper.tiles_of(x, loop.spec, loop.padded) for x in names)
    blocks = products.VocabBlocks(loop.env, n_tiles, False, to_hidden, to_W)

    def add_rows(block, sums):
        part = hopper.recomputed(loop, rows, values, block.ids, block.n_active)
        into = sums._replace(hidden=lax.empty(part.hidden.shape, jnp.float32))
        added = products.add_block(blocks, loop.padded.W, part, first_tile, into)
        dh = added.hidden[:, : sums.hidden.shape[1]]
        dh += backend_operands.take(sums.hidden, block.ids)
        dh = dh.astype(sums.hidden.dtype)
        return added._replace(hidden=backend_operands.put(sums.hidden, block.ids, dh))

    return active.for_each_block(rows.active, loop.env.n_rows, add_rows, sums)
