"""The rule of divergences between two heads: chunks of both heads' logits.

`jaxmem.functional.divergence` has the derivation.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jaxmem.backends import xla
from jaxmem.core import shards as _shards, stats as _stats
from jaxmem.core.operands import cast, for_active_chunks, put_all, take
from jaxmem.core.spec import Spec
from jaxmem.functional.divergence_terms import JSD, KL, ForwardKL
from jaxmem.functional.rule import LoopRule


@dataclasses.dataclass(frozen=True)
class TwoHeadsRule(LoopRule):
    """The rule of every divergence; given is the reference."""

    divergence: KL | ForwardKL | JSD
    reference_spec: Spec
    kernels: bool  # those of `kernels.row_sums` compute sums over V

    def forward_loop(self, source, rows, given):
        """See `LoopRule.forward_loop`."""
        n_rows, dtype = source.hidden.shape[0], self.spec.stats_dtype
        policy, reference = self.cast(source, given)

        def chunk(row_ids, results):
            _, z, y = self.logits(policy, reference, rows, row_ids)
            return put_all(results, row_ids, self.values(z, y))

        zero = jnp.zeros(n_rows, dtype)
        normaliser = _stats.Normaliser(zero, zero)
        results = zero, {"mean_slope": zero, "normalisers": (normaliser, normaliser)}
        results = _shards.vary(results, self.spec.varying)
        return for_active_chunks(self.spec.chunk, rows[0].active, chunk, results)

    def values(self, z, y):
        """(divergences, residuals) of rows of both heads' logits."""
        normalisers = self.normaliser(z), self.normaliser(y)
        value, mean_slope = self.sums(z, y, normalisers)
        return value, {"mean_slope": mean_slope, "normalisers": normalisers}

    def normaliser(self, z) -> _stats.Normaliser:
        """The normaliser of one head's logits."""
        if self._by_kernels(z):
            from jaxmem.kernels import row_sums  # Pallas takes a while to import

            return row_sums.normaliser(z)
        return _stats.normaliser(z)

    def sums(self, z, y, normalisers):
        """(divergences, mean slopes) of rows of both heads' logits."""
        rows = (*normalisers[0], *normalisers[1])
        if self._by_kernels(z):
            from jaxmem.kernels import row_sums

            *parts, slope = row_sums.sums(self._terms, (z, y), rows)
        else:
            *parts, slope = _stats.sum_rows_of(
                lambda z, y: self._terms(z, y, *rows), z, y
            )
        return sum(parts[1:], parts[0]), slope

    def _terms(self, z, y, *rows):
        """The divergence's terms and its slopes, [C, V]; rows are both normalisers."""
        p_max, p_log_sum, q_max, q_log_sum = rows
        policy = _stats.Normaliser(p_max, p_log_sum)
        args = compare(z, y, policy, _stats.Normaliser(q_max, q_log_sum))
        return *self.divergence.terms(*args), self.divergence.slopes(*args)

    def _by_kernels(self, z):
        if not self.kernels:
            return False
        from jaxmem.kernels import row_sums

        return row_sums.supports(z.shape[0], z.shape[1], z.dtype)

    def backward_loop(self, source, rows, given, result, saved, g):
        """See `LoopRule.backward_loop`."""
        policy, reference = self.cast(source, given)

        def chunk(row_ids, sums):
            full, z, y = self.logits(policy, reference, rows, row_ids)
            of_row = jax.tree.map(lambda x: take(x, row_ids), (saved, g))
            mean_slope, g_row = of_row[0]["mean_slope"][:, None], of_row[1][:, None]
            p, q, log_ratio = compare(z, y, *of_row[0]["normalisers"])
            dz = g_row * (self.divergence.slopes(p, q, log_ratio) - p * mean_slope)
            # Rows past the last active one, or whose infinite divergence is not used.
            dz = jnp.where(g_row == 0, 0, dz)
            dz = jnp.pad(dz, ((0, 0), (0, self.spec.columns - dz.shape[1])))
            dz = xla.unscale(self.spec, rows[0], row_ids, full, dz)
            return xla.accumulate(self.spec, policy, row_ids, dz, sums)

        sums = xla.zero_sums(self.spec, policy)
        sums = for_active_chunks(self.spec.chunk, rows[0].active, chunk, sums)
        return jax.tree.map(lambda total, x: total.astype(x.dtype), sums, source)

    def cast(self, policy, reference):
        """Both heads in the dtypes that their products take."""
        policy = cast(self.spec, policy)
        return policy, cast(self.reference_spec, reference)

    def logits(self, policy, reference, rows, row_ids):
        """The policy's whole logits, then both heads' over their common columns."""
        z = xla.logits(self.spec, policy, rows[0], row_ids)
        y = xla.logits(self.reference_spec, reference, rows[1], row_ids)
        # Materialised: scaled once, though they are read more than once.
        z, y = lax.optimization_barrier((z, y))
        both = min(self.spec.columns, self.reference_spec.columns)
        return z, z[:, :both], y[:, :both].astype(z.dtype)


def compare(z, y, policy: _stats.Normaliser, reference: _stats.Normaliser):
    """p, q and ln(p/q); ln(p/q) keeps its last digits where the logits agree."""
    p = jnp.exp(_stats.log_softmax(z, policy))
    q = jnp.exp(_stats.log_softmax(y, reference))
    shift = (policy.max - reference.max) + (policy.log_sum - reference.log_sum)
    return p, q, (z - y) - shift[:, None]
