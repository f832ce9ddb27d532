"""Sampled derivatives in plain XLA: selection in chunks, gathers, segment sums.

The forward pass computes statistics and, while a chunk's logits are alive, selects the
entries. The backward pass recomputes nothing: hidden's gradient is a weighted sum of
rows of W for each token, and W's a sum of rows of hidden over each column's tokens,
from (column, token) pairs sorted by column. The order of sums depends on the entries
only.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmem.head.backends import xla
from jaxmem.head.maths import (
    backend_operands,
    column_sampling,
    eight_bits,
    row_stats,
    vocab_shards,
)
from jaxmem.head.maths.backend_operands import Factors, TokenRows
from jaxmem.head.maths.column_sampling import (
    Entries,
    SparseDerivative,
    sort_by_column,
)
from jaxmem.head.maths.spec import Spec

# Elements of W's gradient that are summed in float32 at a time, elements of hidden's
# rows that are gathered at a time for it on a CPU, and pairs at a time elsewhere. On
# two cores of a CPU with D=256, V=32768 and a million pairs: 0.14 s with 2^18 elements,
# 0.41 s with 2^22.
_BLOCK_NUMBERS = 2**22
_ROW_NUMBERS = 2**18
_PAIRS = 1024
_DEPTH = 128  # columns of hidden's gradient at a time where W is [D, V]


def forward(
    spec: Spec, source: Factors, rows: TokenRows, names
) -> tuple[dict, Entries]:
    """The named fields of `Outputs`, bitwise equal to `xla.forward`'s, and entries.

    They are 0, and no entries, where a row is not active.
    """
    n_rows, sampling = rows.labels.shape[0], column_sampling.sampling_of(spec)
    head = source.cast(spec)
    starts = column_sampling.starts_of(spec, rows)

    def chunk(row_ids, results):
        outputs, entries = results
        z = xla.logits(spec, head, rows, row_ids)
        labels = backend_operands.part_labels(spec, rows, row_ids)
        stats, exps = row_stats.of_tile(z, labels)
        new = backend_operands.merged(spec, rows, row_ids, stats)
        scale = column_sampling.scale(stats.max, new)
        total = jnp.sum(column_sampling.units(sampling, exps * scale[:, None]), axis=1)
        of_rows = backend_operands.take(starts, row_ids)
        of_rows = column_sampling.continued(spec, of_rows, total)
        selected = column_sampling.select(sampling, exps, scale, of_rows)
        new = new._asdict()
        outputs = {
            k: backend_operands.put(outputs[k], row_ids, new[k]) for k in outputs
        }
        return outputs, backend_operands.put_all(entries, row_ids, selected)

    outputs = backend_operands.no_outputs(spec, names, rows.labels.shape)
    entries = column_sampling.none(sampling, n_rows, spec.stats_dtype)
    results = outputs, vocab_shards.vary(entries, spec.part_varying)
    return backend_operands.for_active_chunks(spec.chunk, rows.active, chunk, results)


def backward(
    spec: Spec, source: Factors, rows: TokenRows, saved: row_stats.Outputs,
    cotangents: row_stats.Cotangents, entries: Entries,
) -> Factors:  # fmt: skip
    """Cotangent of the source from the sampled entries, in the source's dtypes.

    `saved` has logprob, max, log_sum, and the outputs with cotangents. Sums are in the
    statistics' dtype.
    """
    sampling = column_sampling.sampling_of(spec)
    dz = column_sampling.derivative_by_products(
        spec, sampling, rows, saved, cotangents, entries
    )
    return gradient(spec, source, rows, dz)


def logits_at(
    spec: Spec, source: Factors, rows: TokenRows, columns: jax.Array
) -> jax.Array:
    """Products h Wᵀ of active rows in some columns of each, [N, n].

    Columns, int32 [N, n], are of this shard; the results of those that do not exist,
    and of inactive rows, are undefined.
    """
    head = source.cast(spec)

    def chunk(row_ids, z):
        hidden = backend_operands.take(head.hidden, row_ids)
        of_rows = backend_operands.take(columns, row_ids, fill_value=spec.columns)
        new = eight_bits.logits_at(spec, head, hidden, of_rows)
        return backend_operands.put(z, row_ids, new)

    zeros = jnp.zeros(columns.shape, spec.stats_dtype)
    zeros = vocab_shards.vary(zeros, spec.part_varying)
    return backend_operands.for_active_chunks(spec.chunk, rows.active, chunk, zeros)


def gradient(
    spec: Spec, source: Factors, rows: TokenRows, dz: SparseDerivative
) -> Factors:
    """Cotangent of the source from the derivative by h Wᵀ at sampled entries.

    The derivative is 0 in inactive rows. The result has the source's dtypes.
    """
    head, head_gradients = source.cast(spec), (None, None)
    dhidden = _to_hidden(spec, head, rows, dz)
    if not spec.frozen_head:
        head_gradients = over_tokens(spec, dz, head.hidden, source, _to_weights)
    return backend_operands.cotangent(spec, Factors(dhidden, *head_gradients), source)


def _to_hidden(spec, head, rows, dz) -> jax.Array:
    """Σ_j dz_j W_j per token, rounded once; a partial sum over vocabulary shards."""
    depth = head.hidden.shape[1]
    parts = spec.shards and spec.shards.same_hidden
    dtype = spec.stats_dtype if parts else spec.compute_dtype
    dhidden = jnp.zeros(head.hidden.shape, dtype)
    dhidden = vocab_shards.vary(dhidden, spec.part_varying)
    if spec.layout == "vd":
        return _add_rows(spec, head.W, rows.active, dz, dhidden)
    width = min(depth, _DEPTH)

    def part(i, dhidden):
        first = jnp.minimum(i * width, depth - width)
        W = lax.dynamic_slice_in_dim(head.W, first, width, axis=0).T
        dh = lax.dynamic_slice_in_dim(dhidden, first, width, axis=1)
        dh = _add_rows(spec, W, rows.active, dz, dh)
        return lax.dynamic_update_slice_in_dim(dhidden, dh, first, axis=1)

    return lax.fori_loop(0, -(-depth // width), part, dhidden)


def _add_rows(spec, W, active, dz, dhidden):
    """Weighted sums of rows of W [V, D], for active tokens of [N, D]."""

    def chunk(row_ids, dhidden):
        columns = backend_operands.take(dz.columns, row_ids, fill_value=spec.columns)
        values = backend_operands.take(dz.values, row_ids)
        slots = jnp.arange(1, columns.shape[1] + 1, dtype=jnp.int32)
        n_slots = jnp.max(jnp.where(columns < spec.columns, slots, 0))

        def slot(k, sums):
            W_rows = W.at[columns[:, k]].get(mode="clip").astype(spec.stats_dtype)
            return sums + values[:, k, None] * W_rows

        sums = jnp.zeros((len(row_ids), W.shape[1]), spec.stats_dtype)
        sums = vocab_shards.vary(sums, spec.part_varying)
        sums = lax.fori_loop(0, n_slots, slot, sums)
        return backend_operands.put(dhidden, row_ids, sums.astype(dhidden.dtype))

    return backend_operands.for_active_chunks(spec.chunk, active, chunk, dhidden)


def over_tokens(
    spec: Spec, dz: SparseDerivative, hidden: jax.Array, source: Factors, sums: Callable
) -> tuple[jax.Array, jax.Array | None]:
    """Gradients of W and of the bias, of the tokens of all devices along `token_axes`.

    Each device gets everyone's entries and hidden states, computes a part of the
    columns by `sums(spec, pairs, hidden, source)`, and sends it to the others: half of
    what an all-reduce sends, and every column is rounded once. The results are typed as
    replicated along those axes.
    """
    if not spec.token_axes:
        return sums(spec, sort_by_column(dz), hidden, source)
    gather = functools.partial(lax.all_gather, axis_name=spec.token_axes, tiled=True)
    dz, hidden = jax.tree.map(gather, (dz, hidden))
    width = -(-spec.columns // lax.axis_size(spec.token_axes))
    columns = dz.columns - lax.axis_index(spec.token_axes) * width
    in_part = (columns >= 0) & (columns < width) & (dz.columns < spec.columns)
    pairs = sort_by_column(dz._replace(columns=jnp.where(in_part, columns, width)))
    axis = 0 if spec.layout == "vd" else 1
    shape = (width, hidden.shape[1])[:: -1 if axis else 1]
    W = jax.ShapeDtypeStruct(shape, source.W.dtype)
    bias: Any = source.bias
    if bias is not None:
        bias = jax.ShapeDtypeStruct((width,), bias.dtype)
    part: Any = Factors(hidden, W, bias)
    dW, dbias = sums(dataclasses.replace(spec, columns=width), pairs, hidden, part)

    def joined(x, axis):
        whole = gather(x, axis=axis, to="invarying")
        return lax.slice_in_dim(whole, 0, spec.columns, axis=axis)

    return joined(dW, axis), None if dbias is None else joined(dbias, 0)


def _to_weights(spec, pairs, hidden, source) -> tuple[jax.Array, jax.Array | None]:
    """Gradients of W and of the bias: float32 sums, a block of columns at a time."""
    axis, depth = (0 if spec.layout == "vd" else 1), hidden.shape[1]
    width = min(spec.columns, max(_BLOCK_NUMBERS // depth, 1))

    def block(i, gradients):
        first = jnp.minimum(i * width, spec.columns - width)  # blocks may overlap
        dW, dbias = _column_sums(spec, hidden, pairs, first, width)
        dW = dW.astype(source.W.dtype)
        dW = dW if spec.layout == "vd" else dW.T
        dW = lax.dynamic_update_slice_in_dim(gradients[0], dW, first, axis)
        if gradients[1] is None:
            return dW, None
        return dW, lax.dynamic_update_slice_in_dim(gradients[1], dbias, first, 0)

    bias = None
    if source.bias is not None:
        bias = jnp.zeros(source.bias.shape, spec.stats_dtype)
    W = jnp.zeros(source.W.shape, source.W.dtype)
    gradients = vocab_shards.vary((W, bias), spec.part_varying)
    return lax.fori_loop(0, -(-spec.columns // width), block, gradients)


def _column_sums(spec, hidden, pairs, first, width):
    """(Σ dz h, Σ dz) over the tokens of each of `width` columns from `first` on."""
    ends = jnp.searchsorted(pairs.columns, jnp.stack([first, first + width]))
    start, end = ends.astype(jnp.int32)
    depth = hidden.shape[1]

    def add(n_pairs, add_pairs, sums):
        def step(i, sums):
            ids = start + i * n_pairs + jnp.arange(n_pairs, dtype=jnp.int32)
            column = backend_operands.take(pairs.columns, ids) - first
            column = jnp.where(ids < end, column, width)
            values = jnp.where(ids < end, backend_operands.take(pairs.values, ids), 0)
            h = hidden.at[backend_operands.take(pairs.tokens, ids)].get(mode="clip")
            return add_pairs(spec, column, values, h, sums)

        return lax.fori_loop(0, (end - start + n_pairs - 1) // n_pairs, step, sums)

    def on_cpu(sums):
        return add(max(_ROW_NUMBERS // depth, 1), _scatter_pairs, sums)

    def elsewhere(sums):
        return add(_PAIRS, _multiply_pairs, sums)

    sums = (
        jnp.zeros((width, depth), spec.stats_dtype),
        jnp.zeros(width, spec.stats_dtype),
    )
    sums = vocab_shards.vary(sums, spec.part_varying)
    return lax.platform_dependent(sums, cpu=on_cpu, default=elsewhere)


def _scatter_pairs(spec, column, values, h, sums):
    """Sums with pairs added by scatter-add, which a CPU does pair by pair."""
    dW, dbias = sums
    terms = values[:, None] * h.astype(spec.stats_dtype)
    return (
        dW.at[column].add(terms, mode="drop", indices_are_sorted=True),
        dbias.at[column].add(values, mode="drop", indices_are_sorted=True),
    )


def _multiply_pairs(spec, column, values, h, sums):
    """Sums with pairs added by a product, deterministic unlike scatter-add.

    The left factor has one value per pair, rounded to hidden's dtype as the exact
    derivative is.
    """
    dW, dbias = sums
    columns = jnp.arange(dW.shape[0], dtype=jnp.int32)
    values = jnp.where(columns[:, None] == column[None], values, 0)
    added = lax.dot_general(
        values.astype(spec.compute_dtype),
        h,
        (((1,), (0,)), ((), ())),
        preferred_element_type=spec.stats_dtype,
    )
    return dW + added, dbias + jnp.sum(values, axis=1)
