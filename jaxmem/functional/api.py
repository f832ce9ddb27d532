"""The public functions: they check, flatten, compute, and restore the shape."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxmem.core.explicit_axes import sharded_like, with_automatic_axes
from jaxmem.core.gradients import Gradient
from jaxmem.core.operands import output_dtype
from jaxmem.core.options import AxisName, Chunk, HeadOptions, Implementation, Layout
from jaxmem.core.stats import TokenStats
from jaxmem.functional import arguments, rule
from jaxmem.functional.sampled import SampledStatisticsRule
from jaxmem.functional.vjp import StatisticsRule


@with_automatic_axes(sharded_like(labels=0, hidden=1))
def logprobs(
    hidden: ArrayLike,
    W: ArrayLike,
    labels: ArrayLike,
    chunk: Chunk = 1024,
    *,
    where: ArrayLike | None = None,
    temperature: ArrayLike = 1.0,
    softcap: float | None = None,
    bias: ArrayLike | None = None,
    vocab_size: int | None = None,
    layout: Layout | None = None,
    gradient: Gradient | None = None,
    key: jax.Array | None = None,
    axis_name: AxisName | None = None,
    vocab_groups: int | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Log-probability of each label under the head's softmax, without the logits.

        z = softcap·tanh((h Wᵀ + bias) / softcap) / temperature
        out = z[label] - ln Σ_v e^(z_v)                                        (nats)

    Args:
        hidden: final hidden states [..., D], float32, bfloat16 or float16 (float64
            under x64). GEMMs run in this dtype and accumulate in float32.
        W: vocabulary matrix, [V, D] (an embedding table) or [D, V] (a Dense kernel). If
            its dtype is not that of hidden, it is cast once; its gradient always has
            its own dtype, rounded once from float32 sums.
        labels: token ids [...], any integer dtype. Negative marks padding.
        chunk: tokens whose logits may be alive at once; None for all of them; "auto"
            for as many as fit 512 MiB of float32 logits. Larger chunks are faster as
            long as they fit in memory.
        where: booleans that broadcast to labels; False masks a token. Cost scales with
            the number of tokens that are neither masked nor padding.
        temperature: positive scalar or one per token, [...]; not differentiable.
        softcap: caps logits at ±softcap by tanh, before the temperature (Gemma 2).
        bias: [V], added to the logits first.
        vocab_size: logical vocabulary when W is padded; later entries get p = 0.
        layout: "vd" or "dv"; inferred from the shapes unless W is square.
        gradient: None, or how gradients are computed: `jaxmem.Recompute(blocks)` sums
            W's gradient for one block of the vocabulary at a time;
            `jaxmem.Sample(k)` estimates it, without bias, from at most k + 1 entries of
            each token's derivative. With None, and where neither W nor bias is
            differentiated, as under LoRA or behind `jax.lax.stop_gradient`, hidden's
            gradient is computed in the forward pass, kept as a residual and scaled by
            the cotangent: two GEMMs in all, instead of four. It is rounded to hidden's
            dtype before and after scaling. `Recompute()` takes three, and least memory.
        key: PRNG key of the samples, required with `Sample(k)`; or one per token,
            [...]. A token's samples depend on the key and its position only, not on the
            chunk. Use another key each step. Inside `jax.shard_map`, devices with
            different tokens need different keys; `jaxmem.sharding.parallel` derives
            them.
        axis_name: mesh axis, or tuple of axes, of an enclosing `jax.shard_map` along
            which the vocabulary is sharded. W and bias are then this device's shards,
            which have one size on all devices, and vocab_size is that of the whole
            vocabulary. labels are ids of the whole vocabulary. Labels, hidden and all
            other per-token arrays are replicated over the shards, as is the result.
            `jaxmem.sharding.parallel` does this for global arrays.
        vocab_groups: G, a power of two: results, and the gradients of hidden, W and
            bias, have the same bits for any number of shards that divides G, one
            included. The vocabulary is cut into G groups of columns, each computed by
            the same program on every mesh, and their sums are merged in a binary tree
            over their index. G must divide W's columns, padding included. The bits are
            those of one backend, chunk and number of tokens on a device; "hopper" must
            be named. Where W is not differentiated, three GEMMs. hidden's gradient has
            the same bits under check_vma=True only. It goes with gradient=None alone.
        implementation: "xla", "hopper" (16-bit hidden on an H100 or H200), or None for
            the best one available; `jaxmem.report()` shows which one ran.

    Returns:
        float32 [...] (float64 for float64 hidden): 0 for a masked token, with a
        gradient of exactly 0, even where its hidden state is NaN; NaN for a label
        ≥ V that is known at run time only. On a CPU the result is batch-invariant: a
        token's bits depend neither on other tokens nor on the chunk, if it is a
        multiple of 16.

    **Memory** beyond inputs, outputs and gradients, with b the item size of hidden, N
    tokens and C = min(chunk, N rounded up to 16); where V is sharded, C·V has the whole
    vocabulary's V. Nothing grows with N·V.

    - "xla": forward 4·C·V; backward (4 + b)·C·V + 4·V·D, the latter for the float32 sum
      of W's gradient, unless W is frozen.
    - With gradient=None and W not differentiated: forward under `jax.grad`
      (4 + b)·C·V (XLA for CPUs: 8·C·V) and a residual of b·N·D; backward nothing.
    - "hopper": forward 2·D + V/25 per token, of 8192 tokens at most, and no more than
      4·C·V. Backward, with S = √(C·V): up to S tokens take 2·C·V + 6·N·D. Up to V and
      C·V/32 tokens also take a block of W's gradient, at most 32·C·V·D/N, if all except
      2·N·D is no more than 2·C·V + 4·V·D. Otherwise it takes 2·C·V + 4·V·D + 6·S·D,
      without the second term if W is frozen.
    - Recompute(blocks=B): 4·V·D/B instead of 4·V·D, with V/B rounded up to a multiple
      of 128 ("hopper": 256). In "xla" also b·V·D/B for a copy of W's block, and
      (4 + 2·b)·D for each token of B chunks, or of as many tokens as a block has
      columns if that is less and no less than a chunk; in "hopper" at most 8·S·D.
    - Sample(K), under `jax.grad`: residuals of 8·K per token. Forward in "xla"
      4·C·V·(1 + 2/16) + 512·C·K for the search (XLA for CPUs: 12·C·V instead of 4·C·V
      for more outputs than the log-probability); in "hopper" 2·C·V, and V/16 per token
      of a chunk. Backward 24·(K + 1) per token for the pairs sorted by column, and in
      "xla" float32 sums of at most 2²² elements of W's gradient at a time; in "hopper"
      at most 8·D·max(2048, V/32).
    - vocab_groups, without shards: logits and float32 sums of W's gradient divided by
      G, b·V·D/G for a group's columns, 20·G·N for statistics; backward also 4·G·N·D for
      the parts of hidden's gradient and b·V·D for those of W's.
    - In addition: b·V·D if the dtype of W is not that of hidden; 32 MiB for cuBLAS. If
      V is not a multiple of 64, W is padded, b·V·D: by "xla" on a GPU backward, and by
      "hopper" in both passes and again for the gradient if W is [D, V] or D is not a
      multiple of 64, otherwise 256·b·D forward and up to 2·b·C·V·D/N backward. XLA for
      CPUs may widen 16-bit weights to float32, 4·V·D, and needs 8·C·V forward if V is
      not a multiple of 128 or jaxlib is older than 0.11.

    **Communication** with axis_name, per token: forward an all-reduce of 8 bytes (max)
    and one of 12 (sum) over the shards; backward an all-reduce of 4·D for hidden's
    gradient, in float32, which is rounded afterwards and takes as much memory (twice
    with more than two shards in "hopper", which overlaps it with W's gradient, and once
    more if more than S tokens take several launches). W's gradient stays sharded as W.
    Under check_vma=False, jax itself all-reduces hidden's gradient, after rounding it
    to hidden's dtype. With vocab_groups, forward an all-reduce of 20·G bytes; backward
    an all-to-all of 4·D and an all-reduce of 4·D.

    Without axis_name, where `jax.jit` partitions a program over devices, the tokens are
    split evenly over them in order; W is all-gathered if it is sharded, and its
    gradient all-reduced in W's dtype. Along explicit mesh axes, the result is sharded
    as labels are, or else as hidden is, and gradients as their operands are; outside of
    jit, operands are copied.

    Raises:
        TypeError: an argument has the wrong type; the message names it.
        ValueError: shapes disagree; the layout is ambiguous; a label is ≥ V; a chunk,
            temperature or softcap is not positive; the implementation is unknown; no
            shard_map binds axis_name, or W is not sharded along it; k of `Sample(k)` is
            not less than V, or only one of it and key is given.
        NotImplementedError: a gradient of the temperature or a second derivative is
            requested, or the implementation cannot run this call here.

    >>> import jax.numpy as jnp, jaxmem
    >>> h, W = jnp.zeros((2, 8)), jnp.zeros((4, 8))
    >>> jaxmem.logprobs(h, W, jnp.array([0, 3]))
    Array([-1.3862944, -1.3862944], dtype=float32)

    Reference: Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models",
    2024, arXiv:2411.09009.
    """
    options = HeadOptions(
        chunk=chunk, where=where, temperature=temperature, softcap=softcap, bias=bias,
        vocab_size=vocab_size, layout=layout, gradient=gradient, key=key,
        axis_name=axis_name, vocab_groups=vocab_groups, implementation=implementation,
    )  # fmt: skip
    call = arguments.head_call("logprobs", ("logprob",), hidden, W, labels, options)
    return _run(call)["logprob"]


@with_automatic_axes(sharded_like(labels=0, hidden=1))
def token_stats(
    hidden: ArrayLike,
    W: ArrayLike,
    labels: ArrayLike,
    chunk: Chunk = 1024,
    *,
    where: ArrayLike | None = None,
    temperature: ArrayLike = 1.0,
    softcap: float | None = None,
    bias: ArrayLike | None = None,
    vocab_size: int | None = None,
    layout: Layout | None = None,
    gradient: Gradient | None = None,
    key: jax.Array | None = None,
    axis_name: AxisName | None = None,
    vocab_groups: int | None = None,
    implementation: Implementation | None = None,
) -> TokenStats:
    """All statistics of each token that one pass over the vocabulary computes.

        p = softmax(z)     logprob = ln p[label]     entropy = -Σ p ln p
        logsumexp = ln Σ e^z     sum_pi_squared = Σ p²     is_argmax = z[label] ≥ max z

    Every float field is differentiable, alone or together with others, for the cost of
    one backward pass. Arguments, memory and errors are those of `logprobs`. But the
    backward pass recomputes the logits even if W is not differentiated, because with
    several outputs hidden's gradient is not known up to a scale in the forward pass.

    Returns:
        `TokenStats(logprob, entropy, logsumexp, sum_pi_squared, is_argmax)`: arrays
        of labels' shape, 0 (False) for a masked token. A label ≥ V that is known at
        run time only makes its logprob NaN and does not affect the other fields.

    >>> import jax.numpy as jnp, jaxmem
    >>> stats = jaxmem.token_stats(jnp.zeros((1, 8)), jnp.zeros((4, 8)), jnp.array([2]))
    >>> [round(float(field[0]), 4) for field in stats]
    [-1.3863, 1.3863, 1.3863, 0.25, 1.0]

    Reference: the entropy's gradient, dH/dz_j = -p_j (ln p_j + H), as in Haarnoja et
    al., 2018, arXiv:1801.01290, for a categorical policy.
    """
    options = HeadOptions(
        chunk=chunk, where=where, temperature=temperature, softcap=softcap, bias=bias,
        vocab_size=vocab_size, layout=layout, gradient=gradient, key=key,
        axis_name=axis_name, vocab_groups=vocab_groups, implementation=implementation,
    )  # fmt: skip
    call = arguments.head_call(
        "token_stats", TokenStats._fields, hidden, W, labels, options
    )
    return TokenStats(**_run(call))


@with_automatic_axes(sharded_like(hidden=1))
def entropy(
    hidden: ArrayLike,
    W: ArrayLike,
    chunk: Chunk = 1024,
    *,
    where: ArrayLike | None = None,
    temperature: ArrayLike = 1.0,
    softcap: float | None = None,
    bias: ArrayLike | None = None,
    vocab_size: int | None = None,
    layout: Layout | None = None,
    gradient: Gradient | None = None,
    key: jax.Array | None = None,
    axis_name: AxisName | None = None,
    vocab_groups: int | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Entropy of the head's softmax for each token, without the logits.

        out = -Σ_v p_v ln p_v,   p = softmax(z)                                (nats)

    Arguments, memory and errors are those of `logprobs`, without labels.

    Returns:
        float32 [...], between 0 and ln V; 0 where masked.

    >>> import jax.numpy as jnp, jaxmem
    >>> jaxmem.entropy(jnp.zeros((1, 8)), jnp.zeros((4, 8)))
    Array([1.3862944], dtype=float32)
    """
    options = HeadOptions(
        chunk=chunk, where=where, temperature=temperature, softcap=softcap, bias=bias,
        vocab_size=vocab_size, layout=layout, gradient=gradient, key=key,
        axis_name=axis_name, vocab_groups=vocab_groups, implementation=implementation,
    )  # fmt: skip
    call = arguments.head_call(
        "entropy", ("entropy",), hidden, W, arguments.NO_LABELS, options
    )
    return _run(call)["entropy"]


@with_automatic_axes(sharded_like(labels=0, logits=1))
def logprobs_from_logits(
    logits: ArrayLike,
    labels: ArrayLike,
    chunk: Chunk = 1024,
    *,
    where: ArrayLike | None = None,
    temperature: ArrayLike = 1.0,
    softcap: float | None = None,
    vocab_size: int | None = None,
    axis_name: AxisName | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Log-probability of each label, from given logits [..., V].

        z = softcap·tanh(logits / softcap) / temperature
        out = z[label] - ln Σ_v e^(z_v)                                        (nats)

    Logits are read in chunks and not copied. Arguments and errors are those of
    `logprobs`.

    **Memory** beyond inputs, outputs and gradients, with b the item size of the logits
    and C = min(chunk, tokens rounded up to 16): (4 + b)·C·V forward and backward. The
    only other array [tokens, V] is the gradient, in the logits' dtype. (XLA for CPUs in
    jaxlib older than 0.11 widens whole 16-bit logits.)

    >>> import jax.numpy as jnp, jaxmem
    >>> jaxmem.logprobs_from_logits(jnp.zeros((1, 4)), jnp.array([2]))
    Array([-1.3862944], dtype=float32)
    """
    options = HeadOptions(
        chunk=chunk, where=where, temperature=temperature, softcap=softcap,
        vocab_size=vocab_size, axis_name=axis_name, implementation=implementation,
    )  # fmt: skip
    call = arguments.logits_call(
        "logprobs_from_logits", ("logprob",), logits, labels, options
    )
    return _run(call)["logprob"]


@with_automatic_axes(sharded_like(labels=0, logits=1))
def token_stats_from_logits(
    logits: ArrayLike,
    labels: ArrayLike,
    chunk: Chunk = 1024,
    *,
    where: ArrayLike | None = None,
    temperature: ArrayLike = 1.0,
    softcap: float | None = None,
    vocab_size: int | None = None,
    axis_name: AxisName | None = None,
    implementation: Implementation | None = None,
) -> TokenStats:
    """All statistics of each token, from given logits [..., V]; see `token_stats`.

    Fields as in `token_stats`; arguments, memory and errors as in
    `logprobs_from_logits`.

    >>> import jax.numpy as jnp, jaxmem
    >>> jaxmem.token_stats_from_logits(jnp.zeros((1, 4)), jnp.array([2])).entropy
    Array([1.3862944], dtype=float32)
    """
    options = HeadOptions(
        chunk=chunk, where=where, temperature=temperature, softcap=softcap,
        vocab_size=vocab_size, axis_name=axis_name, implementation=implementation,
    )  # fmt: skip
    call = arguments.logits_call(
        "token_stats_from_logits", TokenStats._fields, logits, labels, options
    )
    return TokenStats(**_run(call))


def _run(call: arguments.Call) -> dict:
    """The call's outputs by name, in the shape of its tokens."""
    spec, shape = call.spec, call.shape
    if 0 in shape:
        return {k: jnp.zeros(shape, output_dtype(spec, k)) for k in spec.outputs}
    made_by = SampledStatisticsRule if spec.gradient_samples else StatisticsRule
    results = rule.run(made_by(spec, call.backend), (call.source,), (call.rows,))
    return {k: jnp.reshape(v, shape) for k, v in results.items()}
