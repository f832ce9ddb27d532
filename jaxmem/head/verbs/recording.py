"""`record_entries`: an old pass that records few logits of each token."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jaxmem.base import messages, ranges
from jaxmem.head.backends.protocol import SampleLoops, sampler_of
from jaxmem.head.maths import (
    backend_operands,
    column_sampling,
    recorded,
    vocab_shards,
)
from jaxmem.head.maths.backend_operands import Factors, TokenRows
from jaxmem.head.maths.explicit_axes import sharded_like, with_automatic_axes
from jaxmem.head.maths.gradients import Sample
from jaxmem.head.maths.head import Matrix
from jaxmem.head.maths.recorded import RecordedEntries
from jaxmem.head.maths.row_stats import Outputs
from jaxmem.head.maths.spec import AxisName, CallOptions, Chunk, Implementation, Spec
from jaxmem.head.verbs import arguments
from jaxmem.head.verbs.arguments import HeadOperands
from jaxmem.head.verbs.rule import on_tokens

_OUTPUTS = "logprob", "logsumexp", "entropy", "sum_pi_squared"


@with_automatic_axes(sharded_like(labels=0, hidden=1))
def record_entries(
    hidden: ArrayLike,
    W: Matrix,
    labels: ArrayLike,
    k: int,
    key: jax.Array,
    chunk: Chunk = 1024,
    *,
    where: ArrayLike | None = None,
    temperature: ArrayLike = 1.0,
    axis_name: AxisName | None = None,
    implementation: Implementation | None = None,
) -> RecordedEntries:
    """Record logits of k columns of each token, from which later updates compute.

        q_j = min(1, κ p_j),   κ slightly below k,   p = softmax(z)

    Column j is recorded with probability q_j, and the label's always. With
    `gradient=jaxmem.Recorded(entries)`, a verb then estimates its results and gradients
    under changed weights without a product over the vocabulary. The record itself takes
    one GEMM, and has no derivative.

    Args:
        k: columns of each token, at most; less than the vocabulary.
        key: PRNG key, or one per token, [...]; as in `logprobs`.
        hidden, W, labels, chunk, where, temperature, axis_name, implementation: as in
            `logprobs`. The shards of a vocabulary share the k columns, and the record
            is the same on each.

    Returns:
        `RecordedEntries(columns, logits, label_logit, logsumexp, entropy,
        sum_pi_squared)`, of shapes [..., k], and [...]. Masked tokens have none.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> h, W, y = jnp.zeros((2, 8)), jnp.zeros((4, 8)), jnp.array([0, -1])
    >>> entries = jaxmem.record_entries(h, W, y, 3, jax.random.key(0))
    >>> entries.logsumexp.round(2), entries.logits.shape
    (Array([1.39, 0.  ], dtype=float32), (2, 3))
    """
    operands = arguments.read_head(hidden, W)
    _check(operands, k, key, axis_name)
    options = CallOptions(
        chunk=chunk, where=where, temperature=temperature, gradient=Sample(k), key=key,
        axis_name=axis_name, implementation=implementation,
    )  # fmt: skip
    spec, backend, source, rows, shape = arguments.call(
        "record_entries", _OUTPUTS, operands, labels, options
    )
    # As of a frozen head, so that buffers for its gradient are not reserved.
    spec = dataclasses.replace(spec, forward="recorded", frozen_head=True)
    sampler = sampler_of(backend)

    def record(spec, source, rows):
        return _record(sampler, spec, source, rows)

    entries = on_tokens(spec, record, *lax.stop_gradient((source, rows)))
    return jax.tree.map(lambda x: jnp.reshape(x, (*shape, *x.shape[1:])), entries)


def _check(
    operands: HeadOperands, k: Any, key: Any, axis_name: AxisName | None
) -> None:
    """Refuse by their own names what the gradient `Sample(k)` would refuse."""
    options = CallOptions(axis_name=axis_name)
    spec = arguments.spec_of(operands.source, operands.head, _OUTPUTS, options)
    if spec.vocab_size == 1:
        raise ValueError(
            "W must have at least 2 entries of the vocabulary, k of which are "
            "recorded, got 1"
        )
    if problem := ranges.integers(1, spec.vocab_size - 1).problem(k):
        got = messages.short(k)
        raise ValueError(f"k {problem}, less than the vocabulary, got {got}")
    column_sampling.check_keys(key, operands.shape)


def _record(
    sampler: SampleLoops, spec: Spec, source: Factors, rows: TokenRows
) -> RecordedEntries:
    """The record of each row, [N, ...]."""
    outputs, selected = sampler.forward(spec, source, rows, _OUTPUTS)
    label = backend_operands.part_labels(
        spec, rows, jnp.arange(len(rows.labels), dtype=jnp.int32)
    )
    is_own = (label >= 0) & (label < spec.columns)
    label = jnp.where(is_own, label, spec.columns)
    columns = jnp.concatenate([label[:, None], selected.columns], axis=1)
    products = sampler.logits_at(spec, source, rows, columns)
    z = recorded.scaled(spec, source, rows, columns, products)
    label_logit = jnp.where(is_own, z[:, 0], -jnp.inf)
    if spec.shards:
        label_logit = lax.pmax(label_logit, spec.shards.axes)
    exists = rows.active & (rows.labels < spec.vocab_size)
    first = backend_operands.first_column(spec)
    selected = selected._replace(columns=selected.columns + first)
    entries = recorded.of_rows(
        selected, z[:, 1:], label_logit, Outputs(**outputs), exists
    )
    entries = recorded.compact(_over_shards(spec, entries))
    return vocab_shards.vary(entries, spec.varying)


def _over_shards(spec: Spec, entries: RecordedEntries) -> RecordedEntries:
    """The entries of all shards of the vocabulary, which fill no more than K slots."""
    if not spec.shards:
        return entries
    axes, k = spec.shards.axes, entries.k

    def gathered(x):
        return lax.all_gather(x, axes, axis=1, tiled=True, to="invarying")

    every = recorded.compact(
        entries._replace(
            columns=gathered(entries.columns), logits=gathered(entries.logits)
        )
    )
    return every._replace(columns=every.columns[:, :k], logits=every.logits[:, :k])
