"""The rule of divergences between two heads: chunks of both heads' logits.

`jaxmem.head.verbs.kinds` has the derivation.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmem.head.backends.protocol import ByLogits, RowReductions, ScaledHead
from jaxmem.head.maths import (
    block_sums,
    column_sampling,
    row_stats,
    scaling,
    vocab_shards,
)
from jaxmem.head.maths.backend_operands import take
from jaxmem.head.maths.block_sums import Masses
from jaxmem.head.maths.divergence_terms import XLA, ColumnBlocks
from jaxmem.head.maths.spec import Spec
from jaxmem.head.verbs.kinds import Kind
from jaxmem.head.verbs.rule import LoopRule, empty, scaled


@dataclasses.dataclass(frozen=True)
class TwoHeadsRule(LoopRule):
    """The rule of every divergence; the constants are the reference."""

    divergence: Kind
    reference_spec: Spec

    def frozen(self):
        rule = super().frozen()
        if self.spec.recomputes:
            return rule
        return FrozenTwoHeadsRule(
            rule.spec, self.backend, self.divergence, self.reference_spec
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
        def of_chunk(row_ids, *logits):
            return self.values(*self.aligned(*logits)[1:])[:2]

        zero = jnp.zeros(source.hidden.shape[0], self.spec.stats_dtype)
        normaliser = row_stats.Normaliser(zero, zero)
        results = zero, {"mean_slope": zero, "normalisers": (normaliser, normaliser)}
        results = vocab_shards.vary(results, self.spec.varying)
        return self.loops.forward(
            self.heads(source, rows, constants), of_chunk, results
        )

    def values(self, z, y) -> tuple[jax.Array, dict[str, Any], Masses | None]:
        """(divergences, residuals, masses) of rows of both heads' logits.

        The masses are None where no reductions of the backend read the logits.
        """
        reductions = self.backend.reductions
        if reductions is None or not reductions.supports(z.shape[1], z.dtype):
            normalisers = row_stats.normaliser(z), row_stats.normaliser(y)
            rows = *normalisers[0], *normalisers[1]
            *parts, slope = row_stats.sum_rows_of(
                lambda *tiles: self._terms_and_slopes(*tiles, *beside(rows)), z, y
            )
            value, masses = sum(parts[1:], parts[0]), None
        elif not self.divergence.in_blocks:
            value, slope, normalisers, masses = self._by_sums(reductions, z, y)
        else:
            value, slope, normalisers, masses = self._by_pairs(reductions, z, y)
        return value, {"mean_slope": slope, "normalisers": normalisers}, masses

    def _by_pairs(self, reductions: RowReductions, z, y):
        """`values` from one read of both heads' logits."""
        divergence = self.divergence
        terms = functools.partial(divergence.block_terms, ops=reductions.ARITHMETIC)
        pairs = reductions.pair_sums(terms, z, y)
        heads = pairs.z, pairs.y
        normalisers = policy, reference = tuple(map(block_sums.normaliser, heads))
        p_scale, q_scale = map(_block_scale, heads, normalisers)
        p, q = p_scale * (pairs.z.others + 1), q_scale * (pairs.y.others + 1)
        tops = pairs.z.largest, pairs.y.largest
        log_ratio = XLA.log_ratio(*tops, *beside(normalisers))
        value, slope = divergence.of_blocks(
            ColumnBlocks(p, q, p_scale, q_scale, pairs.sums, log_ratio)
        )
        others = divergence.density(p_scale * pairs.z.others, q_scale * pairs.y.others)
        masses = Masses(reductions.PAIR_BLOCK, divergence.density(p, q), others, tops=2)
        return jnp.sum(value, axis=1), jnp.sum(slope, axis=1), normalisers, masses

    def _by_sums(self, reductions: RowReductions, z, y):
        """`values` from two reads of the logits, for normalisers and for sums."""
        heads = reductions.block_sums(z), reductions.block_sums(y)
        normalisers = tuple(map(block_sums.normaliser, heads))
        rows = *normalisers[0], *normalisers[1]
        terms = functools.partial(self._terms_and_slopes, ops=reductions.ARITHMETIC)
        *parts, slope = reductions.sums(terms, (z, y), rows)
        p_scale, others = _block_scale(heads[0], normalisers[0]), heads[0].others
        masses = Masses(
            reductions.BLOCK, p_scale * (others + 1), p_scale * others, tops=1
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

    def backward_loop(self, source, rows, constants, result, saved, g):
        spec = self.spec

        def of_chunk(row_ids, *logits):
            rows_saved, rows_g = jax.tree.map(lambda x: take(x, row_ids), (saved, g))
            dz = self.derivative(self.aligned(*logits), rows_saved, rows_g)
            return ByLogits(scaling.unscale(spec, rows[0], row_ids, logits[0], dz))

        return self.loops.backward(self.heads(source, rows, constants), of_chunk)

    def derivative(self, logits, saved, g) -> jax.Array:
        """The derivative by the policy's scaled logits, for cotangents g [C] of rows.

        The logits are those of `aligned`, all of their columns or some.
        """
        n_columns, z, y = logits[0].shape[1], *logits[1:]
        mean_slope, g = saved["mean_slope"][:, None], g[:, None]
        p, q, log_ratio = compare(z, y, *beside(saved["normalisers"]))
        dz = g * (self.divergence.slopes(p, q, log_ratio) - p * mean_slope)
        # Rows past the last active one, or whose infinite divergence is not used.
        dz = jnp.where(g == 0, 0, dz)
        return jnp.pad(dz, ((0, 0), (0, n_columns - dz.shape[1])))

    def heads(self, policy, rows, reference) -> tuple[ScaledHead, ScaledHead]:
        """Both heads, whose logits are compared; rows are those of each."""
        return (
            ScaledHead(self.spec, policy, rows[0]),
            ScaledHead(self.reference_spec, reference, rows[1]),
        )

    def aligned(self, z, y) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The policy's logits, then both heads' in the columns that both have."""
        n_common = min(self.spec.columns, self.reference_spec.columns)
        return z, z[:, :n_common], y[:, :n_common].astype(z.dtype)


class FrozenTwoHeadsRule(TwoHeadsRule):
    """`TwoHeadsRule` with a frozen head, whose backward pass recomputes no logits.

    The forward pass computes the derivative by hidden, [N, D], whose rows are scaled by
    the cotangents.
    """

    def saving_loop(self, source, rows, constants):
        def of_chunk(row_ids, z, y):
            logits = self.aligned(z, y)
            value, saved, _ = self.values(*logits[1:])
            # The derivative computes probabilities again instead of storing them.
            logits, saved = lax.optimization_barrier((logits, saved))
            dz = self.derivative(logits, saved, jnp.ones_like(value))
            dz = scaling.unscale(self.spec, rows[0], row_ids, logits[0], dz)
            return value, ByLogits(dz)

        zeros = jnp.zeros(source.hidden.shape[0], self.spec.stats_dtype)
        zeros = vocab_shards.vary(zeros, self.spec.varying)
        value, dsource = self.loops.one_pass(
            self.heads(source, rows, constants), of_chunk, zeros
        )
        return value, {"dhidden": dsource.hidden}

    def backward(self, residuals, cotangents):
        rows, saved = residuals[1], residuals[-1]
        return (scaled(saved["dhidden"], rows[0].active, cotangents),)


def compare(
    z, y, policy: row_stats.Normaliser, reference: row_stats.Normaliser, ops=XLA
):
    """p, q and ln(p/q); ln(p/q) keeps its last digits where the logits agree.

    The normalisers broadcast against the logits.
    """
    p, q = softmax(z, policy, ops), softmax(y, reference, ops)
    return p, q, ops.log_ratio(z, y, policy, reference)


def softmax(z, rows: row_stats.Normaliser, ops=XLA):
    """Probabilities of logits, whose normalisers broadcast against them."""
    return ops.exp(z - row_stats.finite(rows.max), rows.log_sum)


def beside(rows):
    """Arrays [C, 1] of arrays [C]."""
    return jax.tree.map(lambda x: x[:, None], rows)


def _block_scale(head, normaliser: row_stats.Normaliser):
    """Factors that turn blocks' e^(z - m) into probabilities, [C, n]."""
    return column_sampling.scale(head.largest, beside(normaliser))
