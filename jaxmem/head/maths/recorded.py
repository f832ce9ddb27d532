"""Entries recorded with a token's old logits, and its statistics under new weights.

docs/sampled.md has the estimator. Let z0 be a token's logits when it was recorded,
Z0 = Σ_j e^z0_j and p0 = e^z0 / Z0. `column_sampling` keeps column j ≠ y with
probability q_j of p0_j, and the label y always. With new logits z1 of the kept columns
S and of the label alone, a sum over the vocabulary of a function f of the logits is
estimated by

    Σ_j f(z1_j) ≈ Σ_j f(z0_j) + f(z1_y) - f(z0_y) + Σ_(j in S) (f(z1_j) - f(z0_j)) / q_j

without bias, and without any error where no logit has changed.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmem.head.maths import (
    backend_operands,
    checks,
    column_sampling,
    row_stats,
    scaling,
    vocab_shards,
)
from jaxmem.head.maths.backend_operands import Factors, TokenRows
from jaxmem.head.maths.column_sampling import Entries, Sampling
from jaxmem.head.maths.row_stats import Outputs, Stats
from jaxmem.head.maths.spec import Spec

EMPTY = np.iinfo(np.int32).max  # the column of an empty slot
# A row has no estimate if Ẑ1 / Z0 is at most the first, where rounding leaves few
# digits, or if a logit is above ln Z0 by the second, whose squares overflow.
SMALLEST_RATIO, LARGEST_RISE = 2.0**-10, 30.0


class RecordedEntries(NamedTuple):
    """Logits of few columns of each token, and statistics of its whole distribution.

    `jaxmem.Recorded` derives the statistics under later weights from them. Logits are
    scaled: after bias, softcap and temperature. They are constants for every gradient.
    A masked token has no entries, and zeros.

    Attributes:
        columns: int32 [..., K], ids in the whole vocabulary; an empty slot has one past
            the last column.
        logits: float32 [..., K], of these columns; undefined in empty slots.
        label_logit: float32 [...], of the label, which is not among the columns.
        logsumexp: float32 [...], ln Z0.
        entropy: float32 [...], of p0, exact.
        sum_pi_squared: float32 [...], of p0, exact.
    """

    columns: Any
    logits: Any
    label_logit: Any
    logsumexp: Any
    entropy: Any
    sum_pi_squared: Any

    @property
    def k(self) -> int:
        """Slots of a token."""
        return self.columns.shape[-1]


def sampling_of(k: int, columns: int) -> Sampling:
    """The sampling of recorded entries, over all columns of the logits.

    Its margin is that of kernels that find entries by bounds, so that probabilities of
    a record do not depend on what made it.
    """
    return Sampling(k, columns, column_sampling.MARGIN)


def record(
    logits: jax.Array, labels: jax.Array, k: int, draws: jax.Array
) -> RecordedEntries:
    """Entries of rows of scaled logits that are in memory.

    Args:
        logits: [B, V], -inf in columns of padding.
        labels: int32 [B], such as the ids that were sampled; outside [0, V) masked.
        k: slots of a token, a Python integer below V.
        draws: uniform uint32 [B], one for each token.
    """
    z, labels, n_columns = jnp.asarray(logits), jnp.asarray(labels), logits.shape[1]
    z = z.astype(jnp.promote_types(z.dtype, jnp.float32))
    sampling = sampling_of(k, n_columns)
    exists = (labels >= 0) & (labels < n_columns)
    stats, exps = row_stats.of_tile(z, jnp.where(exists, labels, -1))
    outputs = row_stats.finish(stats, exists)
    scale = column_sampling.scale(stats.max, outputs)
    starts = column_sampling.starts(sampling, draws)
    selected = column_sampling.select(sampling, exps, scale, starts)
    kept = column_sampling.at_columns(z, selected.columns)
    return of_rows(selected, kept, stats.label_logit, outputs, exists)


def of_rows(
    selected: Entries, z: jax.Array, label_logit: jax.Array, outputs: Outputs, exists
) -> RecordedEntries:
    """A record from selected entries, their logits [N, K], and outputs of rows.

    The entries of rows that do not exist are empty, and their numbers 0.
    """
    live = (selected.p > 0) & exists[:, None]
    statistics = label_logit, outputs.logsumexp, outputs.entropy, outputs.sum_pi_squared
    return RecordedEntries(
        jnp.where(live, selected.columns, EMPTY),
        jnp.where(live, z, 0),
        *(jnp.where(exists, x, 0) for x in statistics),
    )


def compact(entries: RecordedEntries) -> RecordedEntries:
    """Slots in the order of their columns, empty ones last."""
    columns, logits = lax.sort((entries.columns, entries.logits), num_keys=1)
    return entries._replace(columns=columns, logits=logits)


def check(entries: Any, shape: tuple[int, ...]) -> RecordedEntries:
    """The entries of tokens of this shape, as arrays; an error names a wrong one."""
    if not isinstance(entries, RecordedEntries):
        raise TypeError(
            "gradient=Recorded(entries) must have jaxmem.RecordedEntries, got "
            f"{checks.brief(entries)}"
        )
    name = "gradient.entries"
    arrays = RecordedEntries(
        *(
            checks.as_array(f"{name}.{field}", x)
            for field, x in zip(entries._fields, entries, strict=True)
        )
    )
    for field, x in arrays._asdict().items():
        of_slots, is_columns = field in ("columns", "logits"), field == "columns"
        # 16 bits are too few: the error of e^z grows with the size of z.
        good = (jnp.int32, jnp.int64) if is_columns else (jnp.float32, jnp.float64)
        if x.dtype not in good:
            expected = "int32" if is_columns else "float32"
            raise TypeError(f"{name}.{field} must be {expected}, got {x.dtype}")
        expected = (*shape, arrays.k) if of_slots else shape
        if x.shape != expected:
            raise ValueError(
                f"{name}.{field} must have shape {expected}, that of the tokens"
                f"{' and K slots' if of_slots else ''}, got {x.shape}"
            )
    return arrays


def read(entries: Any, spec: Spec, shape: tuple[int, ...]) -> RecordedEntries:
    """`check`, with all tokens in one axis, in the statistics' dtype."""
    arrays = check(entries, shape)
    columns, *floats = (
        jnp.reshape(x, (math.prod(shape), *x.shape[len(shape) :])) for x in arrays
    )
    floats = (x.astype(spec.stats_dtype) for x in floats)
    return RecordedEntries(columns.astype(jnp.int32), *floats)


class OwnEntries(NamedTuple):
    """The recorded entries [N, K] of this shard of the vocabulary."""

    columns: jax.Array  # of this shard; `spec.columns` in an empty slot
    logits: jax.Array
    inverse: jax.Array  # 1 / q; 0 in an empty slot


def own_entries(spec: Spec, rows: TokenRows) -> OwnEntries:
    """The entries whose new logits this shard computes; never one of the label."""
    kept, first = rows.recorded, backend_operands.first_column(spec)
    columns, logits = kept.columns - first, kept.logits
    live = (kept.columns >= 0) & (kept.columns < spec.vocab_size)
    live &= (columns >= 0) & (columns < spec.columns)
    live &= (kept.columns != rows.labels[:, None]) & rows.active[:, None]
    columns = jnp.where(live, columns, spec.columns)
    if spec.is_part:  # most slots are of other shards
        columns, logits = lax.sort((columns, logits), num_keys=1)
        live = columns < spec.columns
    log_p = jnp.minimum(logits - kept.logsumexp[:, None], 0)
    p = jnp.where(live, jnp.exp(log_p), 0)
    sampling = sampling_of(kept.k, spec.all_columns)
    return OwnEntries(columns, logits, column_sampling.inverse(sampling, p))


class Estimated(NamedTuple):
    """Results of rows under new weights."""

    outputs: Outputs
    entries: Entries  # of the derivative, with p of the new logits
    error: jax.Array  # estimated standard deviation of ln Ẑ1 in nats, [N]


class _Terms(NamedTuple):
    """Logits of entries relative to ln Z0, x, and e^x; 0 in empty slots."""

    x: jax.Array
    exps: jax.Array


def _terms(z, base, live):
    smallest = jnp.finfo(z.dtype).min
    x = jnp.where(live, jnp.clip(z - base[:, None], smallest, LARGEST_RISE), 0)
    return _Terms(x, jnp.where(live, jnp.exp(x), 0))


def estimated(
    spec: Spec, rows: TokenRows, own: OwnEntries, label_logit: jax.Array, z: jax.Array
) -> Estimated:
    """Results of rows from new scaled logits, of labels [N] and of own entries [N, K].

    Those of labels that do not exist here, and of empty slots, are undefined. A row
    without an estimate has the results of its record, and an infinite error.
    """
    kept, base = rows.recorded, rows.recorded.logsumexp
    label_logit = _label_logit(spec, rows, label_logit)
    live = own.inverse > 0
    before, after = (_terms(logits, base, live) for logits in (own.logits, z))
    tops = [jnp.max(jnp.where(live, x, -jnp.inf), axis=1) for x in (own.logits, z)]
    old_top, top, label_logit = _over_shards(spec, lax.pmax, [*tops, label_logit])
    sums = _over_shards(spec, lax.psum, _changes(own, before, after))
    x_label = jnp.clip(kept.label_logit - base, jnp.finfo(base.dtype).min, 0)
    p_label = jnp.exp(x_label)
    ratio = -jnp.expm1(x_label) + sums[0] + jnp.exp(label_logit - base)  # Ẑ1 / Z0
    rise = jnp.maximum(label_logit, top) - base
    is_lost = (ratio <= SMALLEST_RATIO) | (rise >= LARGEST_RISE)
    error = jnp.where(is_lost, jnp.inf, _deviation(*sums[3:]) / ratio)

    def unless_lost(new, old):
        return jnp.where(is_lost, old, new)

    label_logit = unless_lost(label_logit, kept.label_logit)
    changes = [unless_lost(x, 0) for x in sums]
    others = Stats(
        max=base,
        sum_others=-jnp.expm1(x_label) + changes[0],
        sum_shifted=-kept.entropy - p_label * x_label + changes[1],
        sum_squares=kept.sum_pi_squared - p_label**2 + changes[2],
        label_logit=jnp.full_like(base, -jnp.inf),
    )
    # Not ln Z0: is_argmax compares the label with the largest of the entries.
    largest = jnp.maximum(unless_lost(top, old_top), label_logit)
    largest = jnp.maximum(largest, base - LARGEST_RISE / 2)  # or sums would overflow
    others = row_stats.relative_to(others, largest)
    stats = row_stats.merge(others, row_stats.of_label(label_logit))
    outputs = row_stats.finish(stats, rows.labels < spec.vocab_size)
    outputs = vocab_shards.vary(outputs, spec.varying)
    x = jnp.where(is_lost[:, None], before.x, after.x)
    log_p = x + ((base - outputs.max) - outputs.log_sum)[:, None]
    p = jnp.where(live, jnp.exp(log_p), 0)
    entries = Entries(own.columns, p, p * own.inverse)
    return Estimated(outputs, entries, vocab_shards.vary(error, spec.varying))


def _label_logit(spec, rows, z):
    """The label's logit on the shard that has its column, elsewhere -inf."""
    row_ids = jnp.arange(len(z), dtype=jnp.int32)
    labels = backend_operands.part_labels(spec, rows, row_ids)
    exists = (labels >= 0) & (labels < spec.columns) & (rows.labels < spec.vocab_size)
    return jnp.where(exists & rows.active, z, -jnp.inf)


def _changes(own, before, after):
    """Estimated changes of Σ e^x, Σ x e^x and Σ e^2x, and sums for `_deviation`."""
    change = own.inverse * (after.exps - before.exps)
    drawn = jnp.where(own.inverse > 1, 1 - 1 / jnp.maximum(own.inverse, 1), 0)  # 1 - q
    terms = (
        change,
        own.inverse * (after.x * after.exps - before.x * before.exps),
        own.inverse * (after.exps**2 - before.exps**2),
        (drawn > 0).astype(change.dtype),
        drawn,
        drawn * change,
        drawn * change**2,
    )
    return [jnp.sum(x, axis=1) for x in terms]


def _deviation(count, weight, first, second):
    """The estimated standard deviation of Σ e^x, from the entries drawn by chance.

    Of so many draws, whose number is fixed but for one, only what differs between the
    changes c = (e^z1 - e^z0) / q varies: Hájek's estimator, in which a shift of all
    logits counts as the one draw more or less. A single draw cannot tell.
    """
    mean = first / jnp.maximum(weight, jnp.finfo(weight.dtype).tiny)
    spread = jnp.maximum(second - mean * first, 0)
    fixed = count / jnp.maximum(count - 1, 1) * spread + mean**2 / 4
    return jnp.sqrt(jnp.where(count > 1, fixed, second))


def _over_shards(spec, reduce, arrays):
    """The arrays [N], reduced over the vocabulary's shards."""
    if not spec.shards:
        return arrays
    return list(reduce(jnp.stack(arrays), spec.shards.axes))


def scaled(
    spec: Spec, source: Factors, rows: TokenRows, columns: jax.Array, z: jax.Array
) -> jax.Array:
    """Logits after bias, softcap and temperature, from products h · W_j [N, n]."""
    if source.bias is not None:
        bias = source.bias.astype(spec.stats_dtype)
        z = z + bias.at[columns].get(mode="clip")
    return scaling.scale(spec, rows, jnp.arange(len(z), dtype=jnp.int32), z)
