"""`selected_logprobs`: log-probabilities of given token ids under the whole softmax.

It computes all logits of a chunk. `jaxmem.head.verbs.support` normalises over given ids
and computes no other logits.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jaxmem.head.backends.protocol import ScaledHead
from jaxmem.head.maths import id_columns, row_stats, vocab_shards
from jaxmem.head.maths.backend_operands import take
from jaxmem.head.maths.explicit_axes import sharded_like, with_automatic_axes
from jaxmem.head.maths.gradients import Gradient
from jaxmem.head.maths.head import Matrix
from jaxmem.head.maths.spec import AxisName, CallOptions, Chunk, Implementation
from jaxmem.head.verbs import arguments, columns_rule, rule
from jaxmem.head.verbs.columns_rule import SomeColumnsRule
from jaxmem.head.verbs.token_ids import flat_ids, ids_call


@with_automatic_axes(sharded_like(ids=1, hidden=1))
def selected_logprobs(
    hidden: ArrayLike,
    W: Matrix,
    ids: ArrayLike,
    chunk: Chunk = 1024,
    *,
    where: ArrayLike | None = None,
    temperature: ArrayLike = 1.0,
    gradient: Gradient | None = None,
    key: jax.Array | None = None,
    axis_name: AxisName | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Log-probabilities of K given ids per token under the head's softmax.

        out_k = z[ids_k] - ln Σ_v e^(z_v),   z as in `logprobs`                (nats)
        dz_v = Σ_k g_k ([ids_k = v] - p_v)

    Distillation from a teacher's top K needs these from the student. The FLOPs are
    those of `logprobs` for any K.

    Args:
        ids: token ids [..., K], any integer dtype; they may repeat. A negative id is
            absent: its result is 0, with a gradient of 0. A token without ids costs
            nothing.
        implementation: "xla", or None, which means the same.
        hidden, W, chunk, where, temperature, axis_name: as in `logprobs`; the ids are
            those of the whole vocabulary.
        gradient, key: as in `logprobs`, with one block; entries of the ids are exact.

    Returns:
        float32 [..., K] (float64 for float64 hidden): 0 where masked or absent, with a
        gradient of exactly 0, even where the hidden state is NaN; NaN for an id ≥ V
        that is known at run time only.

    Raises:
        TypeError, NotImplementedError: as `logprobs`.
        ValueError: as `logprobs`; or an id is ≥ V.

    >>> import jax.numpy as jnp, jaxmem
    >>> h, W = jnp.zeros((2, 8)), jnp.zeros((4, 8))
    >>> jaxmem.selected_logprobs(h, W, jnp.array([[0, 3], [2, -1]])).round(2)
    Array([[-1.39, -1.39],
           [-1.39,  0.  ]], dtype=float32)

    Reference: Hinton et al., "Distilling the Knowledge in a Neural Network", 2015,
    arXiv:1503.02531.
    """
    options = CallOptions(
        chunk=chunk, where=where, temperature=temperature, gradient=gradient, key=key,
        axis_name=axis_name, implementation=implementation,
    )  # fmt: skip
    call, ids, _ = ids_call(
        "selected_logprobs", ids, hidden, W, arguments.NO_LABELS, options
    )
    return logprobs_of(call, ids)


def logprobs_of(call: arguments.CheckedCall, ids: jax.Array) -> jax.Array:
    """Log-probabilities of ids, both [..., K], of a call of `token_ids.ids_call`."""
    if 0 in ids.shape:
        return jnp.zeros(ids.shape, call.spec.stats_dtype)
    flat = flat_ids(ids, call.shape)
    rows = call.rows
    rows = rows._replace(active=rows.active & jnp.any(flat >= 0, axis=-1))
    spec, source = arguments.typed(call.spec, call.source, (rows, flat))
    results = rule.run(SelectedRule(spec, call.backend), (source,), ((rows,), flat))
    return jnp.reshape(results, ids.shape)


@dataclasses.dataclass(frozen=True)
class SelectedRule(SomeColumnsRule):
    """The rule of `selected_logprobs`; the constants are the ids [N, K]."""

    def loop(self, source, rows, constants, starts):
        (rows,), spec = rows, self.spec

        def of_chunk(row_ids, z):
            ids = take(constants, row_ids, fill_value=-1)
            part, more = row_stats.normaliser(z), {}
            if starts is not None:
                whole = columns_rule.over_shards(spec, part)
                row_starts = take(starts, row_ids)
                more = columns_rule.sampled(spec, z, whole, ids, row_starts)
            return id_columns.logits_at(spec, z, ids), part, more

        zero = jnp.zeros(constants.shape[0], spec.stats_dtype)
        parts = (
            jnp.zeros(constants.shape, spec.stats_dtype),
            row_stats.Normaliser(zero, zero),
            columns_rule.nothing_sampled(spec, starts),
        )
        parts = vocab_shards.vary(parts, spec.part_varying)
        heads = [ScaledHead(spec, source, rows)]
        z, part, more = self.loops.forward(heads, of_chunk, parts)
        normaliser = columns_rule.over_shards(spec, part)
        log_p = row_stats.log_softmax(columns_rule.max_over_shards(spec, z), normaliser)
        log_p = jnp.where(constants < spec.vocab_size, log_p, jnp.nan)
        log_p = jnp.where(rows.active[:, None] & (constants >= 0), log_p, 0)
        results = vocab_shards.vary((log_p, {"normaliser": normaliser}), spec.varying)
        return results[0], results[1] | more

    def derivative(self, constants, result, saved, g):
        return derivative_of_selected(constants, result, g, saved["normaliser"])


def derivative_of_selected(
    ids: jax.Array, log_p: jax.Array, g: jax.Array, normaliser: row_stats.Normaliser
) -> columns_rule.SoftmaxDerivative:
    """The derivative by logits for cotangents g of log-probabilities of ids [C, K].

    Negative ids are absent, others may repeat; log_p is NaN for an id ≥ V.
    """
    # An id ≥ V makes only those gradients NaN whose result was used.
    g = jnp.where(jnp.isnan(log_p) & (g != 0), jnp.nan, g)
    g = jnp.where(ids < 0, 0, g)
    total = jnp.sum(g, axis=-1)
    ids, log_p, at_ids = _sum_repeats(ids, log_p, g, total[:, None])
    z = columns_rule.unnormalised(log_p, normaliser)
    return columns_rule.SoftmaxDerivative(ids, at_ids, -total, normaliser, z)


def _sum_repeats(ids, log_p, g, total):
    """Sorted ids, ln p and the derivative there, Σ_l g_l ([ids_l = ids_k] - p_k)."""
    ids, g, log_p = lax.sort((ids, g, log_p), dimension=1, num_keys=1)
    starts = ids[:, 1:] != ids[:, :-1]
    run = jnp.pad(jnp.cumsum(starts, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))
    index = jnp.arange(ids.shape[0], dtype=jnp.int32)[:, None], run
    g_of_run = jnp.zeros_like(g).at[index].add(g)[index]  # summed over equal ids
    return ids, log_p, columns_rule.by_log_p(log_p, g_of_run, total)
