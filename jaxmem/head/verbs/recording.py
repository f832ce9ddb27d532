"""`record_entries`: an old pass that records few logits of each token."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jaxmem.head.backends.protocol import SampleLoops, sampler_of
from jaxmem.head.maths import recorded
from jaxmem.head.maths.backend_operands import Factors, TokenRows
from jaxmem.head.maths.explicit_axes import sharded_like, with_automatic_axes
from jaxmem.head.maths.gradients import Sample
from jaxmem.head.maths.head import Matrix
from jaxmem.head.maths.recorded import RecordedEntries
from jaxmem.head.maths.row_stats import Outputs
from jaxmem.head.maths.spec import CallOptions, Chunk, Implementation, Spec
from jaxmem.head.verbs import arguments
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
        hidden, W, labels, chunk, where, temperature, implementation: as in `logprobs`.

    Returns:
        `RecordedEntries(columns, logits, label_logit, logsumexp, entropy,
        sum_pi_squared)`, of shapes [..., k], and [...]. Masked tokens have none.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> h, W, y = jnp.zeros((2, 8)), jnp.zeros((4, 8)), jnp.array([0, -1])
    >>> entries = jaxmem.record_entries(h, W, y, 3, jax.random.key(0))
    >>> entries.logsumexp.round(2), entries.logits.shape
    (Array([1.39, 0.  ], dtype=float32), (2, 3))
    """
    options = CallOptions(
        chunk=chunk, where=where, temperature=temperature, gradient=Sample(k), key=key,
        implementation=implementation,
    )  # fmt: skip
    operands = arguments.read_head(hidden, W)
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


def _record(
    sampler: SampleLoops, spec: Spec, source: Factors, rows: TokenRows
) -> RecordedEntries:
    """The record of each row, [N, ...]."""
    outputs, selected = sampler.forward(spec, source, rows, _OUTPUTS)
    columns = jnp.concatenate([rows.labels[:, None], selected.columns], axis=1)
    products = sampler.logits_at(spec, source, rows, columns)
    z = recorded.scaled(spec, source, rows, columns, products)
    exists = rows.active & (rows.labels < spec.vocab_size)
    return recorded.compact(
        recorded.of_rows(selected, z[:, 1:], z[:, 0], Outputs(**outputs), exists)
    )
