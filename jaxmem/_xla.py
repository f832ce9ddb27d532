"""Backend "xla": a loop over chunks of active tokens, full-vocabulary GEMMs; anywhere.

Active rows are numbered first and the loop stops after them, so cost follows what is
not masked while every shape stays static. A row that is not active is never read.

Where the vocabulary is split over devices (spec.shards), each sees its own part of the
logits: `statistics` are parts for `_stats.merge_over`, which `one_pass` calls for each
chunk, and the parts of hidden's cotangent are summed at the end.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxmem import _shards, _stats
from jaxmem._spec import Spec


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


_ALIGNMENT = 64  # columns

# What `one_pass` asks of loss_rows rows at a time: (row ids, their outputs) -> (values
# to keep of each row, cotangents of the outputs). Ids past the end come last; what
# their outputs hold has no influence, and their cotangents are 0.
OfChunk = Callable[[jax.Array, _stats.Outputs], tuple[Any, _stats.Cotangents]]


def forward(spec: Spec, source: Head | Logits, rows: Rows, names) -> dict:
    """The named fields of `Outputs` for every row, 0 where inactive."""
    n_rows = rows.labels.shape[0]
    source = cast(spec, source)

    def chunk(row_ids, outputs):
        labels = take(rows.labels, row_ids)
        stats = _stats.of_tile(_logits(spec, source, rows, row_ids), labels)
        made = _stats.finish(stats, labels < spec.vocab_size)._asdict()
        return {k: put(outputs[k], row_ids, made[k]) for k in outputs}

    outputs = {k: jnp.zeros(n_rows, output_dtype(spec, k)) for k in names}
    outputs = _shards.vary(outputs, spec.varying)
    return for_active_chunks(spec.chunk, rows.active, chunk, outputs)


def statistics(spec: Spec, source: Head | Logits, rows: Rows) -> _stats.Stats:
    """Of this shard's part of the vocabulary for every row; anything where inactive."""
    source = cast(spec, source)

    def chunk(row_ids, made):
        labels = part_labels(spec, rows, row_ids)
        stats = _stats.of_tile(_logits(spec, source, rows, row_ids), labels)
        return put_all(made, row_ids, stats)

    made = no_statistics(spec, rows)
    return for_active_chunks(spec.chunk, rows.active, chunk, made)


def no_statistics(spec: Spec, rows: Rows) -> _stats.Stats:
    """What `statistics` of active rows are put into; no NaN comes from it."""
    ones = jnp.ones(rows.labels.shape, spec.stats_dtype)
    return _shards.vary(_stats.Stats(*(ones,) * 5), spec.part_varying)


def outputs(spec: Spec, rows: Rows, stats: _stats.Stats, names) -> dict:
    """The named fields of `Outputs` of every row, 0 where inactive."""
    row_ids = jnp.arange(rows.labels.shape[0], dtype=jnp.int32)
    made = merged(spec, rows, row_ids, stats)._asdict()
    return {k: jnp.where(rows.active, made[k], jnp.zeros_like(made[k])) for k in names}


def backward(
    spec: Spec, source: Head | Logits, rows: Rows, saved: _stats.Outputs, cotangents
) -> Head | Logits:
    """Cotangent of the source; sums over tokens in the statistics' type."""
    original, source = trained(spec, source), _aligned(spec, cast(spec, source))

    def chunk(row_ids, sums):
        z = _logits(spec, source, rows, row_ids)
        row_outputs = _stats.Outputs(*(take(x, row_ids) for x in saved))
        # Rows past the last active one: ln S = inf makes every p zero.
        log_sum = take(saved.log_sum, row_ids, fill_value=jnp.inf)
        row_outputs = row_outputs._replace(log_sum=log_sum)
        g = _stats.Cotangents(*(take(x, row_ids) for x in cotangents))
        c = _stats.coefficients(row_outputs, g)
        dz = _stats.dlogits(z, part_labels(spec, rows, row_ids), row_outputs, c)
        dz = _unscale(spec, rows, row_ids, z, dz)
        return _accumulate(spec, source, row_ids, dz, sums)

    sums = for_active_chunks(spec.chunk, rows.active, chunk, _zero_sums(spec, source))
    return jax.tree.map(
        lambda total, primal: unpadded(total, primal).astype(primal.dtype),
        sum_over_shards(spec, sums),
        original,
    )


def one_pass(
    spec: Spec, source: Head, rows: Rows, of_chunk: OfChunk, made
) -> tuple[Any, Head]:
    """`backward` for cotangents that follow from the outputs: no logits made twice.

    Returns:
        made, with the values of_chunk in the place of active rows; and the cotangent of
        the source, with the sums over tokens in the statistics' type.
    """
    head = _aligned(spec, cast(spec, source))
    n_rows = rows.labels.shape[0]

    def chunk(row_ids, carry):
        made, sums = carry
        z = _logits(spec, head, rows, row_ids)
        labels = part_labels(spec, rows, row_ids)
        outputs = merged(spec, rows, row_ids, _stats.of_tile(z, labels))
        values, g = of_chunk(row_ids, outputs)
        made = put_all(made, row_ids, values)
        # Rows past the last active one, as in `backward`.
        log_sum = jnp.where(row_ids < n_rows, outputs.log_sum, jnp.inf)
        outputs = outputs._replace(log_sum=log_sum)
        dz = _stats.dlogits(z, labels, outputs, _stats.coefficients(outputs, g))
        dz = _unscale(spec, rows, row_ids, z, dz)
        return made, _accumulate(spec, head, row_ids, dz, sums)

    carry = _shards.vary(made, spec.varying), _zero_sums(spec, head)
    made, sums = for_active_chunks(spec.chunk, rows.active, chunk, carry)
    sums = jax.tree.map(unpadded, sums, trained(spec, source))
    return made, sum_over_shards(spec, sums)


def loss_rows(spec: Spec, source: Head | Logits) -> int:
    """How many tokens' losses `one_pass` has made at a time."""
    return spec.chunk


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


def _logits(spec, source, rows, row_ids):
    """Scaled logits [C, V] of the rows; -inf in the padding of the vocabulary."""
    if isinstance(source, Logits):
        z = take(source.logits, row_ids).astype(spec.stats_dtype)
    else:
        contract = ((1,), (1 if spec.layout == "vd" else 0,))
        z = lax.dot_general(
            take(source.hidden, row_ids),
            source.W,
            (contract, ((), ())),
            preferred_element_type=spec.stats_dtype,
        )
        if source.bias is not None:
            z = z + source.bias[None, :]
    z = _scale(spec, rows, row_ids, z)
    if spec.vocab_size < z.shape[1] * (spec.shards.count if spec.shards else 1):
        column = lax.broadcasted_iota(jnp.int32, z.shape, 1)
        z = jnp.where(column < spec.vocab_size - first_column(spec), z, -jnp.inf)
    return z


def first_column(spec) -> Any:
    """Where this shard's part of the vocabulary begins."""
    return lax.axis_index(spec.shards.axes) * spec.columns if spec.shards else 0


def part_labels(spec: Spec, rows: Rows, row_ids) -> jax.Array:
    """Labels as columns of this shard's part; those of other parts lie outside it."""
    labels = take(rows.labels, row_ids)
    return labels - first_column(spec) if spec.shards else labels


def _scale(spec, rows, row_ids, z):
    """Logits after softcap and temperature, of any columns."""
    if spec.softcap is not None:
        z = spec.softcap * jnp.tanh(z / spec.softcap)
    if rows.temperature is not None:
        z = z / take(rows.temperature, row_ids, fill_value=1)[:, None]
    return z


def _unscale(spec, rows, row_ids, z, dz):
    """Derivative with respect to the logits before softcap and temperature."""
    if rows.temperature is not None:
        temperature = take(rows.temperature, row_ids, fill_value=1)[:, None]
        z, dz = z * temperature, dz / temperature
    if spec.softcap is not None:
        z = jnp.where(jnp.isfinite(z), z, 0)  # padded columns, whose dz is 0
        dz = dz * (1 - (z / spec.softcap) ** 2)
    return dz


def _zero_sums(spec, source):
    """Accumulators: whole rows in the compute type, all else in the statistics'."""
    if isinstance(source, Logits):
        return Logits(jnp.zeros_like(source.logits))
    parts = spec.shards and spec.shards.same_hidden
    sums = Head(
        hidden=jnp.zeros_like(source.hidden, spec.stats_dtype if parts else None),
        W=jnp.zeros(source.W.shape, spec.stats_dtype),
        bias=None if source.bias is None else jnp.zeros_like(source.bias),
    )
    return _shards.vary(trained(spec, sums), spec.part_varying)


def _accumulate(spec, source, row_ids, dz, sums):
    if isinstance(source, Logits):
        return Logits(put(sums.logits, row_ids, dz.astype(source.logits.dtype)))
    dbias = None if sums.bias is None else sums.bias + jnp.sum(dz, axis=0)
    dz = dz.astype(spec.compute_dtype)  # one rounding, after f32 arithmetic
    over_v = ((1,), (0 if spec.layout == "vd" else 1,))
    dh = lax.dot_general(
        dz, source.W, (over_v, ((), ())), preferred_element_type=spec.stats_dtype
    )
    dhidden = put(sums.hidden, row_ids, dh.astype(sums.hidden.dtype))
    if sums.W is None:
        return Head(dhidden, None, None)
    h = take(source.hidden, row_ids)
    left, right = (dz, h) if spec.layout == "vd" else (h, dz)
    dw = lax.dot_general(
        left, right, (((0,), (0,)), ((), ())), preferred_element_type=spec.stats_dtype
    )
    return Head(dhidden, sums.W + dw, dbias)


def trained(spec, source):
    """The source, or its cotangent, without what is frozen."""
    return source._replace(W=None, bias=None) if spec.frozen_head else source


def cast(spec, source):
    """GEMMs run in hidden's type: W is cast to it once, outside the loop."""
    if isinstance(source, Logits):
        return source
    bias = None if source.bias is None else source.bias.astype(spec.stats_dtype)
    return Head(source.hidden, source.W.astype(spec.compute_dtype), bias)


def _aligned(spec, source):
    """W and bias with a vocabulary of whole `_ALIGNMENT`, if products run on a GPU.

    The rows of logits' derivatives then begin where tensor cores can load them. On an
    H200 with D=4096, V=50257 and 16 bits, 4.6 GEMMs with gradients instead of 8.6.
    """
    after = -spec.columns % _ALIGNMENT
    if isinstance(source, Logits) or spec.shards or not after:
        return source
    if jax.default_backend() != "gpu":
        return source
    W = jnp.pad(source.W, [(0, after), (0, 0)][:: 1 if spec.layout == "vd" else -1])
    bias = None if source.bias is None else jnp.pad(source.bias, (0, after))
    return Head(source.hidden, W, bias)


def unpadded(total, primal):
    """What of a cotangent belongs to an array that was padded."""
    return total[tuple(map(slice, primal.shape))]


def output_dtype(spec, name):
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
