"""The maths of the head: what a row of logits is reduced to, and its derivative.

For one row of scaled logits z, with label y:

    m = max_j z_j                    R = Σ_{j≠y} e^(z_j - m)       S = R + e^(z_y - m)
    T = Σ_j e^(z_j - m) (z_j - m)    Q = Σ_j e^(2(z_j - m))

    logsumexp = m + ln S             logprob = z_y - logsumexp     entropy = ln S - T/S
    sum_pi_squared = Q / S²          is_argmax = (z_y ≥ m)

`R` leaves the label out because 1 + R, rounded, loses every nat of a confident
prediction: -log1p(R) keeps it. `T` is shifted because logsumexp - E[z] cancels.
`m` starts at -inf, so that rows whose every logit is very negative stay finite.

For cotangents g of the outputs, with p_j = e^(z_j - logsumexp), the derivative is

    dz_j = g_logprob·[j = y] + p_j (α - g_logprob + β ln p_j + γ p_j)
    α = g_logsumexp - g_entropy·entropy - 2 g_Q·sum_pi_squared
    β = -g_entropy,  γ = 2 g_Q
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

_BLOCK = 128  # columns added up in order; divides every padded vocabulary


class Stats(NamedTuple):
    """Partial sums of rows over any part of the vocabulary; arrays of one shape."""

    max: jax.Array
    sum_others: jax.Array  # R
    sum_shifted: jax.Array  # T
    sum_squares: jax.Array  # Q
    label_logit: jax.Array  # -inf where the label lies outside this part


class Normaliser(NamedTuple):
    """ln Σ_j e^z_j of rows, in two parts: p stays exact at |z| = 1e4."""

    max: jax.Array
    log_sum: jax.Array  # ln S


class TokenStats(NamedTuple):
    """What the head tells of each token; float arrays and one bool, shaped as labels.

    Attributes:
        logprob: ln p(label), nats.
        entropy: -Σ_j p_j ln p_j, nats.
        logsumexp: ln Σ_j e^z_j.
        sum_pi_squared: Σ_j p_j², the collision probability.
        is_argmax: whether the label has the largest logit (ties count).
    """

    logprob: jax.Array
    entropy: jax.Array
    logsumexp: jax.Array
    sum_pi_squared: jax.Array
    is_argmax: jax.Array


class Outputs(NamedTuple):
    """All that one pass knows of each row; unused fields cost nothing under jit."""

    logprob: jax.Array
    entropy: jax.Array
    logsumexp: jax.Array
    sum_pi_squared: jax.Array
    is_argmax: jax.Array
    max: jax.Array
    log_sum: jax.Array  # ln S; kept apart from max so that p stays exact at |z| = 1e4


class Cotangents(NamedTuple):
    """Cotangents of the differentiable outputs; None where nobody asked."""

    logprob: jax.Array | None
    entropy: jax.Array | None
    logsumexp: jax.Array | None
    sum_pi_squared: jax.Array | None


class Coefficients(NamedTuple):
    """The numbers a row that drive its logits' derivative; None is zero."""

    label: jax.Array | None  # g_logprob
    alpha: jax.Array | None
    beta: jax.Array | None
    gamma: jax.Array | None


def empty(shape, dtype) -> Stats:
    """The identity of `merge`: rows that have seen no logit."""
    nothing, zero = jnp.full(shape, -jnp.inf, dtype), jnp.zeros(shape, dtype)
    return Stats(nothing, zero, zero, zero, nothing)


def of_tile(z: jax.Array, labels: jax.Array) -> Stats:
    """Stats of logits z [C, V]; a label outside [0, V) is in another part."""
    return of_tile_and_exps(z, labels)[0]


def of_tile_and_exps(z: jax.Array, labels: jax.Array) -> tuple[Stats, jax.Array]:
    """`of_tile`, and e^(z - max) of all columns but the label's, which has 0."""
    # The label first, so that the exponentials may overwrite the logits.
    z, label_logit = lax.optimization_barrier((z, _label_logit(z, labels)))
    row_max = jnp.max(z, axis=-1)
    shifted = z - _finite(row_max)[:, None]
    exps = jnp.exp(shifted)
    others = jnp.where(_is_label(z, labels), 0, exps)
    # Together, because XLA on a CPU would store what each single sum reads.
    sum_others, sum_shifted, sum_squares = _sum_rows(
        others, exps * _not_infinite(shifted), exps * exps
    )
    stats = Stats(row_max, sum_others, sum_shifted, sum_squares, label_logit)
    return stats, others


def merge(a: Stats, b: Stats) -> Stats:
    """Stats of the union of two disjoint parts of the vocabulary."""
    row_max = jnp.maximum(a.max, b.max)
    (scale_a, shift_a), (scale_b, shift_b) = _rescale(a, row_max), _rescale(b, row_max)
    return Stats(
        max=row_max,
        sum_others=scale_a * a.sum_others + scale_b * b.sum_others,
        sum_shifted=scale_a * (a.sum_shifted + shift_a * _sum(a))
        + scale_b * (b.sum_shifted + shift_b * _sum(b)),
        sum_squares=scale_a**2 * a.sum_squares + scale_b**2 * b.sum_squares,
        label_logit=jnp.maximum(a.label_logit, b.label_logit),
    )


def merge_over(part: Stats, axes: tuple[str, ...]) -> Stats:
    """`merge` of the parts that devices along mesh axes hold: one max, one sum."""
    row_max, label_logit = lax.pmax(jnp.stack([part.max, part.label_logit]), axes)
    scale, shift = _rescale(part, row_max)
    sums = (
        scale * part.sum_others,
        scale * (part.sum_shifted + shift * _sum(part)),
        scale**2 * part.sum_squares,
    )
    sum_others, sum_shifted, sum_squares = lax.psum(jnp.stack(sums), axes)
    return Stats(row_max, sum_others, sum_shifted, sum_squares, label_logit)


def finish(stats: Stats, label_exists: jax.Array) -> Outputs:
    """Outputs of rows whose whole vocabulary was seen; NaN logprob without a label."""
    label_shift = stats.label_logit - _finite(stats.max)
    total = _sum(stats)
    is_argmax = label_shift >= 0
    log_sum = jnp.where(is_argmax, jnp.log1p(stats.sum_others), jnp.log(total))
    return Outputs(
        logprob=jnp.where(label_exists, _logprob(stats, label_shift, log_sum), jnp.nan),
        entropy=log_sum - stats.sum_shifted / total,
        logsumexp=stats.max + log_sum,
        sum_pi_squared=stats.sum_squares / total**2,
        is_argmax=is_argmax & label_exists,
        max=stats.max,
        log_sum=log_sum,
    )


def coefficients(rows: Outputs, g: Cotangents) -> Coefficients:
    """α, β, γ and the label's weight of each row, from cotangents and statistics."""
    label = g.logprob
    if label is not None:  # a label that does not exist poisons only what used it
        label = jnp.where(jnp.isnan(rows.logprob) & (label != 0), jnp.nan, label)
    alpha = _total(
        g.logsumexp,
        None if g.entropy is None else -g.entropy * rows.entropy,
        None
        if g.sum_pi_squared is None
        else -2 * g.sum_pi_squared * rows.sum_pi_squared,
    )
    beta = None if g.entropy is None else -g.entropy
    gamma = None if g.sum_pi_squared is None else 2 * g.sum_pi_squared
    return Coefficients(label, alpha, beta, gamma)


def dlogits(z, labels, rows: Outputs, c: Coefficients) -> jax.Array:
    """Derivative with respect to scaled logits z [C, V]; the rest are arrays of [C]."""
    log_p = _not_infinite((z - _finite(rows.max)[:, None]) - rows.log_sum[:, None])
    p = jnp.exp(log_p)
    slope = _total(_column(c.alpha), None if c.gamma is None else _column(c.gamma) * p)
    everywhere = _total(
        None if slope is None else p * slope,
        None if c.beta is None else _column(c.beta) * (p * log_p),
    )
    if c.label is None:
        return jnp.zeros_like(z) if everywhere is None else everywhere
    at_label = _column(c.label * -jnp.expm1(rows.logprob))  # 1 - p would round to 0
    elsewhere = -_column(c.label) * p
    by_label = jnp.where(_is_label(z, labels), at_label, elsewhere)
    return by_label if everywhere is None else by_label + everywhere


def normaliser(z: jax.Array) -> Normaliser:
    """Of logits z [C, V], without labels; ln p keeps its digits near p = 1."""
    row_max = jnp.max(z, axis=-1)

    def terms(z):
        shifted = z - _finite(row_max)[:, None]
        below = shifted < 0
        return jnp.where(below, jnp.exp(shifted), 0), (~below).astype(z.dtype)

    # The largest term, which is 1, joins in log1p.
    smaller, largest = sum_rows_of(terms, z)
    return Normaliser(row_max, jnp.log1p(smaller + (largest - 1)))


def log_softmax(z: jax.Array, rows: Normaliser) -> jax.Array:
    """ln p of logits z [C, V], given their rows' normalisers [C]."""
    return (z - _finite(rows.max)[:, None]) - rows.log_sum[:, None]


def sum_rows_of(terms, *tiles):
    """Sums over V of the terms that a function makes of any columns of tiles [C, V].

    Split as `_sum_blocks` splits them, so that XLA on a CPU need not store terms that
    whole blocks and the rest share.
    """

    def of_parts(*tiles):
        whole = tiles[0].shape[1] // _BLOCK * _BLOCK
        parts = (slice(whole), slice(whole, None))
        sums = [_sum_blocks(*terms(*(t[:, part] for t in tiles))) for part in parts]
        return [a + b for a, b in zip(*sums, strict=True)]

    return lax.platform_dependent(
        *tiles, tpu=lambda *tiles: _sum_lanes(*terms(*tiles)), default=of_parts
    )


def _sum_rows(*terms):
    """Sum of each term [C, V] over V, as suits the platform it is lowered for."""
    return lax.platform_dependent(*terms, tpu=_sum_lanes, default=_sum_blocks)


def _sum_lanes(*terms):
    """Whole rows at once: XLA for TPUs keeps 128 partial sums of a row itself.

    It would copy the blocks of `_sum_blocks` into another layout, each as large as its
    term.
    """
    return [jnp.sum(t, axis=-1) for t in terms]


def _sum_blocks(*terms):
    """One pass over all terms: blocks first, then the rest.

    XLA on a CPU adds the terms of one reduction up in order; over 150k columns that
    alone would lose 3e-4, over blocks it loses 1e-6.
    """
    whole = terms[0].shape[1] // _BLOCK * _BLOCK
    blocks = [t[:, :whole].reshape(t.shape[0], -1, _BLOCK) for t in terms]
    tails = [t[:, whole:] for t in terms]
    return [
        jnp.sum(block, axis=-1) + tail
        for block, tail in zip(_reduce_last(blocks), _reduce_last(tails), strict=True)
    ]


def _reduce_last(terms):
    def add(left, right):
        return tuple(a + b for a, b in zip(left, right, strict=True))

    zeros = (jnp.zeros((), terms[0].dtype),) * len(terms)
    return lax.reduce(tuple(terms), zeros, add, (terms[0].ndim - 1,))


def _is_label(z, labels):
    return lax.broadcasted_iota(jnp.int32, z.shape, 1) == labels[:, None]


def _label_logit(z, labels):
    """z at the label; -inf where it lies outside."""
    column = jnp.where(labels < 0, z.shape[1], labels)  # a negative index would wrap
    row = jnp.arange(z.shape[0], dtype=jnp.int32)
    return z.at[row, column].get(mode="fill", fill_value=-jnp.inf)


def _sum(stats):
    """S: the label's term joins the others."""
    return stats.sum_others + jnp.exp(stats.label_logit - _finite(stats.max))


def _logprob(stats, label_shift, log_sum):
    """Near the maximum, the difference of two logarithms would cancel."""
    near = jnp.maximum(label_shift, -1)
    return jnp.where(
        label_shift >= -1,
        -jnp.log1p(stats.sum_others * jnp.exp(-near)),
        label_shift - log_sum,
    )


def _rescale(part, row_max):
    """Factor and shift that move a part's sums to a larger maximum."""
    shift = part.max - _finite(row_max)
    return jnp.exp(shift), _not_infinite(shift)


def _finite(row_max):
    """A maximum that can be subtracted: -inf - -inf would be NaN."""
    return jnp.where(row_max == -jnp.inf, 0, row_max)


def _not_infinite(x):
    """So that 0 · x is 0 for a masked column instead of NaN."""
    return jnp.maximum(x, jnp.finfo(x.dtype).min)


def _column(x) -> Any:
    return None if x is None else x[:, None]


def _total(*terms):
    """Sum of the terms that exist; None where there are none."""
    present = [term for term in terms if term is not None]
    return sum(present[1:], present[0]) if present else None
