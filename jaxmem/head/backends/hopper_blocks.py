"""The kernels' gradients for one block of the vocabulary after another.

See `xla_blocks`, whose order of loops and sums it has. A block has as many tiles as one
launch: hidden's gradient of some rows is one product, and added to what other blocks
gave.
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
    tokens, clusters = hopper.tokens_here(spec), hopper.n_clusters()
    sizes, n_blocks = (len(rows.labels), tokens, columns, depth), spec.gradient_blocks
    if block_sizes.backward_rows(*sizes, False, clusters, n_blocks)[1]:
        return hopper.backward(spec, source, rows, saved, cotangents)
    n_rows, n_tiles = block_sizes.vocabulary_block(*sizes, n_blocks, clusters)
    env = hopper.launch_env(spec, padded, n_rows, "derivative")
    this = hopper.Pass(spec, env, padded, single_block=False)
    width = n_tiles * env.tiles.columns
    n_blocks = -(-env.n_tiles // n_tiles)

    def block(b, total, last=False):
        zero, so_far = jnp.float32(0), total.W
        if last:  # XLA might fill its sums while others are alive
            zero, so_far = lax.optimization_barrier((zero, so_far))
        sums = total._replace(W=jnp.full(shape, zero))
        sums = _add(this, (b, n_tiles), rows, (saved, cotangents), sums)
        # Without padding along D.
        dW = lax.slice_in_dim(sums.W, 0, source.hidden.shape[1], axis=depth_axis)
        dW = products.put_block(env.layout, dW, so_far, b * width, last)
        return sums._replace(W=dW)

    shape = (width, env.depth) if spec.layout == "vd" else (env.depth, width)
    depth_axis = 1 if spec.layout == "vd" else 0
    total = _zeros(spec, source, n_blocks * width)
    total = lax.fori_loop(0, n_blocks - 1, block, total)
    total = block(n_blocks - 1, total, last=True)
    total = vocab_shards.vary(total, spec.part_varying)
    total = backend_operands.sum_over_shards(spec, total)
    return backend_operands.rounded(spec, total, source)


def _zeros(spec, source, columns):
    """Gradients before the first block; W's is undefined, to be overwritten."""
    dtype = spec.stats_dtype if spec.partial_hidden else spec.compute_dtype
    hidden = jnp.zeros(source.hidden.shape, dtype)
    bias = None if source.bias is None else jnp.zeros(columns, jnp.float32)
    hidden, bias = vocab_shards.vary((hidden, bias), spec.part_varying)
    return Factors(hidden, lax.empty(source.W.shape, source.W.dtype), bias)


def _add(this, block, rows, outputs_and_cotangents, sums):
    """`sums`, W's of one block of the vocabulary, with the contribution of all rows."""
    from jaxmem.head.kernels import products

    (spec, env, padded, _), (b, n_tiles) = this, block
    names = "to_hidden", "to_W"
    to_hidden, to_W = (hopper.tiles_of(name, spec, padded) for name in names)
    of_block = products.VocabBlocks(env, n_tiles, False, (to_hidden, to_W))

    def of_rows(at, sums):
        part = hopper.recomputed(
            this, rows, outputs_and_cotangents, at.ids, at.n_active
        )
        into = sums._replace(hidden=lax.empty(part.hidden.shape, jnp.float32))
        added = products.add_block(of_block, padded.W, part, b * n_tiles, into)
        dh = added.hidden[:, : sums.hidden.shape[1]]
        dh += backend_operands.take(sums.hidden, at.ids)
        dh = dh.astype(sums.hidden.dtype)
        return added._replace(hidden=backend_operands.put(sums.hidden, at.ids, dh))

    return active.for_each_block(rows.active, env.n_rows, of_rows, sums)
