"""A backend's operands: a head or logits, rows of tokens, and chunks of active rows."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxmem.core import shards as _shards, stats as _stats
from jaxmem.core.spec import Spec


class Head(NamedTuple):
    """Logits still to be made: hidden [N, D], W [V, D] or [D, V], bias [V] or None."""

    hidden: jax.Array
    W: Any  # jax.Array; None in the cotangent of a frozen head
    bias: jax.Array | None


class Logits(NamedTuple):
    """Logits that the caller already has, [N, V]."""

    logits: jax.Array


class Rows(NamedTuple):
    """What is known of each token before its logits; arrays of [N]."""

    labels: jax.Array  # int32, of the whole vocabulary
    active: jax.Array  # bool
    temperature: jax.Array | None  # statistics' type; None is 1
    draws: jax.Array | None = None  # uint32, uniform; None: nothing is sampled


def no_statistics(spec: Spec, rows: Rows) -> _stats.Stats:
    """What `statistics` of active rows are put into; no NaN comes from it."""
    ones = jnp.ones(rows.labels.shape, spec.stats_dtype)
    return _shards.vary(_stats.Stats(*(ones,) * 5), spec.part_varying)


def outputs(spec: Spec, rows: Rows, stats: _stats.Stats, names) -> dict:
    """The named fields of `Outputs` of every row, 0 where inactive."""
    row_ids = jnp.arange(rows.labels.shape[0], dtype=jnp.int32)
    made = merged(spec, rows, row_ids, stats)._asdict()
    return {k: jnp.where(rows.active, made[k], jnp.zeros_like(made[k])) for k in names}


def merged(spec: Spec, rows: Rows, row_ids, stats: _stats.Stats) -> _stats.Outputs:
    """Outputs of rows, from their statistics on this device."""
    if spec.shards:
        stats = _stats.merge_over(stats, spec.shards.axes)
    outputs = _stats.finish(stats, take(rows.labels, row_ids) < spec.vocab_size)
    return _shards.vary(outputs, spec.varying)


def sum_over_shards(spec: Spec, sums) -> Any:
    """With the parts of hidden's cotangent in one, rounded once to hidden's type."""
    if isinstance(sums, Logits) or not (spec.shards and spec.shards.same_hidden):
        return sums
    dhidden = lax.psum(sums.hidden, spec.shards.same_hidden)
    return sums._replace(hidden=dhidden.astype(spec.compute_dtype))


def for_active_chunks(chunk, active, body, carry):
    """carry = body(row ids of the chunk, carry), for as many chunks as are active.

    As many on every shard of a vocabulary, whose devices have the same rows: there the
    body may wait for all of them.
    """
    n_rows = active.shape[0]
    n_padded = -(-n_rows // chunk) * chunk
    order = jnp.nonzero(active, size=n_padded, fill_value=n_rows)[0].astype(jnp.int32)
    n_chunks = (jnp.sum(active, dtype=jnp.int32) + chunk - 1) // chunk

    def step(i, carry):
        return body(lax.dynamic_slice(order, (i * chunk,), (chunk,)), carry)

    return lax.fori_loop(0, n_chunks, step, carry)


def first_column(spec) -> Any:
    """Where this shard's part of the vocabulary begins."""
    return lax.axis_index(spec.shards.axes) * spec.columns if spec.shards else 0


def part_labels(spec: Spec, rows: Rows, row_ids) -> jax.Array:
    """Labels as columns of this shard's part; those of other parts lie outside it."""
    labels = take(rows.labels, row_ids)
    return labels - first_column(spec) if spec.shards else labels


def trained(spec, source):
    """The source, or its cotangent, without what is frozen."""
    return source._replace(W=None, bias=None) if spec.frozen_head else source


def cast(spec, source):
    """GEMMs run in hidden's type: W is cast to it once, outside the loop."""
    if isinstance(source, Logits):
        return source
    bias = None if source.bias is None else source.bias.astype(spec.stats_dtype)
    return Head(source.hidden, source.W.astype(spec.compute_dtype), bias)


def unpadded(total, primal):
    """What of a cotangent belongs to an array that was padded."""
    return total[tuple(map(slice, primal.shape))]


def output_dtype(spec: Spec, name: str):
    """The type of a field of `Outputs`."""
    return jnp.bool_ if name == "is_argmax" else spec.stats_dtype


def take(x, row_ids, fill_value: float = 0) -> Any:
    """Rows of x; `fill_value` for ids past the end. None stays None."""
    if x is None:
        return None
    return x.at[row_ids].get(mode="fill", fill_value=fill_value)


def put(x, row_ids, values):
    """x with its rows replaced; ids past the end are dropped."""
    return x.at[row_ids].set(values, mode="drop")


def put_all(tree, row_ids, values) -> Any:
    """`put` of every array in a tree."""
    return jax.tree.map(lambda x, new: put(x, row_ids, new), tree, values)
