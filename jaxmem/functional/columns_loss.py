"""The rules of losses of statistics and of a divergence from a teacher's columns."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxmem.core import row_stats
from jaxmem.core.backend_operands import take
from jaxmem.functional import column_divergences, columns, selected
from jaxmem.functional.divergence_loss_rule import (
    ByLogits,
    Compared,
    DivergenceLossRule,
)
from jaxmem.functional.kinds import Kind


@dataclasses.dataclass(frozen=True)
class ColumnsLossRule(DivergenceLossRule):
    """`DivergenceLossRule` of given columns.

    Given is `(rows, scale, distinct ids [N, K], the teacher's ln q [N, K])`.
    """

    how: tuple[Kind, bool]  # of `column_divergences.compare`
    has_ids: ClassVar[bool] = True

    def compare(self, heads, given, row_ids):
        rows, _, ids, log_q = given
        z = columns.logits(self.spec, heads[0], rows, row_ids)
        ids = take(ids, row_ids, fill_value=-1)
        log_q = take(log_q, row_ids, fill_value=-jnp.inf)
        log_p, rest, z, largest, _ = columns.split(self.spec, z, ids)
        value, slopes = column_divergences.compare(self.how, log_p, log_q)
        has_ids = jnp.any(ids >= 0, axis=1)
        slopes = jnp.where(has_ids[:, None], slopes, 0)
        saved = {"ids": ids, "log_p": log_p, "slopes": slopes, "rest": rest}
        return Compared((z,), jnp.where(has_ids, value, 0), saved, largest)

    def density(self, logits, saved):
        return jnp.exp(row_stats.log_softmax(logits[0], saved["rest"])), saved["ids"]

    def by_logits(self, logits, saved, g):
        # A row whose value is not used, maybe because it is NaN, has no derivative.
        g = jnp.where(g[:, None] == 0, 0, g[:, None] * saved["slopes"])
        derivative = columns.derivative_of_split(
            saved["ids"], saved["log_p"], g, saved["rest"]
        )
        return _by_logits(logits[0], derivative)


@dataclasses.dataclass(frozen=True)
class DrawnLossRule(DivergenceLossRule):
    """`DivergenceLossRule` of the cross-entropy with ids drawn from the teacher.

    Given is `(rows, scale, ids [N, K])`; negative ids are absent, others may repeat.
    """

    has_ids: ClassVar[bool] = True

    def compare(self, heads, given, row_ids):
        spec, (rows, _, ids) = self.spec, given
        z = columns.logits(spec, heads[0], rows, row_ids)
        ids = take(ids, row_ids, fill_value=-1)
        z, at_ids = jax.lax.optimization_barrier((z, columns.logits_at(spec, z, ids)))
        normaliser = columns.normaliser(spec, z)
        log_p = row_stats.log_softmax(columns.max_over_shards(spec, at_ids), normaliser)
        log_p = jnp.where(ids < spec.vocab_size, log_p, jnp.nan)
        log_p = jnp.where(ids >= 0, log_p, 0)
        weight = 1 / jnp.maximum(jnp.sum(ids >= 0, axis=1), 1).astype(log_p.dtype)
        value = -weight * jnp.sum(log_p, axis=1)
        saved = {"ids": ids, "log_p": log_p, "weight": weight, "normaliser": normaliser}
        return Compared((z,), value, saved, normaliser.max)

    def density(self, logits, saved):
        softmax = row_stats.log_softmax(logits[0], saved["normaliser"])
        return jnp.exp(softmax), saved["ids"]

    def by_logits(self, logits, saved, g):
        log_p = saved["log_p"]
        g = jnp.broadcast_to((-g * saved["weight"])[:, None], log_p.shape)
        derivative = selected.derivative_of_selected(
            saved["ids"], log_p, g, saved["normaliser"]
        )
        return _by_logits(logits[0], derivative)


def _by_logits(z, derivative):
    everywhere = columns.elsewhere(z, derivative)
    return ByLogits(everywhere, derivative.ids, derivative.at_ids)
