"""The rule of a loss of statistics and of a divergence from another head.

With the mean slope m of `TwoHeadsRule`, the derivative of the divergence by the
policy's logits is slopes - p m.
"""

import dataclasses
from typing import NamedTuple

import jax

from jaxmem.head.backends.protocol import ByLogits
from jaxmem.head.maths.backend_operands import Factors, TokenRows
from jaxmem.head.maths.spec import Spec
from jaxmem.head.verbs.divergence_loss_rule import Compared, DivergenceLossRule
from jaxmem.head.verbs.kinds import Kind
from jaxmem.head.verbs.sampled_two_heads import density_of, entries
from jaxmem.head.verbs.two_heads import TwoHeadsRule, beside


class TwoHeadsConstants(NamedTuple):
    """Constants of `TwoHeadsLossRule`."""

    rows: TokenRows
    scale: jax.Array | None  # [N]
    reference_rows: TokenRows
    reference: Factors


@dataclasses.dataclass(frozen=True)
class TwoHeadsLossRule(DivergenceLossRule):
    """`DivergenceLossRule` with a reference."""

    divergence: Kind
    reference_spec: Spec

    def heads(self, source, constants):
        rows = constants.rows, constants.reference_rows
        return self._two_heads.heads(source, rows, constants.reference)

    def compare(self, constants, row_ids, *logits):
        logits = self._two_heads.aligned(*logits)
        value, saved, masses = self._two_heads.values(*logits[1:])
        # Columns that only the policy has are padding and have no largest logit.
        return Compared(logits, value, saved, saved["normalisers"][0].max, masses)

    def by_logits(self, logits, saved, g):
        return ByLogits(self._two_heads.derivative(logits, saved, g))

    def entries(self, tile, starts):
        if tile["scale"] is not None:
            return super().entries(tile, starts)
        logits, saved = tile["compared"].logits, tile["compared"].saved
        return entries(self._two_heads, logits, saved, tile["masses"], starts)

    def density(self, logits, saved):
        policy, reference = beside(saved["normalisers"])
        density = density_of(self.divergence, *logits[1:], *policy, *reference)
        return density, None

    @property
    def _two_heads(self) -> TwoHeadsRule:
        facts = self.divergence, self.reference_spec
        return TwoHeadsRule(self.spec, self.backend, *facts)
