"""The statistics of a row of logits, and their derivative; docs/maths.md derives both.

For scaled logits z with label y, m the largest of them, and cotangents g:

    R = Σ_{j≠y} e^(z_j - m)              S = R + e^(z_y - m)
    T = Σ_j e^(z_j - m) (z_j - m)        Q = Σ_j e^(2(z_j - m))
    dz_j = g_logprob·[j = y] + p_j (α - g_logprob + β ln p_j + γ p_j)
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

_BLOCK = 128  # columns that one reduction adds up; divides every padded vocabulary


class Stats(NamedTuple):
    """Partial statistics of rows over a subset of the columns; arrays of one shape."""

    max: jax.Array
    sum_others: jax.Array  # R
    sum_shifted: jax.Array  # T
    sum_squares: jax.Array  # Q
    label_logit: jax.Array  # -inf if the label is not among these columns


class Normaliser(NamedTuple):
    """ln Σ_j e^z_j of rows, as two terms: p stays exact at |z| = 1e4."""

    max: jax.Array
    log_sum: jax.Array  # ln S


class TokenStats(NamedTuple):
    """Statistics per token: float arrays and one bool array, shaped as labels.

    Attributes:
        logprob: ln p(label), nats.
        entropy: -Σ_j p_j ln p_j, nats.
        logsumexp: ln Σ_j e^z_j.
        sum_pi_squared: Σ_j p_j², the collision probability.
        is_argmax: True if the label has the largest logit (ties count).
    """

    logprob: jax.Array
    entropy: jax.Array
    logsumexp: jax.Array
    sum_pi_squared: jax.Array
    is_argmax: jax.Array


class Outputs(NamedTuple):
    """All values that one pass computes per row, or None for those not saved.

    jit removes those that are not used.
    """

    logprob: Any = None
    entropy: Any = None
    logsumexp: Any = None
    sum_pi_squared: Any = None
    is_argmax: Any = None
    max: Any = None
    log_sum: Any = None  # ln S; separate from max so that p stays exact at |z| = 1e4


class Cotangents(NamedTuple):
    """Cotangents of the differentiable outputs; None for outputs not requested."""

    logprob: jax.Array | None = None
    entropy: jax.Array | None = None
    logsumexp: jax.Array | None = None
    sum_pi_squared: jax.Array | None = None


class Coefficients(NamedTuple):
    """Per-row coefficients of the derivative by the logits; None is zero."""

    label: jax.Array | None  # g_logprob
    alpha: jax.Array | None
    beta: jax.Array | None
    gamma: jax.Array | None


def empty(shape, dtype) -> Stats:
    """The identity of `merge`: statistics of rows over no columns."""
    nothing, zero = jnp.full(shape, -jnp.inf, dtype), jnp.zeros(shape, dtype)
    return Stats(nothing, zero, zero, zero, nothing)


def of_label(label_logit: jax.Array) -> Stats:
    """Statistics over the label's column alone; -inf where it is not here."""
    zero = jnp.zeros_like(label_logit)
    square = jnp.where(label_logit == -jnp.inf, zero, 1)
    return Stats(label_logit, zero, zero, square, label_logit)


def relative_to(stats: Stats, row_max: jax.Array) -> Stats:
    """Statistics of columns without the label's, relative to another maximum."""
    shift = finite(stats.max) - finite(row_max)
    scale = jnp.exp(shift)
    return stats._replace(
        max=row_max,
        sum_others=scale * stats.sum_others,
        sum_shifted=scale * (stats.sum_shifted + shift * stats.sum_others),
        sum_squares=scale**2 * stats.sum_squares,
    )


def of_tile(
    z: jax.Array, labels: jax.Array, row_max: jax.Array | None = None
) -> tuple[Stats, jax.Array]:
    """Stats of logits z [C, V], and e^(z - max), which is 0 for the label's column.

    A label outside [0, V) belongs to other columns. row_max [C] is the largest logit of
    each row if it is known already.
    """
    # Read the label's logit first, so that XLA can overwrite z by the exponentials.
    column = jnp.where(labels < 0, z.shape[1], labels)  # a negative index would wrap
    at_label = jnp.arange(z.shape[0], dtype=jnp.int32), column
    label_logit = z.at[at_label].get(mode="fill", fill_value=-jnp.inf)
    z, label_logit = lax.optimization_barrier((z, label_logit))
    if row_max is None:
        row_max = jnp.max(z, axis=-1)
    shifted = z - finite(row_max)[:, None]
    exps = jnp.exp(shifted)
    others = jnp.where(is_label(z, labels), 0, exps)
    # One reduction for all sums: XLA on a CPU would store the inputs of separate ones.
    terms = others, exps * _not_infinite(shifted), exps * exps
    sums = lax.platform_dependent(*terms, tpu=_sum_lanes, default=_sum_blocks)
    return Stats._make((row_max, *sums, label_logit)), others


def merge(a: Stats, b: Stats) -> Stats:
    """Statistics of the union of two disjoint subsets of the vocabulary."""
    row_max = jnp.maximum(a.max, b.max)
    (scale_a, shift_a), (scale_b, shift_b) = _rescale(a, row_max), _rescale(b, row_max)
    return Stats(
        max=row_max,
        sum_others=scale_a * a.sum_others + scale_b * b.sum_others,
        sum_shifted=scale_a * (a.sum_shifted + shift_a * _sum_with_label(a))
        + scale_b * (b.sum_shifted + shift_b * _sum_with_label(b)),
        sum_squares=scale_a**2 * a.sum_squares + scale_b**2 * b.sum_squares,
        label_logit=jnp.maximum(a.label_logit, b.label_logit),
    )


def merge_over(part: Stats, axes: tuple[str, ...]) -> Stats:
    """`merge` over the devices along mesh axes, in one all-reduce max and one sum."""
    row_max, label_logit = lax.pmax(jnp.stack([part.max, part.label_logit]), axes)
    scale, shift = _rescale(part, row_max)
    sums = (
        scale * part.sum_others,
        scale * (part.sum_shifted + shift * _sum_with_label(part)),
        scale**2 * part.sum_squares,
    )
    sum_others, sum_shifted, sum_squares = lax.psum(jnp.stack(sums), axes)
    return Stats(row_max, sum_others, sum_shifted, sum_squares, label_logit)


def merge_gathered(part: Stats, axes: tuple[str, ...]) -> Stats:
    """`merge_over` up to rounding, in one all-gather: half of the latency."""
    parts = lax.all_gather(jnp.stack(part), axes, to="invarying")
    return functools.reduce(merge, (Stats(*each) for each in parts))


def merge_tree(groups: Stats) -> Stats:
    """`merge` of groups of columns, [G, ...], in a binary tree over their index."""
    while len(groups.max) > 1:
        left, right = (Stats(*(x[i::2] for x in groups)) for i in (0, 1))
        groups = merge(left, right)
    return Stats(*(x[0] for x in groups))


def finish(stats: Stats, label_exists: jax.Array) -> Outputs:
    """Outputs of rows from statistics of the whole vocabulary.

    The logprob is NaN where `label_exists` is false.
    """
    label_shift = stats.label_logit - finite(stats.max)
    total = _sum_with_label(stats)
    is_argmax = label_shift >= 0
    log_sum = jnp.where(is_argmax, jnp.log1p(stats.sum_others), jnp.log(total))
    # Without cancellation near the maximum.
    by_others = -jnp.log1p(stats.sum_others * jnp.exp(-jnp.maximum(label_shift, -1)))
    logprob = jnp.where(label_shift >= -1, by_others, label_shift - log_sum)
    return Outputs(
        logprob=jnp.where(label_exists, logprob, jnp.nan),
        entropy=log_sum - stats.sum_shifted / total,
        logsumexp=stats.max + log_sum,
        sum_pi_squared=stats.sum_squares / total**2,
        is_argmax=is_argmax & label_exists,
        max=stats.max,
        log_sum=log_sum,
    )


def coefficients(rows: Outputs, g: Cotangents) -> Coefficients:
    """α, β, γ and the label's coefficient of each row."""
    label, alpha, beta, gamma = g.logprob, g.logsumexp, None, None
    if label is not None:  # a label that does not exist makes only its users NaN
        label = jnp.where(jnp.isnan(rows.logprob) & (label != 0), jnp.nan, label)
    if g.entropy is not None:
        beta = -g.entropy
        alpha = _add_optional(alpha, beta * rows.entropy)
    if g.sum_pi_squared is not None:
        gamma = 2 * g.sum_pi_squared
        alpha = _add_optional(alpha, -gamma * rows.sum_pi_squared)
    return Coefficients(label, alpha, beta, gamma)


def dlogits(z, labels, rows: Outputs, g: Cotangents) -> jax.Array:
    """The derivative by scaled logits z [C, V]; other arguments have shape [C]."""
    # XLA would contract products and sums of rows in one program and not in another,
    # so that the bits with `vocab_groups` would depend on the mesh.
    of_rows = lax.optimization_barrier(coefficients(rows, g))
    return dlogits_of(z, is_label(z, labels), rows, of_rows)


def dlogits_of(z, is_label, rows: Outputs, c: Coefficients) -> jax.Array:
    """`dlogits` of any columns z [C, K], given whether each is the label's."""
    log_p = _not_infinite((z - finite(rows.max)[:, None]) - rows.log_sum[:, None])
    p, dz = jnp.exp(log_p), None
    if c.alpha is not None or c.gamma is not None:
        slope: Any = None if c.alpha is None else c.alpha[:, None]
        slope = slope if c.gamma is None else _add_optional(slope, c.gamma[:, None] * p)
        dz = p * slope
    if c.beta is not None:
        dz = _add_optional(dz, c.beta[:, None] * (p * log_p))
    if c.label is not None:
        at_label = c.label * -jnp.expm1(rows.logprob)  # 1 - p would round to 0
        # The logprob of a label among the columns of padding is not a number.
        at_label = jnp.where(c.label == 0, 0, at_label)
        by_label = jnp.where(is_label, at_label[:, None], -c.label[:, None] * p)
        dz = by_label if dz is None else by_label + dz
    return jnp.zeros_like(z) if dz is None else dz


def normaliser(z: jax.Array) -> Normaliser:
    """The normaliser of logits z [C, V]; ln p keeps its digits near p = 1."""
    row_max = jnp.max(z, axis=-1)

    def terms(z):
        shifted = z - finite(row_max)[:, None]
        below = shifted < 0
        return jnp.where(below, jnp.exp(shifted), 0), (~below).astype(z.dtype)

    # The largest term, which is 1, is added inside log1p.
    smaller, largest = sum_rows_of(terms, z)
    return Normaliser(row_max, jnp.log1p(smaller + (largest - 1)))


def log_softmax(z: jax.Array, rows: Normaliser) -> jax.Array:
    """The log-probabilities of logits z [C, V], given their rows' normalisers [C]."""
    return (z - finite(rows.max)[:, None]) - rows.log_sum[:, None]


def sum_rows_of(terms, *tiles):
    """Sums over V of the terms that `terms(*tiles)` computes from tiles [C, V].

    The columns are split before the terms are computed, as in `_sum_blocks`. XLA on a
    CPU then need not store terms that both the blocks and the remainder would read.
    """

    def of_parts(*tiles):
        whole = tiles[0].shape[1] // _BLOCK * _BLOCK
        parts = (slice(whole), slice(whole, None))
        sums = [_sum_blocks(*terms(*(t[:, part] for t in tiles))) for part in parts]
        return [a + b for a, b in zip(*sums, strict=True)]

    return lax.platform_dependent(
        *tiles, tpu=lambda *tiles: _sum_lanes(*terms(*tiles)), default=of_parts
    )


def _sum_lanes(*terms):
    """Sum whole rows: XLA for TPUs already keeps 128 partial sums per row.

    For the blocks of `_sum_blocks` it would copy each term into another layout.
    """
    return [jnp.sum(t, axis=-1) for t in terms]


def _sum_blocks(*terms):
    """Sum all terms in one pass: whole blocks first, then the remaining columns.

    XLA on a CPU adds the terms of one reduction in order. Over 150k columns that alone
    would lose 3e-4; in blocks it loses 1e-6.
    """
    whole = terms[0].shape[1] // _BLOCK * _BLOCK
    blocks = [t[:, :whole].reshape(t.shape[0], -1, _BLOCK) for t in terms]
    tails = [t[:, whole:] for t in terms]
    sums = zip(_reduce_last(blocks), _reduce_last(tails), strict=True)
    return [jnp.sum(block, axis=-1) + tail for block, tail in sums]


def _reduce_last(terms):
    def add(left, right):
        return tuple(map(jnp.add, left, right))

    zeros = (jnp.zeros((), terms[0].dtype),) * len(terms)
    return lax.reduce(tuple(terms), zeros, add, (terms[0].ndim - 1,))


def is_label(z, labels) -> jax.Array:
    """True for the label's column of logits z [C, V]."""
    return lax.broadcasted_iota(jnp.int32, z.shape, 1) == labels[:, None]


def _sum_with_label(stats):
    """S = R + e^(z_y - m), which includes the label's term."""
    return stats.sum_others + jnp.exp(stats.label_logit - finite(stats.max))


def _rescale(part, row_max):
    """The factor and shift that rebase partial sums to a larger maximum."""
    shift = part.max - finite(row_max)
    return jnp.exp(shift), _not_infinite(shift)


def finite(row_max: jax.Array) -> jax.Array:
    """Largest logits, and 0 where one is -inf, because -inf - -inf would be NaN."""
    return jnp.where(row_max == -jnp.inf, 0, row_max)


def difference(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(a - b rounded, the rounding error, which is 0 for an infinite difference).

    Knuth's two-sum: only sums and differences, which no compiler reorders.
    """
    rounded = a - b
    negative = rounded - a
    lost = (a - (rounded - negative)) - (b + negative)
    return rounded, jnp.where(jnp.abs(lost) < jnp.inf, lost, 0)


def power_of_two(x: jax.Array) -> jax.Array:
    """The largest power of two up to x > 0, by which products are exact; 1 for none."""
    mantissa, exponent = jnp.frexp(x)
    exists = jnp.isfinite(x) & (mantissa > 0)
    return jnp.ldexp(jnp.ones_like(x), jnp.where(exists, exponent - 1, 0))


def _not_infinite(x):
    """Values clamped to the finite range, so that 0 · x is 0 in a masked column."""
    return jnp.maximum(x, jnp.finfo(x.dtype).min)


def _add_optional(x, y):
    """The sum; an x of None is 0."""
    return y if x is None else x + y
