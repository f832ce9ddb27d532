"""Ids drawn from each token's softmax, by inverting its distribution function.

A column's probability is rounded to a multiple of 2^-30 and its running sum C_v is that
of integers, which is exact: with r uniform over {0, ..., C_V - 1}, the id drawn is the
first v with C_v > r. Where the vocabulary is sharded, the integers are the same, and
the running sum goes on from shard to shard.

Kernels read the logits once, and so before the probabilities are known. Those of blocks
of columns are rounded then. r falls into a block, and its place in it, a fraction, is
that of the id among probabilities relative to the block's.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jaxmem.head.backends.protocol import ScaledHead
from jaxmem.head.maths import (
    block_sums,
    checks,
    column_sampling,
    row_stats,
    running_sums,
    vocab_shards,
)
from jaxmem.head.maths.backend_operands import first_column, take
from jaxmem.head.maths.explicit_axes import sharded_like, with_automatic_axes
from jaxmem.head.maths.head import Matrix
from jaxmem.head.maths.spec import AxisName, CallOptions, Chunk, Implementation
from jaxmem.head.verbs import arguments, columns_rule, rule
from jaxmem.head.verbs.rule import LoopRule

_BITS = 30  # of the unit that probabilities are rounded to: their sum fits int32


@with_automatic_axes(sharded_like(hidden=1))
def sample_ids(
    hidden: ArrayLike,
    W: Matrix,
    n: int,
    key: jax.Array,
    chunk: Chunk = 1024,
    *,
    where: ArrayLike | None = None,
    temperature: ArrayLike = 1.0,
    axis_name: AxisName | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Ids drawn from each token's softmax, n independent ones, without the logits.

        P(out_i = v) = e^(z_v) / Σ_u e^(z_u),   z as in `logprobs`

    Distillation from ids drawn from the teacher is unbiased, which its top k are not:

        ids = sample_ids(teacher_hidden, teacher_W, n, key)     # once, and stored
        loss = -selected_logprobs(hidden, W, ids).mean(-1)

    has the expected value and the expected gradient of the cross-entropy with the whole
    teacher, which is `forward_kl` up to the teacher's entropy. An id that was drawn
    twice counts twice. Compute the ids at temperature τ of the teacher for a student at
    temperature τ.

    Args:
        n: draws per token, a Python integer.
        key: PRNG key, or one per token, [...]. A token's ids depend on the key, its
            position and its logits only, not on the chunk. Use another key each step.
            Inside `jax.shard_map`, devices with different tokens need different keys;
            `jaxmem.sharding.parallel` derives them.
        axis_name: as in `logprobs`; the ids are those of the whole vocabulary, and the
            draws those of one device, up to the rounding of the logits' sum.
        implementation: "xla", or None: on an NVIDIA GPU, kernels then read the logits
            once. Both draw the same ids, up to the rounding of the logits' sum.
        hidden, W, chunk, where, temperature: as in `logprobs`.

    Returns:
        int32 [..., n]: -1, which `selected_logprobs` reads as absent, for a masked
        token or where logits are NaN. Probabilities are rounded to multiples of 2^-30,
        so that an id whose probability is below 2^-31 is never drawn. Kernels also draw
        no id of 64 adjacent columns whose probabilities add up to less than 2^-31. On a
        CPU the ids are batch-invariant, if the chunk is a multiple of 16.

    Raises:
        TypeError, NotImplementedError: as `logprobs`.
        ValueError: as `logprobs`; or n is not a positive integer.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> h, W = jnp.ones((2, 1)), jnp.log(jnp.array([[0.5], [0.5], [0.0]]))
    >>> ids = jaxmem.sample_ids(h, W, 1000, jax.random.key(0))
    >>> print((ids == 0).mean(-1).round(1), ids.max())
    [0.5 0.5] 1

    Reference: Anshumann et al., "Sparse Logit Sampling: Accelerating Knowledge
    Distillation in LLMs", 2025, arXiv:2503.16870.
    """
    verb = "sample_ids"
    options = CallOptions(
        chunk=chunk, where=where, temperature=temperature, axis_name=axis_name,
        implementation=implementation,
    )  # fmt: skip
    spec, source, rows, shape = arguments.columns_call(verb, hidden, W, options)
    n = checks.check_count("n", n)
    keys = column_sampling.check_keys(key, shape)
    shapes = source.shapes(shape)
    backend = arguments.choose_columns(verb, spec, source, implementation, shapes)
    if 0 in shape:
        return jnp.zeros((*shape, n), jnp.int32)
    keys = jnp.reshape(column_sampling.token_keys(keys, shape), (math.prod(shape),))
    bits = jax.vmap(lambda key: jax.random.bits(key, (n,), jnp.uint32))(keys)
    source = lax.stop_gradient(source)
    spec, source = arguments.typed(spec, source, (rows, bits))
    ids = rule.run(_DrawsRule(spec, backend), (source,), ((rows,), bits))
    return jnp.reshape(ids, (*shape, n))


class _DrawsRule(LoopRule):
    """The rule of `sample_ids`; the constants are uniform uint32 [N, n]."""

    def forward_loop(self, source, rows, constants):
        (rows,), spec = rows, self.spec

        def of_chunk(row_ids, z):
            return self._draw(z, take(constants, row_ids))

        ids = jnp.full(constants.shape, -1, jnp.int32)
        ids = vocab_shards.vary(ids, spec.varying)
        heads = [ScaledHead(spec, source, rows)]
        return self.loops.forward(heads, of_chunk, ids), {}

    def _draw(self, z, bits):
        reductions = self.backend.reductions
        if reductions and reductions.supports_blocks(z.shape[1], z.dtype):
            return _draw_in_blocks(reductions, self.spec, z, bits)
        return _draw(self.spec, z, bits)


def _draw(spec, z, bits):
    """Ids [C, n] of rows of logits, from uniform bits [C, n]."""
    normaliser = columns_rule.normaliser(spec, z)

    def units_of(z):
        row_max, log_sum = (x.reshape(-1, *(1,) * (z.ndim - 1)) for x in normaliser)
        row_max = jnp.where(row_max == -jnp.inf, 0, row_max)
        return _to_units(jnp.exp((z - row_max) - log_sum))

    tree = running_sums.tree(units_of(z))
    targets = _targets(spec, tree[0], bits)
    exists, column, _ = running_sums.find(tree, units_of, z, targets)
    return _ids_of_columns(spec, exists & (targets > 0), column)


def _draw_in_blocks(reductions, spec, z, bits):
    """Draw ids with one read of the logits and one of the blocks that hold the ids."""
    blocks = reductions.block_sums(z)
    normaliser = columns_rule.over_shards(spec, block_sums.normaliser(blocks))
    p_largest = jnp.exp(row_stats.log_softmax(blocks.largest, normaliser))
    units = _to_units(p_largest * (blocks.others + 1))
    tree = running_sums.levels_above(units)
    targets = _targets(spec, tree[0], bits)
    exists, block, rest = running_sums.descend(tree, targets)

    def take_block(x):
        return jnp.take_along_axis(x, block, axis=1, mode="promise_in_bounds")

    width = reductions.BLOCK
    columns, entries = running_sums.window(z, block, width)
    inside = (columns >= block[..., None] * width) & (columns < z.shape[1])
    relative = jnp.exp(entries - take_block(blocks.largest)[..., None])
    relative = relative / (take_block(blocks.others)[..., None] + 1)
    in_block = jnp.where(inside, _to_units(relative), 0)
    fraction = _fraction(rest - 1, take_block(units))
    total = jnp.sum(in_block, axis=-1, dtype=jnp.int32)
    target = _scale_bits(fraction, total) + 1
    (column,) = running_sums.reach(in_block, (columns,), target)
    return _ids_of_columns(spec, exists & (targets > 0), column)


def _to_units(p):
    """Probabilities in units of 2^-30; 0 for NaN."""
    return jnp.where(p > 0, jnp.round(p * 2**_BITS), 0).astype(jnp.int32)


def _targets(spec, total, bits):
    """Numbers that this shard's running sum is to reach, less than 1 if earlier did."""
    before = 0
    if spec.shards:
        total, before = _sum_shards(spec.shards, total)
    return _scale_bits(bits, total) + 1 - before


def _ids_of_columns(spec, in_shard, column):
    """Ids in the whole vocabulary, of columns that are in this shard; -1 if in none."""
    if not spec.shards:
        return jnp.where(in_shard, column, -1)
    ids = jnp.where(in_shard, column + first_column(spec) + 1, 0)
    return lax.psum(ids, spec.shards.axes) - 1


def _sum_shards(shards, total):
    """The total of all shards, and that of the shards before this one, [C, 1]."""
    shard_ids = jnp.arange(shards.count, dtype=jnp.int32)[None]
    shard = lax.axis_index(shards.axes)
    totals = lax.psum(jnp.where(shard_ids == shard, total, 0), shards.axes)
    before = jnp.sum(jnp.where(shard_ids < shard, totals, 0), axis=1, keepdims=True)
    return jnp.sum(totals, axis=1, keepdims=True), before


def _scale_bits(bits, total):
    """⌊bits · total / 2^32⌋ of uint32 and int32, as int32, by products of 16 bits."""
    total = total.astype(jnp.uint32)
    high, low, t_high, t_low = bits >> 16, bits & 0xFFFF, total >> 16, total & 0xFFFF
    middle = high * t_low + ((low * t_low) >> 16)
    carry = ((middle & 0xFFFF) + low * t_high) >> 16
    return (high * t_high + (middle >> 16) + carry).astype(jnp.int32)


def _fraction(a, b):
    """⌊2^32 · a / b⌋ of int32 0 ≤ a < b, as uint32, by long division."""
    remainder, b = a.astype(jnp.uint32), b.astype(jnp.uint32)
    quotient = jnp.zeros_like(b)
    for _ in range(32):
        remainder = remainder << 1
        fits = remainder >= b
        remainder = jnp.where(fits, remainder - b, remainder)
        quotient = (quotient << 1) | fits.astype(jnp.uint32)
    return quotient
