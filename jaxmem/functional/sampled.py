"""The derivatives of the head under `Sample(k)`: rules that keep few entries.

The forward pass samples the entries of each token's derivative while its logits are
alive (`core.column_sampling`). The backward pass uses them for any cotangents, and
recomputes nothing. If no derivative is requested, nothing is sampled.
"""

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxmem.backends.protocol import Backend, Sampler
from jaxmem.core import row_stats
from jaxmem.core.row_stats import TokenStats
from jaxmem.functional.rule import by_tokens, fitted, of_tokens, once
from jaxmem.functional.vjp import LossRule, StatisticsRule

# Residuals per row besides the entries and the outputs.
_SAVED = ("logprob", "max", "log_sum")


def sampler_of(backend: Backend) -> Sampler:
    """The sampler of a backend that was chosen for a call with `Sample(k)`."""
    assert backend.sampler is not None, f"{backend.name!r} has no sampler"
    return backend.sampler


class SampledStatisticsRule(StatisticsRule):
    """`StatisticsRule` with a sampled derivative."""

    def forward_and_save(self, trained, fixed):
        """See `Rule.forward_and_save`."""
        (source,), (rows,), spec = trained, fixed, self.spec
        names = (*spec.outputs, *(k for k in _SAVED if k not in spec.outputs))
        forward = sampler_of(self.backend).forward
        run = by_tokens(
            spec,
            lambda s, r: forward(fitted(spec, r), s, r, names),
            (of_tokens(source), True),
            True,
        )
        results, entries = once(run)(source, rows)
        results = {k: checkpoint_name(v, f"jaxmem_{k}") for k, v in results.items()}
        entries = jax.tree.map(lambda x: checkpoint_name(x, "jaxmem_entries"), entries)
        residuals = source, rows, results, entries
        return {k: results[k] for k in spec.outputs}, residuals

    def _backward(self, source, rows, saved, cotangents, kept):
        backward, of_source = sampler_of(self.backend).backward, of_tokens(source)
        run = by_tokens(
            self.spec,
            lambda s, r, *other: backward(fitted(self.spec, r), s, r, *other),
            (of_source, True, True, True, True),
            of_source,
        )
        return once(run)(source, rows, saved, cotangents, kept)


class SampledLossRule(LossRule):
    """`LossRule` with a sampled derivative.

    Entries and statistics of all tokens are computed before the loss is differentiated,
    so that the gradients are one sum over all tokens.
    """

    def one_pass(self, source, given, operands, count):
        """See `LossRule.one_pass`."""
        rows = given
        spec, sampler = fitted(self.spec, rows), sampler_of(self.backend)
        names = (*TokenStats._fields, "max", "log_sum")
        outputs, entries = sampler.forward(spec, source, rows, names)
        values, cotangents = self.differentiate(spec, outputs, rows, operands, count)
        outputs = row_stats.Outputs(**outputs)
        dsource = sampler.backward(spec, source, rows, outputs, cotangents, entries)
        return values, dsource
