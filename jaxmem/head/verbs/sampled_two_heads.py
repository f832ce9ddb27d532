"""Divergences between two heads under `Sample(k)`.

Let dz be the derivative of a divergence by the policy's logits, and d a distribution
over the vocabulary for which dz_j / d_j is bounded by the divergence's own terms: p, or
(p + q) / 2 where dz_j contains q_j. Column j is kept with probability
min(1, K d_j), as in `maths.column_sampling`, and weighed by its inverse, so that the
mean of the estimate is dz. All columns may be left out: none is a label's.
"""

import functools

import jax
import jax.numpy as jnp

from jaxmem.head.backends.protocol import sampler_of
from jaxmem.head.maths import column_sampling, row_stats, scaling, vocab_shards
from jaxmem.head.maths.backend_operands import take
from jaxmem.head.maths.block_sums import Density, Masses
from jaxmem.head.maths.column_sampling import SparseDerivative
from jaxmem.head.verbs.columns_rule import select
from jaxmem.head.verbs.kinds import Kind
from jaxmem.head.verbs.rule import LoopRule
from jaxmem.head.verbs.two_heads import TwoHeadsRule, beside, softmax


class SampledTwoHeadsRule(TwoHeadsRule):
    """`TwoHeadsRule` whose backward pass uses sampled entries and no logits."""

    def frozen(self):
        return LoopRule.frozen(self)

    def saving_loop(self, source, rows, constants):
        """See `LoopRule.saving_loop`; it selects the entries."""
        spec, n_rows = self.spec, source.hidden.shape[0]
        starts = column_sampling.starts_of(spec, rows[0])

        def of_chunk(row_ids, z, y):
            logits = self.aligned(z, y)
            value, saved, masses = self.values(*logits[1:])
            row_starts = take(starts, row_ids)
            columns, weights = entries(self, logits, saved, masses, row_starts)
            logits = column_sampling.at_columns(logits, columns)
            dz = self.derivative(logits, saved, jnp.ones_like(value))
            dz = jnp.where(weights > 0, weights * dz, 0)
            dz = scaling.unscale(spec, rows[0], row_ids, logits[0], dz)
            return value, SparseDerivative(columns, dz)

        none = column_sampling.none(
            column_sampling.sampling_of(spec), n_rows, spec.stats_dtype
        )
        dz = SparseDerivative(none.columns, none.p)
        results = jnp.zeros(n_rows, spec.stats_dtype), dz
        results = vocab_shards.vary(results, spec.varying)
        value, dz = self.loops.forward(
            self.heads(source, rows, constants), of_chunk, results
        )
        return value, {"entries": dz}

    def backward_loop(self, source, rows, constants, result, saved, g):
        dz, g = saved["entries"], jnp.where(rows[0].active, g, 0)[:, None]
        # Rows whose infinite divergence is not used.
        values = jnp.where(g == 0, 0, g * dz.values)
        return sampler_of(self.backend).gradient(
            self.spec, source, rows[0], dz._replace(values=values)
        )


def entries(
    rule: TwoHeadsRule, logits, saved, masses: Masses | None, starts: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The sampled columns of rows of `TwoHeadsRule.aligned`, and their weights, [C, K].

    The masses are those of `TwoHeadsRule.values`.
    """
    (z, y), (policy, reference) = logits[1:], saved["normalisers"]
    reductions = rule.backend.reductions
    if masses is None or reductions is None:
        rows = beside((*policy, *reference))
        density = density_of(rule.divergence, z, y, *rows)
        return column_sampling.weighed(
            rule.spec, select(rule.spec, density, None, starts)
        )
    function = functools.partial(density_of, rule.divergence)
    density = Density(function, (z, y), rows=(*policy, *reference))
    return reductions.select(rule.spec, density, masses, starts)


def density_of(kind: Kind, z, y, p_max, p_log_sum, q_max, q_log_sum):
    """The density of tiles of both heads' logits, and their normalisers."""
    p = softmax(z, row_stats.Normaliser(p_max, p_log_sum))
    q = softmax(y, row_stats.Normaliser(q_max, q_log_sum))
    return kind.density(p, q)
