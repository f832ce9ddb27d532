"""The rule of divergences between two heads: chunks of both heads' logits.

`jaxmem.head.verbs.kinds` has the derivation.
"""

import dataclasses
import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxmem.head.backends import xla
from jaxmem.head.maths import column_sampling, row_stats, vocab_shards
from jaxmem.head.maths.backend_operands import (
    cotangent,
    for_active_chunks,
    put_all,
    take,
)
from jaxmem.head.maths.spec import Spec
from jaxmem.head.verbs.divergence_terms import XLA, Arithmetic, ColumnBlocks
from jaxmem.head.verbs.kinds import Kind
from jaxmem.head.verbs.rule import LoopRule, empty, scaled


class Masses(NamedTuple):
    """Σ density over blocks of `width` columns, [C, n]."""

    width: int
    whole: jax.Array
    others: jax.Array  # without `tops` columns
    tops: int


@dataclasses.dataclass(frozen=True)
class TwoHeadsRule(LoopRule):
    """The rule of every divergence; the constants are the reference."""

    divergence: Kind
    reference_spec: Spec
    kernels: bool  # those of `kernels.row_pairs` or `row_sums` compute sums over V

    def frozen(self):
        rule = super().frozen()
        if self.spec.recomputes:
            return rule
        return FrozenTwoHeadsRule(
            rule.spec, self.divergence, self.reference_spec, self.kernels
        )

    def forward_and_save(self, trained, fixed):
        result, (*operands, saved) = super().forward_and_save(trained, fixed)
        normaliser = row_stats.Normaliser(empty(), empty())
        nothing = {"mean_slope": empty(), "normalisers": (normaliser, normaliser)}
        return result, (*operands, nothing | {"dhidden": empty()} | saved)

    def backward(self, residuals, cotangents):
        *operands, saved = residuals
        saved = {k: v for k, v in saved.items() if jax.tree.leaves(v)[0].size}
        return super().backward((*operands, saved), cotangents)

    def forward_loop(self, source, rows, constants):
        n_rows, dtype = source.hidden.shape[0], self.spec.stats_dtype
        policy, reference = self.cast(source, constants)

        def chunk(row_ids, results):
            _, z, y = self.logits(policy, reference, rows, row_ids)
            return put_all(results, row_ids, self.values(z, y)[:2])

        zero = jnp.zeros(n_rows, dtype)
        normaliser = row_stats.Normaliser(zero, zero)
        results = zero, {"mean_slope": zero, "normalisers": (normaliser, normaliser)}
        results = vocab_shards.vary(results, self.spec.varying)
        return for_active_chunks(self.spec.chunk, rows[0].active, chunk, results)

    def values(self, z, y) -> tuple[jax.Array, dict[str, Any], Masses | None]:
        """(divergences, residuals, masses) of rows of both heads' logits.

        The masses are None where no kernels run.
        """
        if not self.by_kernels(z):
            normalisers = row_stats.normaliser(z), row_stats.normaliser(y)
            rows = *normalisers[0], *normalisers[1]
            *parts, slope = row_stats.sum_rows_of(
                lambda *tiles: self._terms_and_slopes(*tiles, *beside(rows)), z, y
            )
            value, masses = sum(parts[1:], parts[0]), None
        elif not self.divergence.in_blocks:
            value, slope, normalisers, masses = self._by_sums(z, y)
        else:
            value, slope, normalisers, masses = self._by_pairs(self.divergence, z, y)
        return value, {"mean_slope": slope, "normalisers": normalisers}, masses

    def _by_pairs(self, divergence: Kind, z, y):
        """`values` from one read of both heads' logits."""
        from jaxmem.head.kernels import row_blocks, row_pairs  # Pallas takes a while

        terms = functools.partial(divergence.block_terms, ops=_kernel_arithmetic())
        pairs = row_pairs.parts(terms, z, y)
        heads = pairs.z, pairs.y
        normalisers = policy, reference = tuple(map(row_blocks.normaliser, heads))
        p_scale, q_scale = map(_block_scale, heads, normalisers)
        p, q = p_scale * (pairs.z.others + 1), q_scale * (pairs.y.others + 1)
        tops = pairs.z.largest, pairs.y.largest
        log_ratio = _log_ratio(*tops, *beside(normalisers))
        value, slope = divergence.of_blocks(
            ColumnBlocks(p, q, p_scale, q_scale, pairs.sums, log_ratio)
        )
        others = divergence.density(p_scale * pairs.z.others, q_scale * pairs.y.others)
        masses = Masses(row_pairs.WIDTH, divergence.density(p, q), others, tops=2)
        return jnp.sum(value, axis=1), jnp.sum(slope, axis=1), normalisers, masses

    def _by_sums(self, z, y):
        """`values` from two reads of the logits, for normalisers and for sums."""
        from jaxmem.head.kernels import row_blocks, row_sums

        heads = row_blocks.parts(z), row_blocks.parts(y)
        normalisers = tuple(map(row_blocks.normaliser, heads))
        rows = *normalisers[0], *normalisers[1]
        terms = functools.partial(self._terms_and_slopes, ops=_kernel_arithmetic())
        *parts, slope = row_sums.sums(terms, (z, y), rows)
        p_scale, others = _block_scale(heads[0], normalisers[0]), heads[0].others
        masses = Masses(
            row_blocks.WIDTH, p_scale * (others + 1), p_scale * others, tops=1
        )
        return sum(parts[1:], parts[0]), slope, normalisers, masses

    def _terms_and_slopes(self, z, y, *rows, ops=XLA):
        """The divergence's terms and its slopes, like z; rows are both normalisers."""
        policy, reference = rows[:2], rows[2:]
        args = compare(
            z, y, row_stats.Normaliser(*policy), row_stats.Normaliser(*reference), ops
        )
        divergence = self.divergence
        return *divergence.terms(*args, ops), divergence.slopes(*args, ops)

    def by_kernels(self, z) -> bool:
        """True if kernels read the logits."""
        if not self.kernels:
            return False
        from jaxmem.head.kernels import row_sums

        return row_sums.supports(z.shape[1], z.dtype)

    def backward_loop(self, source, rows, constants, result, saved, g):
        policy, reference = self.cast(source, constants)

        def chunk(row_ids, sums):
            logits = self.logits(policy, reference, rows, row_ids)
            rows_saved, rows_g = jax.tree.map(lambda x: take(x, row_ids), (saved, g))
            dz = self.derivative(logits, rows_saved, rows_g)
            dz = xla.unscale(self.spec, rows[0], row_ids, logits[0], dz)
            return xla.accumulate(self.spec, policy, row_ids, dz, sums)

        sums = xla.zero_sums(self.spec, policy)
        sums = for_active_chunks(self.spec.chunk, rows[0].active, chunk, sums)
        return cotangent(self.spec, sums, source)

    def derivative(self, logits, saved, g) -> jax.Array:
        """The derivative by the policy's scaled logits, for cotangents g [C] of rows.

        The logits are of `logits`, all of their columns or some.
        """
        n_columns, z, y = logits[0].shape[1], *logits[1:]
        mean_slope, g = saved["mean_slope"][:, None], g[:, None]
        p, q, log_ratio = compare(z, y, *beside(saved["normalisers"]))
        dz = g * (self.divergence.slopes(p, q, log_ratio) - p * mean_slope)
        # Rows past the last active one, or whose infinite divergence is not used.
        dz = jnp.where(g == 0, 0, dz)
        return jnp.pad(dz, ((0, 0), (0, n_columns - dz.shape[1])))

    def cast(self, policy, reference):
        """Both heads in the dtypes that their products take."""
        policy = policy.cast(self.spec)
        return policy, reference.cast(self.reference_spec)

    def logits(self, policy, reference, rows, row_ids):
        """The policy's whole logits, then both heads' over their common columns."""
        z = xla.logits(self.spec, policy, rows[0], row_ids)
        y = xla.logits(self.reference_spec, reference, rows[1], row_ids)
        # Materialised: scaled once, though they are read more than once.
        z, y = lax.optimization_barrier((z, y))
        n_common = min(self.spec.columns, self.reference_spec.columns)
        return z, z[:, :n_common], y[:, :n_common].astype(z.dtype)


class FrozenTwoHeadsRule(TwoHeadsRule):
    """`TwoHeadsRule` with a frozen head, whose backward pass recomputes no logits.

    The forward pass computes the derivative by hidden, [N, D], whose rows are scaled by
    the cotangents.
    """

    def saving_loop(self, source, rows, constants):
        spec, (policy, reference) = self.spec, self.cast(source, constants)

        def chunk(row_ids, results):
            values, sums = results
            logits = self.logits(policy, reference, rows, row_ids)
            value, saved, _ = self.values(*logits[1:])
            # The derivative computes probabilities again instead of storing them.
            logits, saved = lax.optimization_barrier((logits, saved))
            dz = self.derivative(logits, saved, jnp.ones_like(value))
            dz = xla.unscale(spec, rows[0], row_ids, logits[0], dz)
            sums = xla.accumulate(spec, policy, row_ids, dz, sums)
            return put_all(values, row_ids, value), sums

        zeros = jnp.zeros(source.hidden.shape[0], spec.stats_dtype)
        zeros = vocab_shards.vary(zeros, spec.varying)
        results = zeros, xla.zero_sums(spec, policy)
        active = rows[0].active
        value, sums = for_active_chunks(spec.chunk, active, chunk, results)
        return value, {"dhidden": sums.hidden}

    def backward(self, residuals, cotangents):
        rows, saved = residuals[1], residuals[-1]
        return (scaled(saved["dhidden"], rows[0].active, cotangents),)


def _kernel_arithmetic() -> Arithmetic:
    """The operations that kernels compute divergences with."""
    from jaxmem.head.kernels import arithmetic

    return Arithmetic(arithmetic.exp, arithmetic.fma, arithmetic.at_most, operator.mul)


def compare(
    z, y, policy: row_stats.Normaliser, reference: row_stats.Normaliser, ops=XLA
):
    """p, q and ln(p/q); ln(p/q) keeps its last digits where the logits agree.

    The normalisers broadcast against the logits.
    """
    p, q = softmax(z, policy, ops), softmax(y, reference, ops)
    if ops is not XLA:  # kernels have no room for what differences lose
        from jaxmem.head.kernels import arithmetic

        ratio = arithmetic.log_ratio(z, y, policy.max, reference.max)
        return p, q, ratio - (policy.log_sum - reference.log_sum)
    return p, q, _log_ratio(z, y, policy, reference)


def _log_ratio(z, y, policy: row_stats.Normaliser, reference: row_stats.Normaliser):
    """ln(p/q), which keeps its last digits where logits are large, too."""
    ratio, lost = row_stats.difference(z, y)
    largest, lost_of_largest = row_stats.difference(policy.max, reference.max)
    log_sums = (policy.log_sum - reference.log_sum) + lost_of_largest
    shift, lost_of_shift = row_stats.difference(largest, -log_sums)
    # Below the epsilon of ln p, it would be all of the largest term of two confident
    # heads, and blur the sum of the others.
    matters = jnp.abs(lost_of_shift) > jnp.finfo(shift.dtype).eps
    return (ratio - shift) + (lost - jnp.where(matters, lost_of_shift, 0))


def softmax(z, rows: row_stats.Normaliser, ops=XLA):
    """Probabilities of logits, whose normalisers broadcast against them."""
    return ops.exp(z - row_stats.finite(rows.max), rows.log_sum)


def beside(rows):
    """Arrays [C, 1] of arrays [C]."""
    return jax.tree.map(lambda x: x[:, None], rows)


def _block_scale(head, normaliser: row_stats.Normaliser):
    """Factors that turn blocks' e^(z - m) into probabilities, [C, n]."""
    return column_sampling.scale(head.largest, beside(normaliser))
