"""The rule of a loss of statistics and of a divergence from a teacher's columns."""

import dataclasses

import jax.numpy as jnp

from jaxmem.core.operands import cast, take
from jaxmem.functional import columns, topk_divergence
from jaxmem.functional.divergence_loss_rule import Compared, DivergenceLossRule
from jaxmem.functional.divergence_terms import JSD, KL, ForwardKL


@dataclasses.dataclass(frozen=True)
class ColumnsLossRule(DivergenceLossRule):
    """`DivergenceLossRule` of `topk_kl`.

    Given is `(rows, scale, distinct ids [N, K], the teacher's ln q [N, K])`.
    """

    how: tuple[KL | ForwardKL | JSD, bool]  # of `topk_divergence.compare`

    def heads(self, source, given):
        """See `DivergenceLossRule.heads`."""
        return (cast(self.spec, source),)

    def compare(self, heads, given, row_ids):
        """See `DivergenceLossRule.compare`."""
        rows, _, ids, log_q = given
        z = columns.logits(self.spec, heads[0], rows, row_ids)
        ids = take(ids, row_ids, fill_value=-1)
        log_q = take(log_q, row_ids, fill_value=-jnp.inf)
        log_p, rest = columns.split(self.spec, z, ids)
        value, slopes = topk_divergence.compare(self.how, log_p, log_q)
        has_ids = jnp.any(ids >= 0, axis=1)
        slopes = jnp.where(has_ids[:, None], slopes, 0)
        saved = {"ids": ids, "log_p": log_p, "slopes": slopes, "rest": rest}
        return Compared((z,), jnp.where(has_ids, value, 0), saved, None)

    def by_logits(self, logits, saved, g):
        """See `DivergenceLossRule.by_logits`."""
        # A row whose value is not used, maybe because it is NaN, has no derivative.
        g = jnp.where(g[:, None] == 0, 0, g[:, None] * saved["slopes"])
        dz = columns.by_log_p(saved["log_p"], g)
        dz = jnp.where(jnp.any(g != 0, axis=1, keepdims=True), dz, 0)
        derivative = columns.Derivative(
            saved["ids"], dz[:, :-1], dz[:, -1], saved["rest"]
        )
        return columns.everywhere(self.spec, logits[0], derivative)
