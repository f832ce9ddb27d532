"""Operands of a backend (a head or logits, rows of tokens), and chunks of rows."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxmem.head.maths import row_stats, vocab_shards
from jaxmem.head.maths.spec import Layout, Spec


class Factors(NamedTuple):
    """Operands of the GEMM: hidden [N, D], W [V, D] or [D, V], bias [V] or None."""

    hidden: jax.Array
    W: Any  # jax.Array; None in the cotangent of a frozen head
    bias: jax.Array | None

    def cast(self, spec: Spec) -> "Factors":
        """The head in the dtypes of the GEMMs: W is cast to hidden's outside loops."""
        bias = None if self.bias is None else self.bias.astype(spec.stats_dtype)
        return Factors(self.hidden, self.W.astype(spec.compute_dtype), bias)

    def columns(self, layout: Layout | None) -> int:
        """Columns of the logits, including padding."""
        return self.W.shape[0 if layout == "vd" else 1]

    @property
    def depth(self) -> int:
        """Products of a logit."""
        return self.hidden.shape[1]

    def shapes(self, tokens: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Shapes of the operands as given, for `jaxmem.report()`."""
        return {"hidden": (*tokens, self.hidden.shape[-1]), "W": self.W.shape}


class CallerLogits(NamedTuple):
    """Logits that the caller already has, [N, V]."""

    logits: jax.Array

    def cast(self, spec: Spec) -> "CallerLogits":
        """See `Factors.cast`."""
        return self

    def columns(self, layout: Layout | None) -> int:
        """See `Factors.columns`."""
        return self.logits.shape[-1]

    @property
    def depth(self) -> None:
        """See `Factors.depth`: there is no product."""
        return None

    def shapes(self, tokens: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """See `Factors.shapes`."""
        return {"logits": (*tokens, self.logits.shape[-1])}


class TokenRows(NamedTuple):
    """Operands of each token's row besides its logits; arrays [N]."""

    labels: jax.Array  # int32, ids in the whole vocabulary
    active: jax.Array  # bool
    temperature: jax.Array | None  # in the statistics' dtype; None means 1
    draws: jax.Array | None = None  # uint32, uniform; None: nothing is sampled
    recorded: Any = None  # RecordedEntries; None: logits are of this call


class Ragged(NamedTuple):
    """A list of ids for each token i: `ids[starts[i] : starts[i] + counts[i]]`."""

    starts: jax.Array  # int32 [N]
    counts: jax.Array  # int32 [N]; -1 for a token whose list is not valid
    ids: jax.Array  # int32 [M], of all tokens


def no_statistics(spec: Spec, rows: TokenRows) -> row_stats.Stats:
    """Initial statistics of all rows; they give finite outputs in inactive rows."""
    ones = jnp.ones(rows.labels.shape, spec.stats_dtype)
    return vocab_shards.vary(row_stats.Stats(*(ones,) * 5), spec.part_varying)


def outputs(spec: Spec, rows: TokenRows, stats: row_stats.Stats, names) -> dict:
    """The named fields of `Outputs` for every row, 0 in inactive rows."""
    row_ids = jnp.arange(rows.labels.shape[0], dtype=jnp.int32)
    all_outputs = merged(spec, rows, row_ids, stats)._asdict()
    return {
        k: jnp.where(rows.active, all_outputs[k], jnp.zeros_like(all_outputs[k]))
        for k in names
    }


def merged(
    spec: Spec, rows: TokenRows, row_ids, stats: row_stats.Stats
) -> row_stats.Outputs:
    """Outputs of rows, from the statistics that this device has of them."""
    if spec.shards:
        stats = row_stats.merge_over(stats, spec.shards.axes)
    outputs = row_stats.finish(stats, take(rows.labels, row_ids) < spec.vocab_size)
    return vocab_shards.vary(outputs, spec.varying)


def sum_over_shards(spec: Spec, sums) -> Any:
    """The cotangents, with hidden's all-reduced and then rounded to hidden's dtype."""
    if not (spec.shards and spec.shards.same_hidden):
        return sums
    dhidden = lax.psum(sums.hidden, spec.shards.same_hidden)
    return sums._replace(hidden=dhidden.astype(spec.compute_dtype))


def cotangent(spec: Spec, sums, source) -> Any:
    """`sum_over_shards`, in the dtypes of what of the source is differentiated."""
    sums, like = sum_over_shards(spec, sums), trained(spec, source)
    return jax.tree.map(lambda total, x: total.astype(x.dtype), sums, like)


def for_active_chunks(chunk, active, body, carry, n_chunks: int | None = None):
    """Run `body(row_ids, carry) -> carry` over chunks of rows, active ones first.

    Indices past the last row are N. Only chunks with an active row run, unless their
    number is given. Every shard of a vocabulary has the same rows and so runs the same
    number of chunks. The body may therefore contain collectives over the shards.
    """
    n_rows = active.shape[0]
    if n_rows == 0:
        return carry
    n_padded = -(-n_rows // chunk) * chunk
    if n_chunks is None:
        n_chunks = (jnp.sum(active, dtype=jnp.int32) + chunk - 1) // chunk
    order = jnp.nonzero(active, size=n_padded, fill_value=n_rows)[0].astype(jnp.int32)

    def step(i, carry):
        return body(lax.dynamic_slice(order, (i * chunk,), (chunk,)), carry)

    return lax.fori_loop(0, n_chunks, step, carry)


def for_all_chunks(chunk, active, body, carry):
    """`for_active_chunks`, which also runs the body where a chunk has no active row.

    For a body that costs little. The number of iterations is known to XLA; if it is
    computed on a GPU, the host waits for the GPU before each iteration.
    """
    n_chunks = -(-active.shape[0] // chunk)
    return for_active_chunks(chunk, active, body, carry, n_chunks)


def first_column(spec) -> Any:
    """The vocabulary index of the first column of this shard, or of a group in it."""
    columns = spec.shard_columns or spec.columns
    first = lax.axis_index(spec.shards.axes) * columns if spec.shards else 0
    if spec.shard_columns is None:
        return first
    # Unknown to XLA, on one device too: it would drop masks that hide no column, and
    # then fuse, and round, otherwise than where it cannot know that.
    return lax.optimization_barrier(first + jnp.int32(spec.first))


def part_labels(spec: Spec, rows: TokenRows, row_ids) -> jax.Array:
    """Labels as indices of the columns here; out of range if elsewhere."""
    labels = take(rows.labels, row_ids)
    return labels - first_column(spec) if spec.is_part else labels


def trained(spec, source):
    """The source, or its cotangent, with None for frozen parameters."""
    return source._replace(W=None, bias=None) if spec.frozen_head else source


def unpadded(total, primal):
    """The part of a padded array's cotangent that belongs to the unpadded array."""
    return total[tuple(map(slice, primal.shape))]


def rounded(spec: Spec, totals, primals) -> Any:
    """Cotangents without padding, in the dtypes of the primals.

    Hidden's stays in the dtype of the sums if it is one term of a sum over groups.
    """
    cotangents = jax.tree.map(_round_like, totals, primals)
    if spec.shard_columns:
        return cotangents._replace(hidden=totals.hidden)
    return cotangents


def _round_like(total, primal):
    return total[tuple(map(slice, primal.shape))].astype(primal.dtype)


def no_outputs(spec: Spec, names, shape: tuple[int, ...]) -> dict:
    """The named fields of `Outputs` of inactive rows."""
    zeros = dict.fromkeys(names, jnp.zeros(shape, spec.stats_dtype))
    if "is_argmax" in zeros:
        zeros["is_argmax"] = jnp.zeros(shape, jnp.bool_)
    return vocab_shards.vary(zeros, spec.varying)


def take(x, row_ids, fill_value: float = 0) -> Any:
    """The rows of x at `row_ids`; `fill_value` for ids past the end; None for None."""
    if x is None:
        return None
    return x.at[row_ids].get(mode="fill", fill_value=fill_value)


def put(x, row_ids, values):
    """A copy of x with `values` in its rows; ids past the end are dropped."""
    return x.at[row_ids].set(values, mode="drop")


def put_all(tree, row_ids, values) -> Any:
    """Apply `put` to every array of a tree."""
    return jax.tree.map(lambda x, new: put(x, row_ids, new), tree, values)
