"""Log-probabilities of distinct columns and of all others together, and derivatives.

With S the columns of a token, m the maximum of z and R = ln Σ_(v not in S) e^(z_v),

    ln p_k = z_k - ln(Σ_(u in S) e^(z_u) + e^R),   ln p_rest = R - ln(…)

so that a rest of any size keeps its digits: 1 - Σ_(u in S) p_u would have none left
where it is small. For cotangents g of ln p, G = Σ g with the rest's, the derivative is

    dz_k = g_k - p_k G in S,    dz_v = (g_rest - p_rest G) e^(z_v - R) elsewhere.

Where the vocabulary is sharded, each device has the logits of its part, and the
columns of S that are in it.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxmem.head.backends.protocol import ByLogits, ScaledHead, sampler_of
from jaxmem.head.maths import (
    column_sampling,
    id_columns,
    row_stats,
    scaling,
    vocab_shards,
)
from jaxmem.head.maths.backend_operands import TokenRows, take
from jaxmem.head.maths.column_sampling import Entries
from jaxmem.head.maths.spec import Spec
from jaxmem.head.verbs.rule import LoopRule


@dataclasses.dataclass(frozen=True)
class SomeColumnsRule(LoopRule):
    """A rule of some columns of each token, with a `SoftmaxDerivative` by the logits.

    Under `Sample(k)` the forward pass keeps few entries of the other columns, and the
    backward pass recomputes no logits.
    """

    def loop(self, source, rows, constants, starts) -> tuple[Any, dict]:
        """`forward_loop`; with starts [N], the residuals have sampled entries."""
        raise NotImplementedError

    def derivative(self, constants, result, saved, g) -> "SoftmaxDerivative":
        """The derivative by the logits of some rows, for the result's cotangent g."""
        raise NotImplementedError

    def forward_loop(self, source, rows, constants):
        return self.loop(source, rows, constants, None)

    def saving_loop(self, source, rows, constants):
        starts = None
        if self.spec.gradient_samples:
            starts = column_sampling.starts_of(self.spec, rows[0])
        return self.loop(source, rows, constants, starts)

    def backward_loop(self, source, rows, constants, result, saved, g):
        operands, spec = (constants, result, saved, g), self.spec
        if spec.gradient_samples:
            d = self.derivative(*operands)
            dz = at_entries(spec, rows[0], d, saved["entries"])
            return sampler_of(self.backend).gradient(spec, source, rows[0], dz)

        def of_chunk(row_ids, z):
            def take_rows(x):
                is_id = jnp.issubdtype(x.dtype, jnp.integer)
                return take(x, row_ids, fill_value=-1 if is_id else 0)

            d = self.derivative(*jax.tree.map(take_rows, operands))
            unscale = functools.partial(scaling.unscale, spec, rows[0], row_ids)
            everywhere = unscale(z, by_logits(z, d).everywhere)
            z_at_ids = id_columns.logits_at(spec, z, d.ids)
            return ByLogits(everywhere, d.ids, unscale(z_at_ids, d.at_ids))

        return self.loops.backward([ScaledHead(spec, source, rows[0])], of_chunk)


@dataclasses.dataclass(frozen=True)
class ColumnsRule(SomeColumnsRule):
    """The rule of ln p of K distinct columns a token and of the rest, [N, K + 1].

    The constants are their ids [N, K]. A negative id is absent, with ln p of -inf; an
    id that does not exist makes its token NaN. Cotangents are 0 where ln p is -inf
    because an id or the rest is absent.
    """

    def loop(self, source, rows, constants, starts):
        (rows,), spec = rows, self.spec

        def of_chunk(row_ids, z):
            ids = take(constants, row_ids, fill_value=-1)
            parts = split(spec, z, ids)
            saved = {"normaliser": parts.rest, "logsumexp": parts.logsumexp}
            if starts is not None:
                row_starts = take(starts, row_ids)
                saved |= sampled(spec, parts.logits, parts.rest, ids, row_starts)
            return parts.log_p, saved

        n_rows, n_ids = constants.shape
        zero = jnp.zeros(n_rows, spec.stats_dtype)
        log_p = jnp.zeros((n_rows, n_ids + 1), spec.stats_dtype)
        saved = {"normaliser": row_stats.Normaliser(zero, zero), "logsumexp": zero}
        log_p, saved = vocab_shards.vary((log_p, saved), spec.varying)
        results = log_p, saved | nothing_sampled(spec, starts)
        heads = [ScaledHead(spec, source, rows)]
        return self.loops.forward(heads, of_chunk, results)

    def derivative(self, constants, result, saved, g):
        dz = derivative_of_split(constants, result, g, saved["normaliser"])
        return dz._replace(logits=result[:, :-1] + saved["logsumexp"][:, None])


class Split(NamedTuple):
    """Log-probabilities of some columns and of all others together."""

    log_p: jax.Array  # [C, K + 1], the rest's last
    rest: row_stats.Normaliser  # [C]
    logits: jax.Array  # [C, V], in the memory of those that were split
    largest: jax.Array  # [C], of them
    logsumexp: jax.Array  # [C], of them


class SoftmaxDerivative(NamedTuple):
    """dz of rows of logits: a multiple of a softmax, except in some columns."""

    ids: jax.Array  # int32 [C, K], distinct or negative
    at_ids: jax.Array  # [C, K]
    factor: jax.Array  # [C]
    normaliser: row_stats.Normaliser  # [C], of the softmax
    logits: jax.Array | None = None  # [C, K] of the ids, rounded


def sampled(spec: Spec, z, normaliser, ids, starts) -> dict[str, Entries]:
    """Entries of a softmax of logits z [C, V] in other columns than ids [C, K].

    Negative ids are absent; the normaliser is that of all columns, or without the ids.
    """
    density = jnp.exp(row_stats.log_softmax(z, normaliser))
    return {"entries": select(spec, density, ids, starts)}


def select(spec: Spec, density: jax.Array, ids, starts: jax.Array) -> Entries:
    """Entries of rows, sampled by a density [C, V] of columns; not those of ids."""
    if ids is not None:
        density = density.at[id_columns.indices_of(spec, ids)].set(0, mode="drop")
    ones = jnp.ones(len(density), density.dtype)
    return column_sampling.select(
        column_sampling.sampling_of(spec), density, ones, starts
    )


def nothing_sampled(spec: Spec, starts: jax.Array | None) -> dict[str, Entries]:
    """`sampled` of rows [N] without entries; nothing without starts."""
    if starts is None:
        return {}
    sampling = column_sampling.sampling_of(spec)
    none = column_sampling.none(sampling, len(starts), spec.stats_dtype)
    return {"entries": vocab_shards.vary(none, spec.part_varying)}


def at_entries(
    spec: Spec, rows: TokenRows, d: SoftmaxDerivative, entries: Entries
) -> column_sampling.SparseDerivative:
    """The derivative by h Wᵀ of all rows, exact at its ids, and of the entries.

    Of the derivative by logits, equal ids are neighbours; the entries are of `sampled`
    by the same softmax.
    """
    weight = entries.p * column_sampling.inverse(
        column_sampling.sampling_of(spec), entries.p
    )
    log_p = jnp.log(jnp.where(entries.p > 0, entries.p, 1))
    others = unnormalised(log_p, d.normaliser)
    z = jnp.concatenate([jnp.asarray(d.logits), others], axis=1)
    dz = jnp.concatenate([d.at_ids, d.factor[:, None] * weight], axis=1)
    dz = scaling.unscale(spec, rows, jnp.arange(len(z), dtype=jnp.int32), z, dz)
    columns = jnp.concatenate(
        [id_columns.distinct_columns(spec, d.ids), entries.columns], axis=1
    )
    used = rows.active[:, None] & (columns < spec.columns)
    # Empty slots, as a value of 0 times a masked token's NaN would be NaN.
    columns = jnp.where(used, columns, spec.columns)
    return column_sampling.SparseDerivative(columns, jnp.where(used, dz, 0))


def unnormalised(log_p: jax.Array, rows: row_stats.Normaliser) -> jax.Array:
    """Logits [C, K], rounded, from log-probabilities and the rows' normalisers."""
    return log_p + (row_stats.finite(rows.max) + rows.log_sum)[:, None]


def derivative_of_split(
    ids: jax.Array, log_p: jax.Array, g: jax.Array, rest: row_stats.Normaliser
) -> SoftmaxDerivative:
    """The derivative by logits for cotangents g of `Split.log_p` [C, K + 1]."""
    dz = by_log_p(log_p, g)
    # Rows past the last active one, or whose NaN or infinity is not used.
    dz = jnp.where(jnp.any(g != 0, axis=1, keepdims=True), dz, 0)
    return SoftmaxDerivative(ids, dz[:, :-1], dz[:, -1], rest)


def by_logits(z: jax.Array, d: SoftmaxDerivative) -> ByLogits:
    """The derivative by logits z, [C, V] or some columns of them."""
    softmax = jnp.exp(row_stats.log_softmax(z, d.normaliser))
    everywhere = jnp.where(d.factor[:, None] == 0, 0, d.factor[:, None] * softmax)
    return ByLogits(everywhere, d.ids, d.at_ids)


def by_log_p(log_p: jax.Array, g: jax.Array, total=None) -> jax.Array:
    """Derivative by logits, Σ_l g_l ([l = k] - p_k), for cotangents g of ln p [C, K].

    The total is Σ_l g_l. 1 - p is computed from ln p, because g - g p would cancel near
    p = 1.
    """
    total = jnp.sum(g, axis=-1, keepdims=True) if total is None else total
    return g * -jnp.expm1(log_p) - (total - g) * jnp.exp(log_p)


def normaliser(spec: Spec, z: jax.Array) -> row_stats.Normaliser:
    """The normaliser of rows, over the shards of the vocabulary if there are any."""
    return over_shards(spec, row_stats.normaliser(z))


def over_shards(spec: Spec, part: row_stats.Normaliser) -> row_stats.Normaliser:
    """The normaliser of rows, from that of this shard's logits."""
    if not spec.shards:
        return part
    row_max = lax.pmax(part.max, spec.shards.axes)
    largest = part.max == row_max
    # One of the largest terms is added inside log1p, as in `_stats.normaliser`.
    below = (part.max - jnp.where(largest, part.max, row_max)) + part.log_sum
    others = jnp.where(largest, jnp.expm1(part.log_sum), jnp.exp(below))
    terms = others, largest.astype(part.max.dtype)
    others, n_largest = lax.psum(terms, spec.shards.axes)
    return row_stats.Normaliser(row_max, jnp.log1p(others + (n_largest - 1)))


def max_over_shards(spec: Spec, x: jax.Array) -> jax.Array:
    """The elementwise maximum over the shards of the vocabulary, if there are any."""
    return lax.pmax(x, spec.shards.axes) if spec.shards else x


def split(spec: Spec, z: jax.Array, ids: jax.Array) -> Split:
    """Log-probabilities of ids [C, K] and of the rest, from logits z [C, V]."""
    # Read these first, so that XLA can overwrite z, and afterwards put them back.
    z, in_shard = lax.optimization_barrier((z, id_columns.logits_at(spec, z, ids)))
    at_ids = max_over_shards(spec, in_shard)
    others = z.at[id_columns.indices_of(spec, ids)].set(-jnp.inf, mode="drop")
    others, part = lax.optimization_barrier((others, row_stats.normaliser(others)))
    rest = over_shards(spec, part)
    z = others.at[id_columns.indices_of(spec, ids)].set(in_shard, mode="drop")
    largest = jnp.maximum(rest.max, jnp.max(at_ids, axis=1))
    at_ids = jnp.where(ids < spec.vocab_size, at_ids, jnp.nan)
    row_max = row_stats.finite(largest)[:, None]
    # The rest's two terms are not added up before their maximum is subtracted.
    log_rest = (rest.max[:, None] - row_max) + rest.log_sum[:, None]
    shifted = jnp.concatenate([at_ids - row_max, log_rest], axis=1)
    normaliser = row_stats.normaliser(shifted)
    log_p = row_stats.log_softmax(shifted, normaliser)
    logsumexp = row_max[:, 0] + (normaliser.max + normaliser.log_sum)
    return Split(log_p, rest, z, largest, logsumexp)
