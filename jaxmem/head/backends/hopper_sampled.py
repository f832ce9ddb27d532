"""Sampled derivatives on NVIDIA GPUs: the kernels of what `xla_sampled` computes.

In the forward pass, on Hopper, a launch of rows stores its exponentials in 16 bits;
entries are selected from them before the next launch overwrites them. The backward pass
needs neither the exponentials nor a Hopper GPU.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxmem.head.backends import hopper, xla_sampled
from jaxmem.head.kernels import active, block_sizes, padding, tuned
from jaxmem.head.maths import backend_operands, column_sampling, row_stats, vocab_shards
from jaxmem.head.maths.backend_operands import Factors, TokenRows
from jaxmem.head.maths.column_sampling import Entries, Sampling, SparseDerivative
from jaxmem.head.maths.spec import Spec


def sampling_of(spec: Spec) -> Sampling:
    """The sampling of K slots over this head's vocabulary, or over this shard of it."""
    sampling = column_sampling.sampling_of(spec)
    return dataclasses.replace(sampling, margin=column_sampling.MARGIN)


def launch_rows(spec: Spec, hidden: jax.Array) -> int:
    """Rows of hidden [N, D] whose exponentials one launch stores."""
    # Parts of a vocabulary take as many bytes in launches of more rows.
    chunk = spec.chunk * (spec.shards.count if spec.shards else 1)
    n_rows, depth = hidden.shape
    return block_sizes.stored_rows(n_rows, depth, chunk, spec.frozen_head)


def forward(
    spec: Spec, source: Factors, rows: TokenRows, names
) -> tuple[dict, Entries]:
    """See `xla_sampled.forward`; outputs bitwise equal those of `hopper.forward`."""
    from jaxmem.head.kernels import sampled_select
    from jaxmem.head.kernels.forward import statistics_and_exps

    head = source.cast(spec)
    padded = padding.head(spec, head)
    n_rows, sampling = rows.labels.shape[0], sampling_of(spec)
    starts = column_sampling.starts_of(spec, rows)
    env = hopper.launch_env(spec, padded, launch_rows(spec, head.hidden), "exps")

    def body(block, results):
        all_stats, all_entries = results
        operands = hopper.inputs(spec, padded, rows, block)
        stats, kept = statistics_and_exps(env, *operands, tile_sums=True)
        stats = vocab_shards.vary(stats, spec.part_varying)
        merged = stats
        if spec.shards:
            merged = row_stats.merge_gathered(stats, spec.shards.axes)
        outputs = row_stats.finish(merged, jnp.ones(stats.max.shape, bool))
        outputs = vocab_shards.vary(outputs, spec.varying)
        normaliser = row_stats.Normaliser(outputs.max, outputs.log_sum)
        facts = sampled_select.RowFacts(
            operands[2], stats.label_logit, stats.max, normaliser
        )
        of_rows = functools.partial(
            column_sampling.continued, spec, backend_operands.take(starts, block.ids)
        )
        entries = sampled_select.entries(
            sampling, env.tiles.columns, kept, facts, of_rows, block.n_active
        )
        all_entries = backend_operands.put_all(all_entries, block.ids, entries)
        return active.put(all_stats, block, stats), all_entries

    no_entries = column_sampling.none(sampling, n_rows, spec.stats_dtype)
    no_entries = vocab_shards.vary(no_entries, spec.part_varying)
    results = backend_operands.no_statistics(spec, rows), no_entries
    stats, entries = active.for_each_block(rows.active, env.n_rows, body, results)
    return backend_operands.outputs(spec, rows, stats, names), entries


def backward(
    spec: Spec, source: Factors, rows: TokenRows, saved: row_stats.Outputs,
    cotangents: row_stats.Cotangents, entries: Entries,
) -> Factors:  # fmt: skip
    """See `xla_sampled.backward`."""
    dz = column_sampling.derivative_by_products(
        spec, sampling_of(spec), rows, saved, cotangents, entries
    )
    return gradient(spec, source, rows, dz)


def logits_at(
    spec: Spec, source: Factors, rows: TokenRows, columns: jax.Array
) -> jax.Array:
    """See `xla_sampled.logits_at`."""
    from jaxmem.head.kernels import sampled_logits

    head = source.cast(spec)
    columns = jnp.where(rows.active[:, None], columns, spec.columns)
    return sampled_logits.at_entries(columns, head.W, head.hidden, spec.layout)


def gradient(
    spec: Spec, source: Factors, rows: TokenRows, dz: SparseDerivative
) -> Factors:
    """See `xla_sampled.gradient`."""
    from jaxmem.head.kernels import sampled_products

    head = source.cast(spec)
    parts = spec.shards and spec.shards.same_hidden
    dtype = spec.stats_dtype if parts else spec.compute_dtype
    key = hopper.key_of(spec, spec.columns, head.hidden.shape[1])
    launches = sampled_products.ColumnLaunches(
        tuned.launch_for("sampled_to_W", key), tuned.launch_for("sampled_pieces", key)
    )

    def to_weights(spec, pairs, hidden, source):
        like = jax.ShapeDtypeStruct(source.W.shape, source.W.dtype)
        dW = sampled_products.to_weights(launches, pairs, hidden, like, spec.layout)
        if source.bias is None:
            return dW, None
        return dW, sampled_products.to_bias(pairs, hidden.shape[0], spec.columns)

    dW, dbias = None, None
    if not spec.frozen_head:
        dW, dbias = xla_sampled.over_tokens(spec, dz, head.hidden, source, to_weights)
    launch = tuned.launch_for("sampled_to_hidden", key)
    dhidden = sampled_products.to_hidden(launch, dz, head.W, spec.layout, dtype)
    return backend_operands.cotangent(spec, Factors(dhidden, dW, dbias), source)
