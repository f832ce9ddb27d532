"""The k most likely columns of each token, and their log-probabilities."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jaxmem.head.backends.protocol import ScaledHead
from jaxmem.head.maths import block_sums, checks, row_stats, vocab_shards
from jaxmem.head.maths.backend_operands import first_column, take
from jaxmem.head.maths.explicit_axes import sharded_like, with_automatic_axes
from jaxmem.head.maths.gradients import Gradient
from jaxmem.head.maths.head import Matrix
from jaxmem.head.maths.spec import AxisName, CallOptions, Chunk, Implementation
from jaxmem.head.verbs import arguments, columns_rule, rule
from jaxmem.head.verbs.columns_rule import SomeColumnsRule


class TopK(NamedTuple):
    """The most likely ids of each token, the first the most likely.

    Attributes:
        logprobs: their log-probabilities [..., k] in the whole vocabulary, nats.
        ids: int32 [..., k]; equal log-probabilities are in the order of their ids.
    """

    logprobs: jax.Array
    ids: jax.Array


@with_automatic_axes(sharded_like(hidden=1))
def topk(
    hidden: ArrayLike,
    W: Matrix,
    k: int,
    chunk: Chunk = 1024,
    *,
    where: ArrayLike | None = None,
    temperature: ArrayLike = 1.0,
    gradient: Gradient | None = None,
    key: jax.Array | None = None,
    axis_name: AxisName | None = None,
    implementation: Implementation | None = None,
) -> TopK:
    """The k most likely ids of each token and their log-probabilities, without logits.

        ids = the k largest of z, in order     logprobs_k = z[ids_k] - ln Σ_v e^(z_v)

    with z as in `logprobs`. To distil from a teacher, make `Columns` of its result. The
    student's own result covers most of the mass of its reverse KL. One pass
    over the logits gives both results, exactly.

    Args:
        k: a Python integer from 1 to V.
        implementation: "xla", or None: on an NVIDIA GPU, kernels then read the logits
            once, if k ≤ 256.
        hidden, W, chunk, where, temperature, axis_name: as in `logprobs`; the ids are
            those of the whole vocabulary.
        gradient, key: as in `logprobs`, with one block; entries of the ids are exact.

    Returns:
        `TopK(logprobs, ids)`: float32 [..., k] (float64 for float64 hidden) and int32
        [..., k]. A masked token has log-probabilities of 0 and ids of -1, which
        `selected_logprobs` and `Columns` read as absent. The log-probabilities are
        differentiable, with the ids held constant, as those of `selected_logprobs`
        are, for 6·N·V·D FLOPs.

    Raises:
        TypeError, NotImplementedError: as `logprobs`.
        ValueError: as `logprobs`; or k is not an integer from 1 to V.

    >>> import jax.numpy as jnp, jaxmem
    >>> h, W = jnp.ones((1, 1)), jnp.log(jnp.array([[0.2], [0.5], [0.1], [0.2]]))
    >>> top = jaxmem.topk(h, W, 3)
    >>> print(top.logprobs.round(2), top.ids)
    [[-0.69 -1.61 -1.61]] [[1 0 3]]

    Reference: Peng et al., "Pre-training Distillation for Large Language Models", 2024,
    arXiv:2410.16215, which stores a teacher's logits truncated this way.
    """
    options = CallOptions(
        chunk=chunk, where=where, temperature=temperature, gradient=gradient, key=key,
        axis_name=axis_name, implementation=implementation,
    )  # fmt: skip
    spec, source, rows, shape = arguments.columns_call("topk", hidden, W, options)
    k = checks.check_count("k", k)
    if k > spec.vocab_size:
        raise ValueError(f"k must be at most vocab_size={spec.vocab_size}, got {k}")
    shapes = source.shapes(shape)
    backend = arguments.choose_columns("topk", spec, source, implementation, shapes)
    if 0 in shape:
        log_p = jnp.zeros((*shape, k), spec.stats_dtype)
        return TopK(log_p, jnp.zeros((*shape, k), jnp.int32))
    spec, source = arguments.typed(spec, source, rows)
    results = rule.run(_TopKRule(spec, backend, k), (source,), ((rows,), None))
    return jax.tree.map(lambda x: jnp.reshape(x, (*shape, k)), results)


@dataclasses.dataclass(frozen=True)
class _TopKRule(SomeColumnsRule):
    """The rule of `topk`; it has no constants."""

    k: int

    def loop(self, source, rows, constants, starts):
        (rows,), spec = rows, self.spec

        def of_chunk(row_ids, z):
            entries, ids, normaliser = self._select_columns(z)
            entries, ids = self._merge_shards(entries, ids)
            normaliser = columns_rule.over_shards(spec, normaliser)
            log_p = row_stats.log_softmax(entries, normaliser)
            saved = {"normaliser": normaliser}
            if starts is not None:
                row_starts = take(starts, row_ids)
                saved |= columns_rule.sampled(spec, z, normaliser, ids, row_starts)
            return TopK(log_p, ids), saved

        n_rows = rows.labels.shape[0]
        zero = jnp.zeros(n_rows, spec.stats_dtype)
        log_p = jnp.zeros((n_rows, self.k), spec.stats_dtype)
        ids = jnp.full((n_rows, self.k), -1, jnp.int32)
        results = TopK(log_p, ids), {"normaliser": row_stats.Normaliser(zero, zero)}
        top, saved = vocab_shards.vary(results, spec.varying)
        results = top, saved | columns_rule.nothing_sampled(spec, starts)
        heads = [ScaledHead(spec, source, rows)]
        return self.loops.forward(heads, of_chunk, results)

    def _select_columns(self, z):
        """The k largest of this device's logits, their columns, and the normaliser."""
        k, reductions = min(self.k, self.spec.columns), self.backend.reductions
        if reductions and reductions.supports_blocks(z.shape[1], z.dtype, k):
            blocks = reductions.block_sums(z)
            entries, ids = reductions.top_k(z, blocks, k)
            return entries, ids, block_sums.normaliser(blocks)
        return *top_k(z, k), row_stats.normaliser(z)

    def _merge_shards(self, entries, ids):
        """The k largest logits and their ids in the whole vocabulary."""
        shards, k = self.spec.shards, self.k
        if not shards:
            return entries, ids
        # Each shard fills in its own, in the order of the shards and so of the ids. A
        # sum's type states that it is the same on all shards; a gather's does not.
        is_own = jnp.arange(shards.count) == lax.axis_index(shards.axes)
        own = entries, ids + first_column(self.spec)
        own = jax.tree.map(lambda x: jnp.where(is_own[:, None], x[:, None], 0), own)
        entries, ids = jax.tree.map(
            lambda x: jnp.reshape(x, (x.shape[0], -1)), lax.psum(own, shards.axes)
        )
        entries, index = lax.top_k(entries, k)
        return entries, jnp.take_along_axis(ids, index, axis=1)

    def backward(self, residuals, cotangents):
        """See `Rule.backward`; ids have no cotangent."""
        return super().backward(residuals, cotangents.logprobs)

    def derivative(self, constants, result, saved, g):
        (log_p, ids), normaliser = result, saved["normaliser"]
        z = columns_rule.unnormalised(log_p, normaliser)
        at_ids = columns_rule.by_log_p(log_p, g)
        return columns_rule.SoftmaxDerivative(
            ids, at_ids, -jnp.sum(g, 1), normaliser, z
        )


_BLOCK = 16  # neighbours that one maximum stands for


def top_k(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k largest entries of rows x [C, n], largest first, and their indices.

    Equal ones are in their order. A row is cut into blocks of neighbours. k entries
    come before any entry outside of the k blocks with the largest maxima, one in each
    of these blocks, so that all k largest entries are inside of them. These blocks are
    found in the same way. At 151936 columns and k=64, the rows that are sorted have
    594, 1024 and 1024 entries.
    """
    n_rows, n = x.shape
    if n <= 2 * k * _BLOCK:
        return lax.top_k(_without_negative_zero(x), k)
    padded = jnp.pad(x, ((0, 0), (0, -n % _BLOCK)), constant_values=-jnp.inf)
    _, blocks = top_k(padded.reshape(n_rows, -1, _BLOCK).max(axis=-1), k)
    blocks = jnp.sort(blocks, axis=1)  # candidates keep the order of the row
    in_block = jnp.arange(_BLOCK, dtype=jnp.int32)[None, None]
    columns = (blocks[..., None] * _BLOCK + in_block).reshape(n_rows, -1)
    candidates = jnp.take_along_axis(
        x, columns, axis=1, mode="fill", fill_value=-jnp.inf
    )
    largest, index = lax.top_k(_without_negative_zero(candidates), k)
    return largest, jnp.take_along_axis(
        columns, index, axis=1, mode="promise_in_bounds"
    )


def _without_negative_zero(x):
    """The array with 0 in place of -0, which a sort would put after 0."""
    return jnp.where(x == 0, 0, x)
