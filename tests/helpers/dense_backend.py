"""A third backend: all logits of a call at once, in two hundred lines.

It has every function that `jaxmem.head.backends.protocol` names, but for the loops of
`Recompute(blocks)` and of 8 bits, and uses the formulas of `jaxmem.head.maths` only.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.head.backends.protocol import Backend, ByLogits
from jaxmem.head.maths import (
    backend_operands,
    column_sampling,
    id_columns,
    row_stats,
    scaling,
)
from jaxmem.head.maths.backend_operands import CallerLogits, Factors, put_all, take


def active_first(active):
    """Ids of the active rows, then ids past the end."""
    size = len(active)
    return jnp.nonzero(active, size=size, fill_value=size)[0].astype(jnp.int32)


def logits_of(spec, source, rows, row_ids):
    """Scaled logits [N, V] of the rows; -inf in columns of padding."""
    if isinstance(source, CallerLogits):
        z = take(source.logits, row_ids).astype(spec.stats_dtype)
    else:
        head = source.cast(spec)
        W = head.W.T if spec.layout == "vd" else head.W
        h, dtype = take(head.hidden, row_ids), spec.stats_dtype
        z = jnp.matmul(h, W, preferred_element_type=dtype)
        z = z if head.bias is None else z + head.bias
    z = scaling.scale(spec, rows, row_ids, z)
    is_padding = jnp.arange(z.shape[1]) >= spec.vocab_size
    return jnp.where(is_padding, -jnp.inf, z)


def cotangent_of(spec, source, row_ids, dz) -> Any:
    """The cotangent of the source, from the derivative by h Wᵀ [N, V].

    Hidden's is rounded to its dtype, those of W and bias are float32.
    """
    dz = jnp.zeros_like(dz).at[row_ids].set(dz, mode="drop")
    if isinstance(source, CallerLogits):
        return CallerLogits(dz)
    head, dtype = source.cast(spec), spec.stats_dtype
    W = head.W if spec.layout == "vd" else head.W.T
    dhidden = jnp.matmul(dz.astype(W.dtype), W, preferred_element_type=dtype)
    dhidden = dhidden.astype(head.hidden.dtype)
    if spec.frozen_head:
        return Factors(dhidden, None, None)
    row_ids = jnp.arange(len(dz))  # a row that is not active may hold NaN
    h = jnp.where(jnp.any(dz != 0, 1)[:, None], take(head.hidden, row_ids), 0)
    dW = jnp.matmul(dz.T.astype(h.dtype), h, preferred_element_type=dtype)
    dbias = None if head.bias is None else dz.sum(0)
    return Factors(dhidden, dW if spec.layout == "vd" else dW.T, dbias)


def whole(spec, d: ByLogits, columns):
    """The derivative in all columns, [N, V]."""
    dz = d.everywhere
    if columns is not None:
        rows = jnp.arange(len(dz))[:, None]
        zeros = jnp.zeros((len(dz), spec.columns), dz.dtype)
        return zeros.at[rows, columns].add(dz, mode="drop")
    if d.ids is None:
        return dz
    index = id_columns.indices_of(spec, d.ids)
    return dz.at[index].set(d.at_ids, mode="drop")


class DenseLoops:
    """The functions of `protocol.Loops`."""

    @staticmethod
    def statistics(spec, source, rows):
        row_ids = jnp.arange(len(rows.labels), dtype=jnp.int32)
        z = logits_of(spec, source, rows, row_ids)
        return row_stats.of_tile(z, rows.labels)[0]

    @staticmethod
    def forward(spec, source, rows, names):
        stats = DenseLoops.statistics(spec, source, rows)
        return backend_operands.outputs(spec, rows, stats, names)

    @staticmethod
    def backward(spec, source, rows, saved, cotangents):
        row_ids = active_first(rows.active)
        operands = saved, cotangents
        saved, g = jax.tree.map(lambda x: take(x, row_ids), operands)
        z = logits_of(spec, source, rows, row_ids)
        dz = row_stats.dlogits(z, take(rows.labels, row_ids), saved, g)
        dz = scaling.unscale(spec, rows, row_ids, z, dz)
        sums = cotangent_of(spec, source, row_ids, dz)
        return backend_operands.cotangent(spec, sums, source)

    @staticmethod
    def one_pass(spec, source, rows, of_chunk, initial, names):
        row_ids = active_first(rows.active)
        z, labels = logits_of(spec, source, rows, row_ids), take(rows.labels, row_ids)
        stats, _ = row_stats.of_tile(z, labels)
        outputs = backend_operands.merged(spec, rows, row_ids, stats)
        values, g = of_chunk(row_ids, outputs)
        dz = row_stats.dlogits(z, labels, outputs, g)
        dz = scaling.unscale(spec, rows, row_ids, z, dz)
        sums = cotangent_of(spec, source, row_ids, dz)
        return put_all(initial, row_ids, values), sums

    @staticmethod
    def loss_rows(spec, source):
        return len(source[0])


def chunks_of(heads, groups):
    """(row ids, logits of each head, columns or None) of all rows, or of each group."""
    if groups is None:
        row_ids = active_first(heads[0].rows.active)
        yield row_ids, [logits_of(*head, row_ids) for head in heads], None
        return
    (head,) = heads
    for group in groups:
        row_ids = active_first(group.active)
        columns = group.columns(row_ids)
        z = logits_of(*head, row_ids)
        at_columns = jnp.take_along_axis(z, columns, 1, "fill", fill_value=-jnp.inf)
        yield row_ids, [at_columns], columns


class DenseColumns:
    """The functions of `protocol.ColumnLoops`."""

    @staticmethod
    def forward(heads, of_chunk, initial, groups=None):
        for row_ids, logits, _ in chunks_of(heads, groups):
            initial = put_all(initial, row_ids, of_chunk(row_ids, *logits))
        return initial

    @staticmethod
    def backward(heads, of_chunk, groups=None):
        spec, source, rows = heads[0]
        shape = len(rows.labels), spec.columns
        dz = jnp.zeros(shape, spec.stats_dtype)
        for row_ids, logits, columns in chunks_of(heads, groups):
            of_rows = whole(spec, of_chunk(row_ids, *logits), columns)
            dz = dz.at[row_ids].add(of_rows, mode="drop")
        sums = cotangent_of(spec, source, jnp.arange(len(dz)), dz)
        return backend_operands.cotangent(spec, sums, source)

    @staticmethod
    def one_pass(heads, of_chunk, initial):
        spec, source, _ = heads[0]
        ((row_ids, logits, _),) = chunks_of(heads, None)
        values, d = of_chunk(row_ids, *logits)
        sums = cotangent_of(spec, source, row_ids, whole(spec, d, None))
        return put_all(initial, row_ids, values), sums


class DenseSampler:
    """The functions of `protocol.SampleLoops`."""

    @staticmethod
    def forward(spec, source, rows, names):
        row_ids = jnp.arange(len(rows.labels), dtype=jnp.int32)
        z = logits_of(spec, source, rows, row_ids)
        stats, exps = row_stats.of_tile(z, rows.labels)
        merged = backend_operands.merged(spec, rows, row_ids, stats)
        scale = column_sampling.scale(stats.max, merged)
        sampling = column_sampling.sampling_of(spec)
        starts = column_sampling.starts_of(spec, rows)
        entries = column_sampling.select(sampling, exps, scale, starts)
        return backend_operands.outputs(spec, rows, stats, names), entries

    @staticmethod
    def backward(spec, source, rows, saved, cotangents, entries):
        sampling = column_sampling.sampling_of(spec)
        dz = column_sampling.derivative_by_products(
            spec, sampling, rows, saved, cotangents, entries
        )
        return DenseSampler.gradient(spec, source, rows, dz)

    @staticmethod
    def logits_at(spec, source, rows, columns):
        head = source.cast(spec)
        W = head.W if spec.layout == "vd" else head.W.T
        of_columns = W.at[columns].get(mode="clip").astype(spec.stats_dtype)
        return jnp.einsum("nd,nkd->nk", head.hidden.astype(W.dtype), of_columns)

    @staticmethod
    def gradient(spec, source, rows, dz):
        row_ids = jnp.arange(len(dz.values))
        dz = whole(spec, ByLogits(dz.values), dz.columns)
        sums = cotangent_of(spec, source, row_ids, dz)
        return backend_operands.cotangent(spec, sums, source)


DENSE = Backend(
    name="dense",
    advantage="runs on every device",
    stores_logits=True,
    loops=DenseLoops,
    sampler=DenseSampler,
    columns=DenseColumns,
)
