"""The derivatives of the head under `Sample(k)`: rules that keep few entries.

The forward pass samples the entries of each token's derivative while its logits are
alive (`maths.column_sampling`). The backward pass uses them for any cotangents, and
recomputes nothing. If no derivative is requested, nothing is sampled, unless results
are estimated from samples: with a forward pass in 8 bits (`maths.eight_bits`), or from
entries that were recorded before (`maths.recorded`).
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxmem.head.backends.protocol import sampler_of
from jaxmem.head.maths import eight_bits, recorded, row_stats, vocab_shards
from jaxmem.head.maths.backend_operands import Factors, TokenRows, part_labels
from jaxmem.head.maths.column_sampling import Entries
from jaxmem.head.maths.row_stats import TokenStats
from jaxmem.head.verbs.rule import on_tokens
from jaxmem.head.verbs.traced_loss import LossOperands
from jaxmem.head.verbs.vjp import (
    BackendRule,
    LossRule,
    StatisticsResiduals,
    StatisticsRule,
)

# Residuals per row besides the entries and the outputs.
_SAVED = ("logprob", "max", "log_sum")


class _SampledRule(BackendRule):
    """A rule whose forward pass samples entries."""

    @property
    def errors(self) -> tuple[str, ...]:
        """Names of outputs that the exact forward pass does not have."""
        return () if self.spec.forward == "exact" else (eight_bits.ERROR,)

    def outputs(self, source, rows, names) -> dict:
        """See `BackendRule.outputs`; a derivative changes no bit of them."""
        if not self.errors:
            return super().outputs(source, rows, names)
        return self.sampled(source, rows, names)[0]

    def sampled(self, source: Factors, rows: TokenRows, names) -> tuple[dict, Entries]:
        """The named outputs of every row, and its entries."""
        loop = functools.partial(self.pass_of, names=names)
        return on_tokens(self.spec, loop, source, rows, self.shared(source, rows))

    def shared(
        self, source: Factors, rows: TokenRows
    ) -> tuple[eight_bits.EightBits, ...]:
        """Operands that the forward pass computes once for all tokens."""
        if self.spec.forward != "int8":
            return ()
        return (eight_bits.of_call(self.spec, source, rows),)

    def pass_of(self, spec, source, rows, shared, names) -> tuple[dict, Entries]:
        """The forward pass over this device's tokens."""
        passes = {
            "exact": self._exact_pass, "int8": self._pass_in_8_bits,
            "recorded": self._recorded_pass,
        }  # fmt: skip
        return passes[spec.forward](spec, source, rows, names, *shared)

    def _exact_pass(self, *operands):
        return sampler_of(self.backend).forward(*operands)

    def _pass_in_8_bits(self, *operands):
        assert self.backend.eight_bits is not None, self.backend.name
        return self.backend.eight_bits.forward(*operands)

    def _recorded_pass(self, spec, source, rows, names):
        """New logits of labels and recorded entries, and what follows from them."""
        own = recorded.own_entries(spec, rows)
        row_ids = jnp.arange(len(rows.labels), dtype=jnp.int32)
        labels = part_labels(spec, rows, row_ids)
        exists = (labels >= 0) & (labels < spec.columns)
        labels = jnp.where(exists, labels, spec.columns)
        columns = jnp.concatenate([labels[:, None], own.columns], axis=1)
        products = sampler_of(self.backend).logits_at(spec, source, rows, columns)
        z = recorded.scaled(spec, source, rows, columns, products)
        new = recorded.estimated(spec, rows, own, z[:, 0], z[:, 1:])
        values = new.outputs._asdict() | {eight_bits.ERROR: new.error}
        outputs = {
            k: jnp.where(rows.active, values[k], jnp.zeros_like(values[k]))
            for k in names
        }
        return outputs, new.entries


class SampledStatisticsRule(_SampledRule, StatisticsRule):
    """`StatisticsRule` with a sampled derivative."""

    def outputs(self, source, rows, names):
        return super().outputs(self._vary_weights(source), rows, names)

    def _vary_weights(self, source):
        """The source; W is typed as varying along all axes, even if replicated."""
        W_bias = vocab_shards.vary(source[1:], self.spec.part_varying)
        return type(source)(source.hidden, *W_bias)

    def forward_and_save(self, trained, fixed):
        (source,), (rows,), spec = trained, fixed, self.spec
        names = tuple(dict.fromkeys((*spec.outputs, *_SAVED)))
        results, entries = self.sampled(self._vary_weights(source), rows, names)
        results = {k: checkpoint_name(v, f"jaxmem_{k}") for k, v in results.items()}
        entries = jax.tree.map(lambda x: checkpoint_name(x, "jaxmem_entries"), entries)
        residuals = StatisticsResiduals(source, rows, results, entries)
        return {k: results[k] for k in spec.outputs}, residuals

    def _backend_backward(self):
        backward = sampler_of(self.backend).backward
        return lambda spec, source, *others: backward(
            spec, self._vary_weights(source), *others
        )


class SampledLossRule(_SampledRule, LossRule):
    """`LossRule` with a sampled derivative.

    Entries and statistics of all tokens are computed before the loss is differentiated,
    so that the gradients are one sum over all tokens. Where results are estimates,
    metrics have the error of each token.
    """

    def forward(self, trained, fixed):
        (source, per_token, count), ((rows,), closed) = trained, fixed
        stats = self.outputs(source, rows, (*TokenStats._fields, *self.errors))
        error = {k: stats.pop(k) for k in self.errors}
        total, metrics = self.total(stats, rows, LossOperands(per_token, closed), count)
        return total, _add_error(metrics, error)

    def forward_and_save(self, trained, fixed):
        (rows,), closed = fixed
        constants = rows, *self.shared(trained[0], rows)
        return super().forward_and_save(trained, (constants, closed))

    def one_pass(self, spec, source, constants, operands, count):
        (rows, *shared), sampler = constants, sampler_of(self.backend)
        names = (*TokenStats._fields, "max", "log_sum", *self.errors)
        outputs, entries = self.pass_of(spec, source, rows, shared, names)
        error = {k: outputs.pop(k) for k in self.errors}
        values, cotangents = self.differentiate(spec, outputs, rows, operands, count)
        values = values._replace(metrics=_add_error(values.metrics, error))
        outputs = row_stats.Outputs(**outputs)
        dsource = sampler.backward(spec, source, rows, outputs, cotangents, entries)
        return values, dsource


def _add_error(metrics, error):
    """Metrics of loss_fn, and the error of each token."""
    if repeated := metrics.keys() & error.keys():
        raise ValueError(
            f"loss_fn's metric {min(repeated)!r} must have another name: token_loss "
            "has one of that name where results are estimates"
        )
    return metrics | error
