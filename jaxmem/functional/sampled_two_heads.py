"""Divergences between two heads under `Sample(k)`.

Let dz be the derivative of a divergence by the policy's logits, and d a distribution
over the vocabulary for which dz_j / d_j is bounded by the divergence's own terms: p, or
(p + q) / 2 where dz_j contains q_j. Column j is kept with probability
min(1, K d_j), as in `core.column_sampling`, and weighed by its inverse, so that the
mean of the estimate is dz. All columns may be left out: none is a label's.
"""

import dataclasses

import jax.numpy as jnp

from jaxmem.backends import xla, xla_sampled
from jaxmem.backends.protocol import Sampler
from jaxmem.core import column_sampling, row_stats, vocab_shards
from jaxmem.core.backend_operands import for_active_chunks, put_all, take
from jaxmem.core.column_sampling import Derivative, Entries, Sampling
from jaxmem.functional.rule import LoopRule
from jaxmem.functional.two_heads import Masses, TwoHeadsRule, beside, compare, softmax


@dataclasses.dataclass(frozen=True)
class SampledTwoHeadsRule(TwoHeadsRule):
    """`TwoHeadsRule` whose backward pass uses sampled entries and no logits."""

    sampler: Sampler

    def frozen(self):
        """See `Rule.frozen`."""
        return LoopRule.frozen(self)

    def saving_loop(self, source, rows, given):
        """See `LoopRule.saving_loop`; the entries are selected here."""
        spec, n_rows = self.spec, source.hidden.shape[0]
        policy, reference = self.cast(source, given)
        sampling = xla_sampled.sampling_of(spec)
        starts = xla_sampled.starts_of(spec, sampling, rows[0])

        def chunk(row_ids, results):
            full, z, y = self.logits(policy, reference, rows, row_ids)
            value, saved, masses = self.values(z, y)
            here = take(starts, row_ids)
            if masses is None:
                entries = self._entries(sampling, z, y, saved, here)
                dz = self._derivative(sampling, z, y, saved, entries)
            else:
                dz = self._by_kernels(z, y, saved, masses, here)
            at = jnp.take_along_axis(full, dz.columns, axis=1, mode="clip")
            scaled = xla.unscale(spec, rows[0], row_ids, at, dz.values)
            return put_all(results, row_ids, (value, dz._replace(values=scaled)))

        none = column_sampling.none(sampling, n_rows, spec.stats_dtype)
        dz = Derivative(none.columns, none.p)
        results = jnp.zeros(n_rows, spec.stats_dtype), dz
        results = vocab_shards.vary(results, spec.varying)
        active = rows[0].active
        value, dz = for_active_chunks(spec.chunk, active, chunk, results)
        return value, {"entries": dz}

    def backward_loop(self, source, rows, given, result, saved, g):
        """See `LoopRule.backward_loop`."""
        dz, g = saved["entries"], jnp.where(rows[0].active, g, 0)[:, None]
        # Rows whose infinite divergence is not used.
        values = jnp.where(g == 0, 0, g * dz.values)
        return self.sampler.gradient(
            self.spec, source, rows[0], dz._replace(values=values)
        )

    def _entries(self, sampling, z, y, saved, starts) -> Entries:
        """The sampled entries of rows of a divergence."""
        policy, reference = beside(saved["normalisers"])
        density = self._density(z, y, *policy, *reference)
        ones = jnp.ones(len(z), density.dtype)
        return column_sampling.select(sampling, density, ones, starts)

    def _by_kernels(self, z, y, saved, masses: Masses, starts) -> Derivative:
        """The sampled derivative, from blocks whose masses are known."""
        from jaxmem.kernels import sampled_blocks  # Pallas takes a while to import

        spec, (policy, reference) = self.spec, saved["normalisers"]
        sampling = Sampling(
            spec.gradient_samples or 0, spec.columns, sampled_blocks.MARGIN
        )
        bounds = sampled_blocks.bounds(sampling, *masses)
        density = sampled_blocks.Density(
            self._density, (z, y), rows=(*policy, *reference)
        )
        entries = sampled_blocks.select(sampling, density, bounds, masses.width, starts)
        return self._derivative(sampling, z, y, saved, entries)

    def _density(self, z, y, p_max, p_log_sum, q_max, q_log_sum):
        """The density of tiles of both heads' logits, and their normalisers."""
        p = softmax(z, row_stats.Normaliser(p_max, p_log_sum))
        q = softmax(y, row_stats.Normaliser(q_max, q_log_sum))
        return self.divergence.density(p, q)

    def _derivative(self, sampling, z, y, saved, entries: Entries) -> Derivative:
        """The derivative of rows of a divergence by the scaled logits."""
        columns, kept, _ = entries
        normalisers, mean_slope = beside((saved["normalisers"], saved["mean_slope"]))

        def at(x):
            return jnp.take_along_axis(x, columns, axis=1, mode="clip")

        p, q, log_ratio = compare(at(z), at(y), *normalisers)
        dz = self.divergence.slopes(p, q, log_ratio) - p * mean_slope
        probability = (
            column_sampling.units(sampling, kept).astype(dz.dtype) / sampling.one
        )
        weight = jnp.where(kept > 0, 1 / jnp.where(kept > 0, probability, 1), 0)
        return Derivative(columns, jnp.where(kept > 0, weight * dz, 0))
