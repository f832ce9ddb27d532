"""The rule of a loss of each token's statistics and its divergence from a reference.

The divergence is the first of the loss's per-token arguments, so that the loss's own
derivative gives its cotangent g. With the mean slope m of `TwoHeadsRule`, the
derivative by the policy's logits is that of the statistics, plus g (slopes - p m). The
statistics may be of the logits at another temperature.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmem.backends import xla
from jaxmem.core import shards as _shards, stats as _stats
from jaxmem.core.operands import (
    for_active_chunks,
    put,
    put_all,
    take,
    trained as trained_part,
)
from jaxmem.core.spec import Spec
from jaxmem.core.stats import TokenStats
from jaxmem.functional import traced_loss
from jaxmem.functional.divergence_terms import JSD, KL, ForwardKL
from jaxmem.functional.rule import by_tokens, fitted, of_tokens, once
from jaxmem.functional.traced_loss import Operands, Values
from jaxmem.functional.two_heads import TwoHeadsRule
from jaxmem.functional.vjp import LossRule


@dataclasses.dataclass(frozen=True)
class TwoHeadsLossRule(LossRule):
    """`LossRule` with a reference.

    Given is `(rows, reference rows, reference, scale)`; the statistics are those of the
    policy's logits times the scale [N], or None.

    The operands' per-token arrays lack the divergence, which the loops compute.
    """

    divergence: KL | ForwardKL | JSD
    reference_spec: Spec
    kernels: bool

    def forward(self, trained, fixed):
        """See `Rule.forward`."""
        (source, per_token, count), (given, closed) = trained, fixed
        flags = of_tokens(source), of_tokens(given)
        run = by_tokens(self.spec, self._outputs, flags, True)
        stats, divergence = once(run)(source, given)
        operands = Operands((divergence, *per_token), closed)
        return self.total(stats, given[0], operands, count)

    def one_pass(self, source, given, operands, count):
        """See `LossRule.one_pass`."""
        rows, spec = given[0], fitted(self.spec, given[0])
        policy, reference = self._two_heads(rows).cast(source, given[2])
        n_rows = rows.labels.shape[0]

        def chunk(row_ids, carry):
            values, sums = carry
            tile = self._tile(policy, reference, given, row_ids)
            new, dz = self._derivative(tile, row_ids, operands, count, n_rows)
            dz = xla.unscale(spec, rows, row_ids, tile["logits"][0], dz)
            sums = xla.accumulate(spec, policy, row_ids, dz, sums)
            return put_all(values, row_ids, new), sums

        zeros = traced_loss.nothing(
            self.loss, spec, self._complete(operands, n_rows), n_rows, pull=True
        )
        zeros = zeros._replace(per_token=zeros.per_token[1:])
        carry = _shards.vary(zeros, spec.varying), xla.zero_sums(spec, policy)
        values, sums = for_active_chunks(spec.chunk, rows.active, chunk, carry)
        return values, trained_part(spec, sums)

    def _outputs(self, source, given) -> tuple[dict, jax.Array]:
        """Statistics by name and the divergence, [N]; 0 where inactive."""
        rows, spec = given[0], fitted(self.spec, given[0])
        policy, reference = self._two_heads(rows).cast(source, given[2])

        def chunk(row_ids, results):
            tile = self._tile(policy, reference, given, row_ids)
            new = {k: getattr(tile["outputs"], k) for k in TokenStats._fields}
            return put_all(results, row_ids, (new, tile["divergence"]))

        zero = jnp.zeros(rows.labels.shape[0], spec.stats_dtype)
        stats = dict.fromkeys(TokenStats._fields, zero)
        results = stats | {"is_argmax": zero.astype(bool)}, zero
        results = _shards.vary(results, spec.varying)
        return for_active_chunks(spec.chunk, rows.active, chunk, results)

    def _two_heads(self, rows) -> TwoHeadsRule:
        spec = fitted(self.spec, rows)
        return TwoHeadsRule(spec, self.divergence, self.reference_spec, self.kernels)

    def _tile(self, policy, reference, given, row_ids) -> dict[str, Any]:
        """Logits of both heads, and what the loss and its derivative read of them."""
        rows, reference_rows, _, scale = given
        two_heads = self._two_heads(rows)
        logits = two_heads.logits(policy, reference, (rows, reference_rows), row_ids)
        full, z, y = logits
        labels = take(rows.labels, row_ids)
        value, saved, _ = two_heads.values(z, y)
        # Columns that only the policy has are padding and have no largest logit.
        largest = saved["normalisers"][0].max
        if scale is not None:  # rows past the last one have none
            scale = jnp.where(row_ids < len(scale), take(scale, row_ids), 1)
            largest = largest * scale
        stats = _stats.of_tile(_scaled(full, scale), labels, largest)
        outputs = _stats.finish(stats, labels < self.spec.vocab_size)
        # The derivative computes probabilities again instead of storing [C, V] of them.
        logits, value, saved = lax.optimization_barrier((logits, value, saved))
        return {
            "logits": logits, "outputs": outputs, "divergence": value, **saved,
            "labels": labels, "scale": scale, "two_heads": two_heads,
        }  # fmt: skip

    def _derivative(self, tile, row_ids, operands, count, n_rows) -> tuple[Values, Any]:
        """The rows' values, and the derivative by the policy's scaled logits."""
        outputs, full = tile["outputs"], tile["logits"][0]
        operands = self._complete(operands, n_rows, row_ids, tile["divergence"])
        fields = (getattr(outputs, k) for k in TokenStats._fields)
        values, g = traced_loss.differentiate(
            self.loss, row_ids, TokenStats(*fields), operands, n_rows
        )
        g_divergence, *g_per_token = values.per_token
        assert g_divergence is not None  # that of an array of floats exists
        if self.divides_early:
            g, g_divergence = jax.tree.map(lambda x: x / count, (g, g_divergence))
        # Rows past the last active one: ln S = inf makes every p zero.
        log_sum = jnp.where(row_ids < n_rows, outputs.log_sum, jnp.inf)
        outputs = outputs._replace(log_sum=log_sum)
        of_stats = _scaled(full, tile["scale"])
        coefficients = _stats.coefficients(outputs, g)
        dz = _stats.dlogits(of_stats, tile["labels"], outputs, coefficients)
        dz = _scaled(dz, tile["scale"])
        dz += tile["two_heads"].derivative(tile["logits"], tile, g_divergence)
        return values._replace(per_token=tuple(g_per_token)), dz

    def _complete(self, operands, n_rows, row_ids=None, divergence=None) -> Operands:
        """The operands, with the divergence of some rows as first per-token array."""
        first = jnp.zeros(n_rows, self.spec.stats_dtype)
        if row_ids is not None:
            first = put(first, row_ids, divergence)
        return operands._replace(per_token=(first, *operands.per_token))


def _scaled(z, scale):
    """Rows z [C, V] times scale [C], if it is not None."""
    return z if scale is None else z * scale[:, None]
