"""The derivatives of the head: the rules of `token_stats` and of `token_loss`.

`token_stats` does not know how its outputs are used, so its backward pass recomputes
each chunk's logits; except if the head is frozen and there is one output, whose
derivative with respect to hidden is then a residual that is scaled by the cotangent.
`token_loss` knows the loss, and computes everything from the same logits. If the
vocabulary is sharded, partial statistics are merged before either.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from jaxmem.head.backends import vocab_groups
from jaxmem.head.backends.protocol import Backend
from jaxmem.head.maths import row_stats, vocab_shards
from jaxmem.head.maths.backend_operands import (
    TokenRows,
    for_all_chunks,
    outputs,
    put_all,
    take,
    trained as trained_part,
)
from jaxmem.head.maths.row_stats import Cotangents, Outputs, TokenStats
from jaxmem.head.maths.spec import Spec
from jaxmem.head.verbs import traced_loss
from jaxmem.head.verbs.rule import Rule, empty, on_tokens, scaled, sum_over_shards
from jaxmem.head.verbs.traced_loss import LossOperands, TracedLoss, Values

# Residuals per row besides the outputs. From max and log_sum logits are recomputed; the
# kernels compute the label's column apart, from logprob, of a verb without labels, too.
_SAVED = ("logprob", "max", "log_sum")


@dataclasses.dataclass(frozen=True)
class BackendRule(Rule):
    """A rule whose loops are implemented by a backend."""

    backend: Backend

    def outputs(self, source, rows, names) -> dict:
        """The named fields of `Outputs`, [N], merged over the vocabulary's shards."""
        forward = functools.partial(self._backend_forward(), names=names)
        return on_tokens(self.spec, forward, source, rows)

    def _backend_forward(self):
        """`forward` of the backend, by groups or shards if the vocabulary has any."""
        if self.spec.vocab_groups:
            return functools.partial(vocab_groups.outputs, self.backend)
        return self._merge_outputs if self.spec.shards else self.backend.loops.forward

    def _backend_backward(self):
        """`backward` of the backend, by groups or blocks if the vocabulary has any."""
        if self.spec.vocab_groups:
            return functools.partial(vocab_groups.backward, self.backend)
        blocks, many = self.backend.blocks, self.spec.gradient_blocks > 1
        return (blocks if blocks and many else self.backend.loops).backward

    def _merge_outputs(self, spec, source, rows, names):
        stats = self.backend.loops.statistics(spec, source, rows)
        return outputs(spec, rows, stats, names)


class StatisticsRule(BackendRule):
    """The rule of fields of `TokenStats`; trained is `(source,)`, fixed `(rows,)`."""

    def forward(self, trained, fixed):
        (source,), (rows,) = trained, fixed
        return self.outputs(source, rows, self.spec.outputs)

    def forward_and_save(self, trained, fixed):
        (source,), (rows,), spec = trained, fixed, self.spec
        if spec.keeps_gradient:
            results, dhidden = on_tokens(spec, self._with_gradient, source, rows)
            dhidden = checkpoint_name(dhidden, "jaxmem_dhidden")
            nothing = dict.fromkeys((*spec.outputs, *_SAVED), empty())
            return results, StatisticsResiduals(source, rows, nothing, dhidden)
        names = tuple(dict.fromkeys((*spec.outputs, *_SAVED)))
        results = self.outputs(source, rows, names)
        results = {k: checkpoint_name(v, f"jaxmem_{k}") for k, v in results.items()}
        residuals = StatisticsResiduals(source, rows, results, empty())
        return {k: results[k] for k in spec.outputs}, residuals

    def backward(self, residuals, cotangents):
        cotangents = sum_over_shards(self.spec, cotangents)
        source, rows, kept = residuals.source, residuals.rows, residuals.kept
        if self.spec.keeps_gradient:
            (g,) = cotangents.values()
            return (scaled(kept, rows.active, g),)
        cotangents.pop("is_argmax", None)  # jax gives a boolean one without values
        asked = {k: g for k, g in cotangents.items() if type(g) is not SymbolicZero}
        if not asked:
            return (jax.tree.map(jnp.zeros_like, source),)
        operands = source, rows, Outputs(**residuals.results), Cotangents(**asked)
        if self.spec.gradient_samples:
            operands = *operands, kept
        return (on_tokens(self.spec, self._backend_backward(), *operands),)

    def _with_gradient(self, spec, source, rows):
        """The one output, and its derivative with respect to hidden, [N, D]."""
        n_rows, (name,) = rows.labels.shape[0], spec.outputs

        def of_chunk(row_ids, outputs):
            ones = (row_ids < n_rows).astype(spec.stats_dtype)
            return {name: getattr(outputs, name)}, Cotangents(**{name: ones})

        zeros = {name: jnp.zeros(n_rows, spec.stats_dtype)}
        results, dsource = self.backend.loops.one_pass(
            spec, source, rows, of_chunk, zeros, (name,)
        )
        return results, dsource.hidden


class LossResiduals(NamedTuple):
    """Residuals of `LossRule`, from which its backward pass scales the cotangents."""

    dsource: Any  # cotangent of the source for a loss of 1
    types: Any  # empty arrays of the source's dtypes
    dper_token: Any
    total: jax.Array  # the loss
    count: jax.Array
    late: jax.Array | None  # divisor that is still to be applied; None for 1


class StatisticsResiduals(NamedTuple):
    """Residuals of `StatisticsRule`."""

    source: Any
    rows: TokenRows
    results: dict[str, jax.Array]  # saved outputs by name
    kept: Any  # hidden's gradient or sampled entries; or an empty array


@dataclasses.dataclass(frozen=True)
class LossRule(BackendRule):
    """The rule of a loss that is known in the forward pass.

    trained is `(source, per_token, count)`, fixed is `(constants, closed)`, where the
    first of the constants is the tokens' `TokenRows`. The result is the sum of the
    active rows' losses divided by count, and metrics [N] by name, which are constants.
    """

    loss: TracedLoss

    def forward(self, trained, fixed):
        (source, per_token, count), ((rows,), closed) = trained, fixed
        stats = self.outputs(source, rows, TokenStats._fields)
        return self.total(stats, rows, LossOperands(per_token, closed), count)

    def forward_and_save(self, trained, fixed):
        (source, per_token, count), (constants, closed) = trained, fixed
        operands, early = (
            LossOperands(per_token, closed),
            self._early_divisor(count, constants),
        )
        values, dsource = on_tokens(
            self.spec, self._narrowed_pass, source, constants, operands, early
        )
        # Empty arrays of the cotangents' dtypes: they are still in the sums' dtypes.
        types = jax.tree.map(lambda x: jnp.zeros(0, x.dtype), source)
        if self.spec.frozen_head:
            nothing = jax.tree.map(lambda x: empty(), source)
            dsource = nothing._replace(hidden=dsource.hidden)
        total = self._divide(jnp.sum(values.loss), count)
        late = None if self.divides_early else count / early
        residuals = LossResiduals(dsource, types, values.per_token, total, count, late)
        return (total, values.metrics), residuals

    def backward(self, residuals, cotangents):
        sources = residuals.dsource, residuals.types
        dsource, types = (trained_part(self.spec, x) for x in sources)
        dper_token, count = residuals.dper_token, residuals.count
        g, _ = cotangents
        if isinstance(g, SymbolicZero):
            zero = jax.tree.map(
                lambda x, like: jnp.zeros_like(x, like.dtype), dsource, types
            )
            return zero, *jax.tree.map(jnp.zeros_like, (dper_token, count))
        g_head = sum_over_shards(self.spec, g)
        if residuals.late is not None:
            g_head = self._divide(g_head, residuals.late)
        dsource = jax.tree.map(functools.partial(_scale_to, g_head), dsource, types)
        scale = functools.partial(_scale_to, self._divide(g, count))
        dper_token = jax.tree.map(scale, dper_token, dper_token)
        return dsource, dper_token, self._divide(-g * residuals.total, count)

    def refuse(self, fixed):
        """See `Rule.refuse`; also raises for a gradient of what loss_fn closes over."""
        super().refuse(fixed)
        for matters, x in zip(self.loss.closed, fixed[1], strict=True):
            if matters and x.perturbed:
                kind = f"{x.value.dtype}{list(x.value.shape)}"
                raise NotImplementedError(
                    f"jaxmem: loss_fn closes over an array, {kind}, that is being "
                    "differentiated; pass it as a per-token argument (broadcast to "
                    "labels' shape), or wrap it in jax.lax.stop_gradient"
                )

    @property
    def divides_early(self) -> bool:
        """True if cotangents are divided by the count before the logits' derivative.

        The gradients then need no further scaling. float16 would lose small
        derivatives.
        """
        return self.spec.compute_dtype != jnp.float16

    def _early_divisor(self, count, constants):
        """The divisor of cotangents before the logits' derivative.

        It is the count, but in float16 a power of two near the mean weight of a token,
        as far as the count tells it: with large weights, derivatives would overflow.
        They would underflow with weights so small that their sum is below 1.
        """
        if self.divides_early:
            return count
        n_active = jnp.maximum(jnp.sum(constants[0].active, dtype=jnp.int32), 1)
        mean = jnp.maximum(count / n_active, jnp.minimum(count, 1))
        return row_stats.power_of_two(mean)

    def total(self, stats: dict, rows: TokenRows, operands: LossOperands, count) -> Any:
        """(loss, metrics) from statistics [N] by name."""
        values = on_tokens(self.spec, self._values, stats, rows, operands)
        return self._divide(jnp.sum(values.loss), count), values.metrics

    def _divide(self, x, count):
        """The quotient; with groups, times an inverse: XLA divides by a constant so.

        The bits are then the same where the count is known only at run time.
        """
        return x * (1 / count) if self.spec.vocab_groups else x / count

    def _values(self, spec, stats, rows, operands) -> Values:
        """The loss and its metrics from statistics [N]."""
        loss, n_rows = self.loss, rows.labels.shape[0]

        def chunk(row_ids, values):
            fields = (take(stats[k], row_ids) for k in TokenStats._fields)
            new = traced_loss.evaluate(
                loss, row_ids, TokenStats(*fields), operands, n_rows
            )
            return put_all(values, row_ids, new)

        zeros = traced_loss.nothing(loss, spec, operands, n_rows, pull=False)
        zeros = vocab_shards.vary(zeros, spec.varying)
        return for_all_chunks(loss.n_rows, rows.active, chunk, zeros)

    def one_pass(
        self, spec: Spec, source, constants, operands: LossOperands, count
    ) -> tuple[Values, Any]:
        """Values of every row, and the cotangent of the source, for a loss of 1.

        The losses' cotangents are divided by the count, that of `_early_divisor`.
        """
        (rows,), n_rows = constants, constants[0].labels.shape[0]
        if spec.gradient_blocks > 1 or spec.vocab_groups:
            return self._two_passes(spec, source, rows, operands, count)

        def of_chunk(row_ids, outputs):
            stats = TokenStats(*(getattr(outputs, k) for k in TokenStats._fields))
            values, g = traced_loss.differentiate(
                self.loss, row_ids, stats, operands, n_rows
            )
            return values, jax.tree.map(lambda x: x / count, g)

        zeros = traced_loss.nothing(self.loss, spec, operands, n_rows, pull=True)
        return self.backend.loops.one_pass(
            spec, source, rows, of_chunk, zeros, self.loss.fields
        )

    def _two_passes(self, spec, source, rows, operands, count):
        """`one_pass` by blocks or groups of columns, which recomputes the logits.

        Without those of the whole vocabulary the loss's derivative is not known.
        """
        names = (*TokenStats._fields, "max", "log_sum")
        outputs = self._backend_forward()(spec, source, rows, names)
        values, cotangents = self.differentiate(spec, outputs, rows, operands, count)
        saved = Outputs(**outputs)
        return values, self._backend_backward()(spec, source, rows, saved, cotangents)

    def _narrowed_pass(self, spec, source, constants, operands, count):
        """`one_pass`, whose cotangents may be summed over devices."""
        values, dsource = self.one_pass(spec, source, constants, operands, count)
        if self.spec.token_parallel and self.divides_early:
            # Halves the bytes of the all-reduce.
            kept = trained_part(self.spec, source)
            dsource = jax.tree.map(lambda x, like: x.astype(like.dtype), dsource, kept)
        return values, dsource

    def differentiate(self, spec, outputs, rows, operands, count) -> tuple:
        """The losses' values and the cotangents of all rows, [N]; 0 if inactive."""
        loss, n_rows = self.loss, rows.labels.shape[0]

        def chunk(row_ids, results):
            stats = TokenStats(*(take(outputs[k], row_ids) for k in TokenStats._fields))
            new = traced_loss.differentiate(loss, row_ids, stats, operands, n_rows)
            return put_all(results, row_ids, new)

        zeros = dict.fromkeys(loss.fields, jnp.zeros(n_rows, spec.stats_dtype))
        nothing = (
            traced_loss.nothing(loss, spec, operands, n_rows, pull=True),
            Cotangents(**zeros),
        )
        nothing = vocab_shards.vary(nothing, spec.varying)
        values, g = for_all_chunks(loss.n_rows, rows.active, chunk, nothing)
        return values, jax.tree.map(lambda x: self._divide(x, count), g)


def _scale_to(scale, x, like):
    """The product in the wider dtype of both, rounded to the dtype of `like`."""
    wide = np.promote_types(scale.dtype, x.dtype)
    return (scale.astype(wide) * x.astype(wide)).astype(like.dtype)
