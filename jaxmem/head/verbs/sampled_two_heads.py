"""Divergences between two heads under `Sample(k)`.

Let dz be the derivative of a divergence by the policy's logits, and d a distribution
over the vocabulary for which dz_j / d_j is bounded by the divergence's own terms: p, or
(p + q) / 2 where dz_j contains q_j. Column j is kept with probability
min(1, K d_j), as in `maths.column_sampling`, and weighed by its inverse, so that the
mean of the estimate is dz. All columns may be left out: none is a label's.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxmem.head.backends import xla
from jaxmem.head.backends.protocol import SampleLoops
from jaxmem.head.backends.xla_sampled import sampling_of, starts_of
from jaxmem.head.maths import column_sampling, row_stats, vocab_shards
from jaxmem.head.maths.backend_operands import for_active_chunks, put_all, take
from jaxmem.head.maths.column_sampling import Sampling, SparseDerivative
from jaxmem.head.verbs.columns_rule import select
from jaxmem.head.verbs.kinds import Kind
from jaxmem.head.verbs.rule import LoopRule
from jaxmem.head.verbs.two_heads import Masses, TwoHeadsRule, beside, softmax


@dataclasses.dataclass(frozen=True)
class SampledTwoHeadsRule(TwoHeadsRule):
    """`TwoHeadsRule` whose backward pass uses sampled entries and no logits."""

    sampler: SampleLoops

    def frozen(self):
        return LoopRule.frozen(self)

    def saving_loop(self, source, rows, constants):
        """See `LoopRule.saving_loop`; it selects the entries."""
        spec, n_rows = self.spec, source.hidden.shape[0]
        policy, reference = self.cast(source, constants)
        sampling = sampling_of(spec)
        starts = starts_of(spec, sampling, rows[0])

        def chunk(row_ids, results):
            logits = self.logits(policy, reference, rows, row_ids)
            value, saved, masses = self.values(*logits[1:])
            row_starts = take(starts, row_ids)
            columns, weights = entries(self, logits, saved, masses, row_starts)
            logits = column_sampling.at_columns(logits, columns)
            dz = self.derivative(logits, saved, jnp.ones_like(value))
            dz = jnp.where(weights > 0, weights * dz, 0)
            dz = xla.unscale(spec, rows[0], row_ids, logits[0], dz)
            return put_all(results, row_ids, (value, SparseDerivative(columns, dz)))

        none = column_sampling.none(sampling, n_rows, spec.stats_dtype)
        dz = SparseDerivative(none.columns, none.p)
        results = jnp.zeros(n_rows, spec.stats_dtype), dz
        results = vocab_shards.vary(results, spec.varying)
        active = rows[0].active
        value, dz = for_active_chunks(spec.chunk, active, chunk, results)
        return value, {"entries": dz}

    def backward_loop(self, source, rows, constants, result, saved, g):
        dz, g = saved["entries"], jnp.where(rows[0].active, g, 0)[:, None]
        # Rows whose infinite divergence is not used.
        values = jnp.where(g == 0, 0, g * dz.values)
        return self.sampler.gradient(
            self.spec, source, rows[0], dz._replace(values=values)
        )


def entries(
    heads: TwoHeadsRule, logits, saved, masses: Masses | None, starts: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The sampled columns of rows of both heads' logits, and their weights, [C, K].

    The masses of `TwoHeadsRule.values` are None where no kernels run.
    """
    (z, y), spec = logits[1:], heads.spec
    policy, reference = saved["normalisers"]
    if masses is None:
        density = density_of(heads.divergence, z, y, *beside((*policy, *reference)))
        drawn, sampling = select(spec, density, None, starts), sampling_of(spec)
        return drawn.columns, column_sampling.inverse(sampling, drawn.p)
    from jaxmem.head.kernels import sampled_blocks  # Pallas takes a while to import

    sampling = Sampling(spec.gradient_samples or 0, spec.columns, sampled_blocks.MARGIN)
    bounds = sampled_blocks.bounds(sampling, *masses)
    function = functools.partial(density_of, heads.divergence)
    density = sampled_blocks.Density(function, (z, y), rows=(*policy, *reference))
    drawn = sampled_blocks.select(sampling, density, bounds, masses.width, starts)
    return drawn.columns, column_sampling.inverse(sampling, drawn.p)


def density_of(kind: Kind, z, y, p_max, p_log_sum, q_max, q_log_sum):
    """The density of tiles of both heads' logits, and their normalisers."""
    p = softmax(z, row_stats.Normaliser(p_max, p_log_sum))
    q = softmax(y, row_stats.Normaliser(q_max, q_log_sum))
    return kind.density(p, q)
