"""The rule of a loss of each token's statistics and of its divergence.

The divergence is the first of the loss's per-token arguments, so that the loss's own
derivative gives its cotangent g. The derivative by the policy's logits is that of the
statistics, plus that of the divergence for g, which a subclass knows. The statistics
may be of the logits at another temperature.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jaxmem.head.backends.protocol import (
    ByLogits,
    ScaledHead,
    columns_of,
    sampler_of,
)
from jaxmem.head.maths import column_sampling, row_stats, scaling, vocab_shards
from jaxmem.head.maths.backend_operands import (
    TokenRows,
    merged,
    part_labels,
    put,
    take,
)
from jaxmem.head.maths.column_sampling import SparseDerivative
from jaxmem.head.maths.id_columns import distinct_columns, existing_columns, logits_at
from jaxmem.head.maths.row_stats import TokenStats
from jaxmem.head.maths.spec import Spec
from jaxmem.head.verbs import arguments, columns_rule, kinds, selected, traced_loss
from jaxmem.head.verbs.rule import on_tokens
from jaxmem.head.verbs.traced_loss import LossOperands, Values
from jaxmem.head.verbs.vjp import LossRule


class Compared(NamedTuple):
    """A divergence of some rows, and the arrays that its derivative reads."""

    logits: tuple[jax.Array, ...]  # the policy's first, [C, columns]
    value: jax.Array  # [C]
    saved: Any  # of each row
    largest: jax.Array | None  # the policy's largest logits [C], if known
    masses: Any = None  # of `TwoHeadsRule.values`


@dataclasses.dataclass(frozen=True)
class DivergenceLossRule(LossRule):
    """`LossRule` with a divergence.

    The constants have fields `rows` and `scale`, and those of a subclass. The
    statistics are those of the policy's logits times the scale [N]; it may be None. The
    operands' per-token arrays lack the divergence, which the loops compute.
    """

    has_ids: ClassVar[bool] = False  # `constants.ids`, [N, K], are those of `by_logits`

    def refuse(self, fixed):
        super().refuse(fixed)
        scale = fixed[0].scale
        if scale is not None and scale.perturbed:  # the rows' temperature is not
            raise NotImplementedError(
                "jaxmem: statistics_temperature is not differentiable here; wrap it in "
                "jax.lax.stop_gradient"
            )

    def heads(self, source, constants) -> tuple[ScaledHead, ...]:
        """The policy, and maybe its reference."""
        return (ScaledHead(self.spec, source, constants.rows),)

    def compare(self, constants, row_ids, *logits: jax.Array) -> Compared:
        """The divergence of some rows, from the logits of each head."""
        raise NotImplementedError

    def by_logits(self, logits, saved, g) -> ByLogits:
        """The divergence's derivative for cotangents g [C], 0 past the last active row.

        The logits are all columns or some of those of `Compared`.
        """
        raise NotImplementedError

    def density(self, logits, saved) -> tuple[jax.Array, jax.Array | None]:
        """(density [C, V] by which columns are sampled, exact ids [C, K] or None)."""
        raise NotImplementedError

    def entries(self, tile, starts) -> tuple[jax.Array, jax.Array]:
        """The sampled columns of some rows and their weights, [C, K] each."""
        density, ids = self.density(tile["compared"].logits, tile["compared"].saved)
        if tile["scale"] is not None:
            outputs = tile["outputs"]
            z = _scale_rows(tile["compared"].logits[0], tile["scale"])
            normaliser = row_stats.Normaliser(outputs.max, outputs.log_sum)
            p = jnp.exp(row_stats.log_softmax(z, normaliser))
            density = (density + p[:, : density.shape[1]]) / 2
        drawn = columns_rule.select(self.spec, density, ids, starts)
        return column_sampling.weighed(self.spec, drawn)

    def forward(self, trained, fixed):
        (source, per_token, count), (constants, closed) = trained, fixed
        stats, divergence = on_tokens(
            self.spec, self._compute_outputs, source, constants
        )
        operands = LossOperands((divergence, *per_token), closed)
        return self.total(stats, constants.rows, operands, count)

    def one_pass(self, spec, source, constants, operands, count):
        rows, rule = constants.rows, dataclasses.replace(self, spec=spec)
        heads, n_rows = rule.heads(source, constants), len(rows.labels)
        zeros = traced_loss.nothing(
            self.loss, spec, self._add_divergence(operands, n_rows), n_rows, pull=True
        )
        zeros = zeros._replace(per_token=zeros.per_token[1:])
        zeros = vocab_shards.vary(zeros, spec.varying)
        loops = columns_of(self.backend)

        def of_chunk(row_ids, *logits) -> tuple[Values, Any]:
            tile = rule._read_rows(constants, row_ids, *logits)
            values, g = rule._differentiate(tile, row_ids, operands, count, n_rows)
            derivative = rule.sampled if spec.gradient_samples else rule.exact
            return values, derivative(tile, constants, row_ids, g)

        if not spec.gradient_samples:
            return loops.one_pass(heads, of_chunk, zeros)
        zeros = zeros, rule.nothing_sampled(constants)
        values, dz = loops.forward(heads, of_chunk, zeros)
        return values, sampler_of(self.backend).gradient(spec, source, rows, dz)

    def _compute_outputs(self, spec, source, constants) -> tuple[dict, jax.Array]:
        """Statistics by name and the divergence, [N]; 0 where inactive."""
        rule = dataclasses.replace(self, spec=spec)

        def of_chunk(row_ids, *logits):
            tile = rule._read_rows(constants, row_ids, *logits)
            new = {k: getattr(tile["outputs"], k) for k in TokenStats._fields}
            return new, tile["compared"].value

        zero = jnp.zeros(constants.rows.labels.shape[0], spec.stats_dtype)
        stats = dict.fromkeys(TokenStats._fields, zero)
        results = stats | {"is_argmax": zero.astype(bool)}, zero
        results = vocab_shards.vary(results, spec.varying)
        loops = columns_of(self.backend)
        return loops.forward(rule.heads(source, constants), of_chunk, results)

    def _read_rows(self, constants, row_ids, *logits) -> dict[str, Any]:
        """The tile of some rows: arrays that the loss and its derivative read."""
        rows, scale = constants.rows, constants.scale
        compared = self.compare(constants, row_ids, *logits)
        labels, largest = part_labels(self.spec, rows, row_ids), compared.largest
        if scale is not None:  # rows past the last one have none
            scale = jnp.where(row_ids < len(scale), take(scale, row_ids), 1)
            largest = None if largest is None else largest * scale
        z = _scale_rows(compared.logits[0], scale)
        stats, _ = row_stats.of_tile(z, labels, largest)
        outputs = merged(self.spec, rows, row_ids, stats)
        masses, compared = compared.masses, compared._replace(masses=None)
        # The derivative computes probabilities again instead of storing [C, V] of them.
        if self.spec.shards:  # jax 0.10 gives all results of a barrier one type
            logits = lax.optimization_barrier(compared.logits)
            compared = compared._replace(logits=logits)
        else:
            compared = lax.optimization_barrier(compared)
        return {
            "compared": compared, "outputs": outputs, "labels": labels, "scale": scale,
            "masses": masses,
        }  # fmt: skip

    def _differentiate(
        self, tile, row_ids, operands, count, n_rows
    ) -> tuple[Values, Any]:
        """The rows' values, and cotangents of their statistics and divergence."""
        outputs, compared = tile["outputs"], tile["compared"]
        operands = self._add_divergence(operands, n_rows, row_ids, compared.value)
        fields = (getattr(outputs, k) for k in TokenStats._fields)
        values, g = traced_loss.differentiate(
            self.loss, row_ids, TokenStats(*fields), operands, n_rows
        )
        g_divergence, *g_per_token = values.per_token
        assert g_divergence is not None  # that of an array of floats exists
        g, g_divergence = jax.tree.map(lambda x: x / count, (g, g_divergence))
        return values._replace(per_token=tuple(g_per_token)), (g, g_divergence)

    def exact(self, tile, constants, row_ids, cotangents) -> ByLogits:
        """The whole derivative, for cotangents of statistics and divergence."""
        compared, (g, g_divergence) = tile["compared"], cotangents
        z, labels = compared.logits[0], tile["labels"]
        total = self._derivative(tile, constants.rows, row_ids, g)
        parts = self.by_logits(compared.logits, compared.saved, g_divergence)
        dz = total(z, row_stats.is_label(z, labels), parts.everywhere)
        if parts.ids is None:
            return ByLogits(dz)
        is_label = existing_columns(self.spec, parts.ids) == labels[:, None]
        at_ids = total(logits_at(self.spec, z, parts.ids), is_label, parts.at_ids)
        return ByLogits(dz, parts.ids, at_ids)

    def nothing_sampled(self, constants) -> SparseDerivative:
        """`sampled` of inactive rows."""
        spec, n_ids = self.spec, 0
        if self.has_ids:
            n_ids = constants.ids.shape[1]
        n_rows = len(constants.rows.labels)
        shape = n_rows, 1 + n_ids + (spec.gradient_samples or 0)
        columns = jnp.full(shape, spec.columns, jnp.int32)
        none = SparseDerivative(columns, jnp.zeros(shape, spec.stats_dtype))
        return vocab_shards.vary(none, spec.part_varying)

    def sampled(self, tile, constants, row_ids, cotangents) -> SparseDerivative:
        """Few entries of `exact`.

        Those of the label and of given ids are exact; the others are sampled.
        """
        compared, spec = tile["compared"], self.spec
        labels, (g, g_divergence) = tile["labels"][:, None], cotangents
        draws = take(constants.rows.draws, row_ids)
        rows = constants.rows._replace(draws=draws)
        starts = column_sampling.starts_of(spec, rows)
        drawn, weights = self.entries(tile, starts)
        columns = jnp.concatenate([labels, drawn], axis=1)
        logits = column_sampling.at_columns(compared.logits, columns)
        total = self._derivative(tile, constants.rows, row_ids, g)
        parts = self.by_logits(logits, compared.saved, g_divergence)
        dz = total(logits[0], columns == labels, parts.everywhere)
        weights = jnp.where(drawn == labels, 0, weights)
        weights = jnp.concatenate([jnp.ones_like(dz[:, :1]), weights], axis=1)
        if parts.ids is not None:
            ids = distinct_columns(spec, parts.ids)
            label_is_id = jnp.any(ids == labels, axis=1)
            weights = weights.at[:, 0].set(jnp.where(label_is_id, 0.0, 1.0))
            z = logits_at(spec, compared.logits[0], parts.ids)
            at_ids = total(z, ids == labels, parts.at_ids)
            columns = jnp.concatenate([columns, ids], axis=1)
            dz = jnp.concatenate([dz, at_ids], axis=1)
            weights = jnp.pad(weights, ((0, 0), (0, ids.shape[1])), constant_values=1)
        used = (columns >= 0) & (columns < spec.columns) & (weights > 0)
        columns = jnp.where(used, columns, spec.columns)
        return SparseDerivative(columns, jnp.where(used, weights * dz, 0))

    def _derivative(self, tile, rows, row_ids, g) -> Callable[..., jax.Array]:
        """The derivative by logits before softcap and temperature, as a function.

        It takes scaled logits [C, K], booleans that mark the label's, and the
        divergence's derivative by them, for cotangents g of the statistics.
        """
        outputs, spec = tile["outputs"], self.spec
        # Rows past the last active one: ln S = inf makes every p zero.
        exists = row_ids < rows.labels.shape[0]
        outputs = outputs._replace(log_sum=jnp.where(exists, outputs.log_sum, jnp.inf))
        c, scale = row_stats.coefficients(outputs, g), tile["scale"]

        def add(z, is_label, of_divergence):
            dz = row_stats.dlogits_of(_scale_rows(z, scale), is_label, outputs, c)
            dz = _scale_rows(dz, scale) + of_divergence
            return scaling.unscale(spec, rows, row_ids, z, dz)

        return add

    def _add_divergence(
        self, operands, n_rows, row_ids=None, divergence=None
    ) -> LossOperands:
        """The operands, with the divergence of some rows as first per-token array."""
        first = jnp.zeros(n_rows, self.spec.stats_dtype)
        if row_ids is not None:
            first = put(first, row_ids, divergence)
        return operands._replace(per_token=(first, *operands.per_token))


def _scale_rows(z, scale):
    """Rows z [C, V] times scale [C], if it is not None."""
    return z if scale is None else z * scale[:, None]


def statistics_scale(
    spec: Spec, shape: tuple[int, ...], rows: TokenRows, temperature: ArrayLike | None
) -> jax.Array | None:
    """Factor of the policy's divided logits for the statistics, [N]; None for 1."""
    if temperature is None:
        return None
    divisor = arguments.read_temperature(
        "statistics_temperature", temperature, shape, spec.stats_dtype
    )
    if divisor is None:
        return rows.temperature
    return (1 if rows.temperature is None else rows.temperature) / divisor


class ColumnsConstants(NamedTuple):
    """Constants of `ColumnsLossRule`."""

    rows: TokenRows
    scale: jax.Array | None  # [N]
    ids: jax.Array  # int32 [N, K], distinct or negative
    log_q: jax.Array  # [N, K], the teacher's


@dataclasses.dataclass(frozen=True)
class ColumnsLossRule(DivergenceLossRule):
    """`DivergenceLossRule` of the columns that are known of a teacher."""

    comparison: kinds.ColumnsComparison
    has_ids: ClassVar[bool] = True

    def compare(self, constants, row_ids, *logits):
        (z,) = logits
        ids = take(constants.ids, row_ids, fill_value=-1)
        log_q = take(constants.log_q, row_ids, fill_value=-jnp.inf)
        parts = columns_rule.split(self.spec, z, ids)
        value, slopes = kinds.compare(self.comparison, parts.log_p, log_q)
        has_ids = jnp.any(ids >= 0, axis=1)
        slopes = jnp.where(has_ids[:, None], slopes, 0)
        saved = {"ids": ids, "log_p": parts.log_p, "slopes": slopes, "rest": parts.rest}
        value = jnp.where(has_ids, value, 0)
        return Compared((parts.logits,), value, saved, parts.largest)

    def density(self, logits, saved):
        return jnp.exp(row_stats.log_softmax(logits[0], saved["rest"])), saved["ids"]

    def by_logits(self, logits, saved, g):
        # A row whose value is not used, maybe because it is NaN, has no derivative.
        g = jnp.where(g[:, None] == 0, 0, g[:, None] * saved["slopes"])
        derivative = columns_rule.derivative_of_split(
            saved["ids"], saved["log_p"], g, saved["rest"]
        )
        return columns_rule.by_logits(logits[0], derivative)


class DrawnConstants(NamedTuple):
    """Constants of `DrawnLossRule`."""

    rows: TokenRows
    scale: jax.Array | None  # [N]
    ids: jax.Array  # int32 [N, K]; negative ones are absent, others may repeat


@dataclasses.dataclass(frozen=True)
class DrawnLossRule(DivergenceLossRule):
    """`DivergenceLossRule` of the cross-entropy with ids drawn from the teacher."""

    has_ids: ClassVar[bool] = True

    def compare(self, constants, row_ids, *logits):
        spec, (z,) = self.spec, logits
        ids = take(constants.ids, row_ids, fill_value=-1)
        z, at_ids = jax.lax.optimization_barrier((z, logits_at(spec, z, ids)))
        normaliser = columns_rule.normaliser(spec, z)
        log_p = row_stats.log_softmax(
            columns_rule.max_over_shards(spec, at_ids), normaliser
        )
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
        return columns_rule.by_logits(logits[0], derivative)
