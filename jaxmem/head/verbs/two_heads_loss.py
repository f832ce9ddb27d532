"""The rule of a loss of statistics and of a divergence from another head.

With the mean slope m of `TwoHeadsRule`, the derivative of the divergence by the
policy's logits is slopes - p m.
"""

import dataclasses

from jaxmem.head.maths.spec import Spec
from jaxmem.head.verbs.divergence_loss_rule import (
    ByLogits,
    Compared,
    DivergenceLossRule,
)
from jaxmem.head.verbs.kinds import Kind
from jaxmem.head.verbs.sampled_two_heads import density_of, entries
from jaxmem.head.verbs.two_heads import TwoHeadsRule, beside


@dataclasses.dataclass(frozen=True)
class TwoHeadsLossRule(DivergenceLossRule):
    """`DivergenceLossRule` with a reference.

    Given is `(rows, scale, reference rows, reference)`.
    """

    divergence: Kind
    reference_spec: Spec
    kernels: bool

    def heads(self, source, given):
        return self._two_heads.cast(source, given[3])

    def compare(self, heads, given, row_ids):
        (rows, _, reference_rows, _), (policy, reference) = given, heads
        of_heads = rows, reference_rows
        logits = self._two_heads.logits(policy, reference, of_heads, row_ids)
        value, saved, masses = self._two_heads.values(*logits[1:])
        # Columns that only the policy has are padding and have no largest logit.
        return Compared(logits, value, saved, saved["normalisers"][0].max, masses)

    def by_logits(self, logits, saved, g):
        return ByLogits(self._two_heads.derivative(logits, saved, g))

    def entries(self, tile, starts):
        if tile["scale"] is not None:
            return super().entries(tile, starts)
        logits, _, saved, *_ = tile["compared"]
        return entries(self._two_heads, logits, saved, tile["masses"], starts)

    def density(self, logits, saved):
        policy, reference = beside(saved["normalisers"])
        of = density_of(self.divergence, *logits[1:], *policy, *reference)
        return of, None

    @property
    def _two_heads(self) -> TwoHeadsRule:
        rest = self.divergence, self.reference_spec, self.kernels
        return TwoHeadsRule(self.spec, *rest)
