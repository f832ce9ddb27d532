"""Sampled derivatives on NVIDIA GPUs: what `_sampled_xla` does, by kernels.

Forward, on Hopper, a launch of rows leaves its exponentials in 16 bits; entries are
found among them before the next launch takes their place. Backward needs neither those
nor a Hopper chip.
"""

import jax

from jaxmem import _sampled, _sampled_xla, _shards, _stats, _xla
from jaxmem._sampled import Entries, Sampling
from jaxmem._spec import Spec
from jaxmem._xla import Head, Rows
from jaxmem.kernels import active, blocks, hopper, padding


def sampling_of(spec: Spec, slots: int) -> Sampling:
    """K slots of this head's vocabulary, or of this shard's part of it."""
    from jaxmem.kernels import sampled_select

    return Sampling(slots, spec.columns, sampled_select.MARGIN)


def forward(
    spec: Spec, sampling: Sampling, source: Head, rows: Rows, starts, names
) -> tuple[dict, Entries]:
    """As `_sampled_xla.forward`; the outputs to the bit of `hopper.forward`'s."""
    from jaxmem.kernels import forward as kernel
    from jaxmem.kernels import sampled_select

    padded = padding.head(spec, _xla.cast(spec, source))
    n_rows = rows.labels.shape[0]
    size = blocks.whole(min(n_rows, spec.chunk))
    env = hopper._env(spec, padded, size, "exps")

    def body(block, made):
        so_far, found = made
        operands = hopper._operands(spec, padded, rows, block)
        stats, kept = kernel.statistics_and_exps(env, *operands, tile_sums=True)
        stats = _shards.vary(stats, spec.part_varying)
        outputs = _xla.merged(spec, rows, block.ids, stats)
        labels, start = operands[2], _xla.take(starts, block.ids)
        of_rows = labels, start, block.n_active
        entries = sampled_select.entries(
            sampling, env.tiles.columns, kept, stats, outputs, of_rows
        )
        found = _xla.put_all(found, block.ids, entries)
        return active.put(so_far, block, stats), found

    none = _sampled.none(sampling, n_rows, spec.stats_dtype)
    none = _shards.vary(none, spec.part_varying)
    made = _xla.no_statistics(spec, rows), none
    stats, entries = active.for_each_block(rows.active, env.n_rows, body, made)
    return _xla.outputs(spec, rows, stats, names), entries


def backward(
    spec: Spec, sampling: Sampling, source: Head, rows: Rows, saved: _stats.Outputs,
    cotangents: _stats.Cotangents, entries: Entries,
) -> Head:  # fmt: skip
    """As `_sampled_xla.backward`."""
    from jaxmem.kernels import sampled_products as products

    head = _xla.cast(spec, source)
    dz = _sampled_xla.derivative(spec, sampling, rows, saved, cotangents, entries)
    parts = spec.shards and spec.shards.same_hidden
    dtype = spec.stats_dtype if parts else spec.compute_dtype
    dhidden, dW, dbias = products.to_hidden(dz, head.W, spec.layout, dtype), None, None
    if not spec.frozen_head:
        pairs = _sampled_xla.sort_by_column(dz)
        like = jax.ShapeDtypeStruct(source.W.shape, source.W.dtype)
        dW = products.to_weights(pairs, head.hidden, like, spec.layout)
        if head.bias is not None:
            n_rows = head.hidden.shape[0]
            dbias = products.to_bias(pairs, n_rows, spec.columns)
    sums = _xla.sum_over_shards(spec, Head(dhidden, dW, dbias))
    like = _xla.trained(spec, source)
    return jax.tree.map(lambda x, primal: x.astype(primal.dtype), sums, like)
