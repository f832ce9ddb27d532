"""Statistics and gradients whose bits do not depend on the shards of the vocabulary.

With `vocab_groups` the vocabulary is cut into G groups, each computed as if it were a
shard of its own, by the same loops or kernels of the same shapes. Sums are merged in a
binary tree over the index of the groups. G and the number of shards are powers of two,
so that the tree of one shard's groups is a branch of the whole tree.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmem.head.backends.protocol import Backend
from jaxmem.head.maths import row_stats, vocab_shards
from jaxmem.head.maths.backend_operands import (
    Factors,
    TokenRows,
    for_active_chunks,
    no_outputs,
    put_all,
    take,
    trained,
)
from jaxmem.head.maths.row_stats import Outputs, Stats
from jaxmem.head.maths.spec import Spec


def outputs(
    backend: Backend, spec: Spec, source: Factors, rows: TokenRows, names
) -> dict:
    """The named fields of `Outputs` for every row; 0 where inactive."""
    groups = _group_statistics(backend, spec, source, rows)

    def chunk(row_ids, results):
        stats = Stats(*(take(x.T, row_ids).T for x in groups))
        exists = take(rows.labels, row_ids) < spec.vocab_size
        new = row_stats.finish(row_stats.merge_tree(stats), exists)._asdict()
        return put_all(results, row_ids, {k: new[k] for k in results})

    # In the body of a loop, XLA fuses the tree alike whatever comes before: a multiply
    # and an add that are fused are rounded once.
    zeros = no_outputs(spec, names, rows.labels.shape)
    return for_active_chunks(spec.chunk, rows.active, chunk, zeros)


def backward(
    backend: Backend,
    spec: Spec,
    source: Factors,
    rows: TokenRows,
    saved: Outputs,
    cotangents,
) -> Factors:
    """Cotangent of the source, in its dtypes; see `Loops.backward`."""

    def run(group, head):
        return backend.loops.backward(group, head, rows, saved, cotangents)

    parts = _run_groups(spec, source, run)
    dhidden = vocab_shards.sum_tree(part.hidden for part in parts)
    if spec.shards and spec.shards.same_hidden:
        dhidden = vocab_shards.sum_rows_in_order(spec.shards.same_hidden, dhidden)
    dhidden = dhidden.astype(source.hidden.dtype)
    if spec.frozen_head:
        return trained(spec, source)._replace(hidden=dhidden)
    dW = jnp.concatenate([part.W for part in parts], _vocabulary_axis(spec))
    if source.bias is None:
        return Factors(dhidden, dW, None)
    return Factors(dhidden, dW, jnp.concatenate([part.bias for part in parts]))


def _group_statistics(backend, spec, source, rows) -> Stats:
    """The statistics of every group, [G, N]; undefined where inactive."""
    parts = _run_groups(
        spec, source, lambda group, head: backend.loops.statistics(group, head, rows)
    )
    # XLA removes none of the sums, so that a verb which needs few has the same bits.
    parts = lax.optimization_barrier(parts)
    stats: Any = jax.tree.map(lambda *x: jnp.stack(x), *parts)
    if not spec.shards:
        return stats
    whole = vocab_shards.gather(spec.shards.axes, jnp.stack(stats, 1))
    return Stats(*jnp.moveaxis(whole.reshape(-1, *whole.shape[2:]), 1, 0))


def _run_groups(spec, source, run) -> list[Any]:
    """Results of `run(spec, head)` for each of this shard's groups, in order."""
    count = (spec.vocab_groups or 1) // (spec.shards.count if spec.shards else 1)
    width, axis, results = spec.columns // count, _vocabulary_axis(spec), []
    # Hidden's cotangent is summed over the shards after it is summed over the groups.
    shards = spec.shards and dataclasses.replace(spec.shards, same_hidden=())
    for first in range(0, spec.columns, width):
        group = dataclasses.replace(
            spec, columns=width, first=first, shard_columns=spec.columns, shards=shards,
            vocab_groups=None,
        )  # fmt: skip
        start = jnp.int32(first)
        if results:  # or XLA would copy the columns of all groups at once
            start, results[-1] = lax.optimization_barrier((start, results[-1]))
        W = lax.dynamic_slice_in_dim(source.W, start, width, axis)
        bias = None if source.bias is None else source.bias[first : first + width]
        results.append(run(group, Factors(source.hidden, W, bias)))
    return results


def _vocabulary_axis(spec):
    return 0 if spec.layout == "vd" else 1
