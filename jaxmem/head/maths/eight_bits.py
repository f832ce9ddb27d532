"""A forward product of 8-bit factors, corrected by the entries that sampling keeps.

docs/sampled.md has the estimator. Logits ẑ of all columns but the label's are products
in 8 bits, with a scale for each row, except for `CHANNELS` of the D channels; logits z
of the label and of the entries that are kept are computed from W itself.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxmem.head.maths import backend_operands, column_sampling, row_stats, vocab_shards
from jaxmem.head.maths.backend_operands import Factors, TokenRows
from jaxmem.head.maths.column_sampling import Entries, Sampling
from jaxmem.head.maths.row_stats import Normaliser, Outputs, Stats
from jaxmem.head.maths.spec import Spec

CHANNELS = 16  # in 16 bits; half of them are chosen from W, half from hidden
ERROR = "forward_error"  # the name of `Corrected.error` among outputs and metrics
_LARGEST = 127
_DEPTH = 128  # of W [D, V] at a time, whose rows are transposed
_LOOKED_AT = 4096  # rows of W, evenly spaced, from which channels are chosen


class Rounded(NamedTuple):
    """The rows of a matrix [n, D]: scale · values, and some channels in 16 bits."""

    values: jax.Array  # int8 [n, D], 0 in channels that hidden has in 16 bits
    scale: jax.Array  # float32 [n]
    wide: jax.Array  # [n, CHANNELS]


class EightBits(NamedTuple):
    """Operands that a call's tokens share: W's copy, and the channels outside of it."""

    W: Rounded  # [V, D]; its values and scale do not depend on hidden
    channels: jax.Array  # int32 [CHANNELS]


class Corrected(NamedTuple):
    """Results of rows."""

    outputs: Outputs
    entries: Entries
    error: jax.Array  # estimated standard deviation of ln Σ_j e^z_j, [C], in nats


def check(spec: Spec, source: Any, rows: TokenRows) -> None:
    """Raise a NotImplementedError where a forward pass in 8 bits has no meaning."""
    depth = source.hidden.shape[1]
    known = {
        "bfloat16 hidden states": spec.compute_dtype == jnp.bfloat16,
        f"at least {2 * CHANNELS} channels": depth >= 2 * CHANNELS,
        "a head without bias": source.bias is None,
        "a head without softcap": spec.softcap is None,
        "temperature=1.0": rows.temperature is None,
        "the whole vocabulary, without axis_name": spec.shards is None,
    }
    missing = [name for name, is_met in known.items() if not is_met]
    if missing:
        raise NotImplementedError(
            f"gradient=Sample({spec.gradient_samples}, forward={spec.forward!r}) needs "
            f"{' and '.join(missing)}; here hidden is {spec.compute_dtype} with "
            f"D={depth}; leave forward out for the exact one"
        )


def copy_bytes(columns: int, depth: int) -> int:
    """Bytes of W's copy: its numbers, a scale a row, and channels in 16 bits."""
    return columns * (depth + 4 + 2 * CHANNELS)


def of_call(spec: Spec, source: Factors, rows: TokenRows) -> EightBits:
    """W in 8 bits, and the channels in 16 bits, chosen from W and from active rows.

    W's values and scales depend on W alone, so that XLA computes them once for all
    micro-batches of a loop.
    """
    head = source.cast(spec)
    W = head.W if spec.layout == "vd" else head.W.T
    step = max(len(W) // _LOOKED_AT, 1)
    W_channels = _largest_channels(_relative_sizes(W[::step]))
    x = jnp.where(rows.active[:, None], head.hidden, 0)
    hidden_channels = _largest_channels(_relative_sizes(x).at[W_channels].set(-1))
    channels = jnp.concatenate([W_channels, hidden_channels])
    copy = rounded(W, W_channels)
    return EightBits(copy._replace(wide=W[:, channels]), channels)


def rounded(x: jax.Array, channels: jax.Array) -> Rounded:
    """Rows in 8 bits, without these channels, which are in 16 bits."""
    wide, x = x[:, channels], x.astype(jnp.float32)
    inside = jnp.ones(x.shape[1], jnp.bool_).at[channels].set(False)
    x = jnp.where(inside, x, 0)
    scale = jnp.max(jnp.abs(x), axis=1) / _LARGEST
    scale = jnp.maximum(scale, jnp.finfo(jnp.float32).tiny)
    return Rounded(jnp.round(x / scale[:, None]).astype(jnp.int8), scale, wide)


def _relative_sizes(x):
    """The largest size of each channel, in root mean squares of its row."""
    x = jnp.abs(x.astype(jnp.float32))
    squares = jnp.maximum(jnp.mean(x * x, axis=1, keepdims=True), 1e-30)
    return jnp.max(x * lax.rsqrt(squares), axis=0)


def _largest_channels(sizes):
    return lax.top_k(sizes, CHANNELS // 2)[1].astype(jnp.int32)


def logits_at(spec: Spec, head: Factors, hidden: jax.Array, columns: jax.Array):
    """Products h · W_j [C, n] of some columns of each row, in the statistics' dtype.

    Those of columns past the last one are undefined.
    """
    if spec.layout == "vd":
        return _products_at(spec, head.W, hidden, columns)
    depth = hidden.shape[1]
    width = min(depth, _DEPTH)

    def part(i, z):
        first = jnp.minimum(i * width, depth - width)
        W = lax.dynamic_slice_in_dim(head.W, first, width, axis=0).T
        h = lax.dynamic_slice_in_dim(hidden, first, width, axis=1)
        is_new = first + jnp.arange(width) >= i * width  # the last part overlaps
        return z + _products_at(spec, W, jnp.where(is_new, h, 0), columns)

    zeros = jnp.zeros(columns.shape, spec.stats_dtype)
    zeros = vocab_shards.vary(zeros, spec.part_varying)
    return lax.fori_loop(0, -(-depth // width), part, zeros)


def _products_at(spec, W, hidden, columns):
    """`logits_at`, of W [V, D]."""
    slots = jnp.arange(1, columns.shape[1] + 1, dtype=jnp.int32)
    n_slots = jnp.max(jnp.where(columns < spec.columns, slots, 0))

    def slot(k, z):
        W_rows = W.at[columns[:, k]].get(mode="clip").astype(spec.stats_dtype)
        return z.at[:, k].set(jnp.sum(W_rows * hidden.astype(spec.stats_dtype), axis=1))

    zeros = jnp.zeros(columns.shape, spec.stats_dtype)
    zeros = vocab_shards.vary(zeros, spec.part_varying)
    return lax.fori_loop(0, n_slots, slot, zeros)


def label_logits(spec: Spec, head: Factors, hidden: jax.Array, labels: jax.Array):
    """Logits z of the labels [C], -inf where there is no such column."""
    z = logits_at(spec, head, hidden, labels[:, None])[:, 0]
    return jnp.where((labels >= 0) & (labels < spec.vocab_size), z, -jnp.inf)


def normaliser(others: Stats, label_logit: jax.Array) -> Normaliser:
    """The normaliser of ẑ and the label's z, by which entries are selected."""
    stats = row_stats.merge(others, row_stats.of_label(label_logit))
    whole = row_stats.finish(stats, jnp.ones(label_logit.shape, jnp.bool_))
    return Normaliser(whole.max, whole.log_sum)


def corrected(
    sampling: Sampling, others: Stats, selected: Entries, z: jax.Array,
    label_logit: jax.Array, label_exists: jax.Array,
) -> Corrected:  # fmt: skip
    """Results of rows, from sums of e^ẑ and logits z [C, K] of entries that are kept.

    `others` are sums over all columns but the label's, `selected` has p̂ of ẑ and
    `normaliser`. The entries of the result have p of z and weights p / q.
    """
    kept, rows = selected.p > 0, normaliser(others, label_logit)
    q = column_sampling.units(sampling, selected.p).astype(z.dtype) / sampling.one
    inverse = jnp.where(kept, 1 / jnp.where(kept, q, 1), 0)
    base = row_stats.finite(others.max)
    before = (
        jnp.log(jnp.where(kept, selected.p, 1))
        + (rows.max - base + rows.log_sum)[:, None]
    )
    before = jnp.where(kept, before, 0)  # ẑ - max
    after = jnp.where(kept, z - base[:, None], 0)
    e_before, e_after = jnp.exp(before), jnp.exp(after)

    def added(of_z, of_rounded):
        return jnp.sum(inverse * (of_z - of_rounded), axis=1)

    sums = others._replace(
        sum_others=others.sum_others + added(e_after, e_before),
        sum_shifted=others.sum_shifted + added(e_after * after, e_before * before),
        sum_squares=others.sum_squares + added(e_after**2, e_before**2),
    )
    top = jnp.max(jnp.where(kept, z, -jnp.inf), axis=1)
    # The column with the largest ẑ, if it is certain to be kept, has a z of its own.
    certain = jnp.exp(others.max - rows.max - rows.log_sum) * sampling.rate >= 1
    largest = jnp.where(
        certain & jnp.any(kept, axis=1), top, jnp.maximum(top, others.max)
    )
    stats = row_stats.merge(
        row_stats.relative_to(sums, largest), row_stats.of_label(label_logit)
    )
    outputs = row_stats.finish(stats, label_exists)
    log_p = after + (base - outputs.max - outputs.log_sum)[:, None]
    p = jnp.where(kept, jnp.exp(log_p), 0)
    # Of independent draws; those of systematic sampling vary less.
    square = jnp.sum((1 - q) * (inverse * (e_after - e_before)) ** 2, axis=1)
    error = jnp.sqrt(square) * jnp.exp(base - outputs.max - outputs.log_sum)
    return Corrected(outputs, Entries(selected.columns, p, p * inverse), error)


def nothing(
    spec: Spec, sampling: Sampling, rows: TokenRows, names
) -> tuple[dict, Entries]:
    """Results of rows that are not active: the named outputs, and entries."""
    outputs = backend_operands.no_outputs(spec, names, rows.labels.shape)
    entries = column_sampling.none(sampling, len(rows.labels), spec.stats_dtype)
    entries = entries._replace(weights=jnp.zeros_like(entries.p))
    return outputs, vocab_shards.vary(entries, spec.varying)


def put(results: tuple[dict, Entries], row_ids, new: Corrected):
    """The results of all rows, as of `nothing`, with new ones of some rows."""
    outputs, entries = results
    values = new.outputs._asdict() | {ERROR: new.error}
    values = {k: values[k] for k in outputs}
    return backend_operands.put_all((outputs, entries), row_ids, (values, new.entries))
