"""The public verbs: contract, check, flatten, call, unflatten."""

from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxmem.core.explicit_axes import sharded_like, with_automatic_axes
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
    frozen_head: bool = False,
    residual_bytes: int | Literal["all"] = 0,
    gradient_samples: int | None = None,
    key: jax.Array | None = None,
    axis_name: AxisName | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Log-probability of each label under the head's softmax, without the logits.

        z = softcap·tanh((h Wᵀ + bias) / softcap) / temperature
        out = z[label] - ln Σ_v e^(z_v)                                        (nats)

    Args:
        hidden: final hidden states [..., D], float32, bfloat16 or float16 (float64
            under x64). GEMMs run in this type and accumulate in float32.
        W: vocabulary matrix, [V, D] (an embedding table) or [D, V] (a Dense kernel).
            Of another type than hidden, it is cast to hidden's once; its gradient
            always comes back in its own type, rounded once from float32 sums.
        labels: token ids [...], any integer type. Negative marks padding.
        chunk: tokens whose logits may be alive at once; None for all of them; "auto"
            for as many as fit 512 MiB of float32 logits. Larger is faster until it
            spills.
        where: booleans that broadcast to labels; False masks a token. The cost
            follows the tokens that are neither masked nor padding.
        temperature: positive scalar or one a token, [...]; not differentiable.
        softcap: caps logits at ±softcap by tanh, before the temperature (Gemma 2).
        bias: [V], added to the logits first.
        vocab_size: logical vocabulary when W is padded; later entries get p = 0.
        layout: "vd" or "dv"; inferred from the shapes unless W is square.
        frozen_head: W and bias are constants, as under LoRA: their gradient is 0, and
            hidden's is made beside the result, where it awaits only a scale: rounded
            to hidden's type before it and after. Two GEMMs in all, instead of three.
        residual_bytes: how much memory may hold exponentials, 2·V a token, from the
            forward pass to the backward pass, which makes only the other tokens' logits
            again: with "all", three GEMMs instead of four. "hopper" alone can, and on
            one device: where jit splits the program, each does it for all tokens.
        gradient_samples: K, fewer than V: the gradient is an unbiased estimate from at
            most K + 1 entries of each token's derivative by the logits, the label's
            exact, and the backward pass recomputes no logits. Entries with p ≥ 1/K are
            exact; the others are kept with probability K·p and weighted by its inverse.
            None: the exact gradient. The result is the same, bit for bit, either way.
        key: PRNG key of the samples, required with gradient_samples; or one a token,
            [...]. A token's samples follow from the key and its position alone,
            whatever the chunk. Use another key each step. Inside `jax.shard_map`,
            devices with different tokens need different keys
            (`jaxmem.sharding.parallel` sees to it).
        axis_name: mesh axis, or tuple of axes, of an enclosing `jax.shard_map` along
            which the vocabulary is split. W and bias are then this shard's part, of one
            size on all shards, and vocab_size counts all parts together; labels are ids
            of the whole vocabulary and, like hidden and all else there is of tokens,
            the same on all shards, as is the result.
            `jaxmem.sharding.parallel` does this for global arrays.
        implementation: "xla", "hopper" (16-bit hidden on an H100 or H200), or None for
            the best there is here; `jaxmem.report()` tells which one ran.

    Returns:
        float32 [...] (float64 for float64 hidden): 0 for a masked token, with a
        gradient of exactly 0, even where its hidden state is NaN; NaN for a label
        ≥ V that only shows up at run time. On a CPU a token's bits depend neither on
        the other tokens nor, among multiples of 16, on the chunk.

    **Memory** beyond inputs, outputs and gradients, with b the bytes of hidden's type
    and C = min(chunk, tokens rounded up to 16): forward 4·C·V; backward (4 + b)·C·V +
    4·V·D, the latter for the float32 sum of W's gradient, and nothing where W is
    frozen. With frozen_head the forward pass under `jax.grad` takes (4 + b)·C·V, or
    8·C·V by XLA for CPUs, and keeps b·D a token; the backward pass takes nothing.
    Nothing grows with tokens · V. W of another type than hidden costs b·V·D more;
    cuBLAS takes 32 MiB. Where V is no multiple of 64, W is padded: b·V·D, in "xla" on a
    GPU backward; in "hopper", where W is [D, V] or D is none either, in both passes and
    again for its gradient, otherwise 256·b·D forward and up to 2·b·C·V·D/N backward.
    "hopper" holds no logits: forward it takes 2·D + V/25 a token, of 8192 tokens at
    most, and no more than 4·C·V; backward, with S = √(C·V), it takes 2·C·V + 6·N·D for
    up to S tokens N. For more, up to V and C·V/32, a block of W's gradient comes on
    top, 32·C·V·D/N at most, where all but 2·N·D of that is no more than 2·C·V + 4·V·D;
    otherwise it takes 2·C·V + 4·V·D + 6·S·D, the second term not where W is frozen. In
    C·V, V is the whole vocabulary, even of devices that have a part of it.
    residual_bytes come on top, and live from one pass to the other; so do 4·V·D where
    they hold a part of the tokens. XLA for CPUs may widen 16-bit weights to float32,
    4·V·D, and needs 8·C·V forward where V is no multiple of 128 or jaxlib is older than
    0.11.

    With gradient_samples, under `jax.grad`: forward in "xla" 4·C·V·(1 + 2/16) + 512·C·K
    for the search (by XLA for CPUs 12·C·V instead of 4·C·V if more is asked than the
    log-probability), in "hopper" 2·C·V + V/16 a token of a chunk; and 8·K a token, the
    entries, that live from one pass to the other. Backward 24·(K + 1) a token for the
    pairs sorted by column, and in "xla" float32 sums of at most 2²² numbers of W's
    gradient at a time, in "hopper" 8·D·max(2048, V/1024) at most.

    **Communication** with axis_name, a token: forward 8 bytes in one max and 12 in one
    sum over the shards; backward 4·D in one sum of hidden's gradient, in float32, that
    is rounded after it and takes as much memory (twice with more than two shards in
    "hopper", which makes W's gradient meanwhile, and once more in its several launches
    of more than S tokens). W's gradient stays where W is. Under
    check_vma=False jax sums hidden's gradient itself, rounded to hidden's type before.
    Without it, where `jax.jit` splits a program over devices, each takes as many tokens
    of all as they divide, those that it has first; W is gathered if it is in parts, and
    its gradient summed over the devices, in W's type. Along explicit mesh axes, the
    result is sharded as labels are, or where these are not as hidden, and gradients as
    what they are gradients of; outside of jit the operands are copied.

    Raises:
        TypeError: an argument of the wrong type; the message names it.
        ValueError: shapes that disagree, an ambiguous layout, a label ≥ V, a chunk,
            temperature or softcap that is not positive, an unknown implementation, an
            axis_name that no shard_map binds, or along which W is not split.
            gradient_samples that is no integer from 1 to V - 1, a key without it, or
            none with it.
        NotImplementedError: a gradient of the temperature, a second derivative, or an
            implementation that cannot run this call here.

    >>> import jax.numpy as jnp, jaxmem
    >>> h, W = jnp.zeros((2, 8)), jnp.zeros((4, 8))
    >>> jaxmem.logprobs(h, W, jnp.array([0, 3]))
    Array([-1.3862944, -1.3862944], dtype=float32)

    Reference: Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models",
    2024, arXiv:2411.09009.
    """
    options = HeadOptions(
        chunk=chunk, where=where, temperature=temperature, softcap=softcap, bias=bias,
        vocab_size=vocab_size, layout=layout, frozen_head=frozen_head,
        residual_bytes=residual_bytes, gradient_samples=gradient_samples, key=key,
        axis_name=axis_name, implementation=implementation,
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
    frozen_head: bool = False,
    residual_bytes: int | Literal["all"] = 0,
    gradient_samples: int | None = None,
    key: jax.Array | None = None,
    axis_name: AxisName | None = None,
    implementation: Implementation | None = None,
) -> TokenStats:
    """All that one pass over the vocabulary tells of each token.

        p = softmax(z)     logprob = ln p[label]     entropy = -Σ p ln p
        logsumexp = ln Σ e^z     sum_pi_squared = Σ p²     is_argmax = z[label] ≥ max z

    Every float field is differentiable, alone or together with the others, at the
    price of one backward pass. Args, memory and errors are those of `logprobs`, but
    under frozen_head the backward pass makes the logits again, as with several fields
    there is no knowing which of them hidden's gradient is for.

    Returns:
        `TokenStats(logprob, entropy, logsumexp, sum_pi_squared, is_argmax)`: arrays
        of labels' shape, 0 (False) for a masked token. A label ≥ V that only shows up
        at run time makes its logprob NaN and leaves the other fields alone.

    >>> import jax.numpy as jnp, jaxmem
    >>> stats = jaxmem.token_stats(jnp.zeros((1, 8)), jnp.zeros((4, 8)), jnp.array([2]))
    >>> [round(float(field[0]), 4) for field in stats]
    [-1.3863, 1.3863, 1.3863, 0.25, 1.0]

    Reference: the entropy's gradient, dH/dz_j = -p_j (ln p_j + H), as in Haarnoja et
    al., 2018, arXiv:1801.01290, for a categorical policy.
    """
    options = HeadOptions(
        chunk=chunk, where=where, temperature=temperature, softcap=softcap, bias=bias,
        vocab_size=vocab_size, layout=layout, frozen_head=frozen_head,
        residual_bytes=residual_bytes, gradient_samples=gradient_samples, key=key,
        axis_name=axis_name, implementation=implementation,
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
    frozen_head: bool = False,
    residual_bytes: int | Literal["all"] = 0,
    gradient_samples: int | None = None,
    key: jax.Array | None = None,
    axis_name: AxisName | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Entropy of the head's softmax for each token, without the logits.

        out = -Σ_v p_v ln p_v,   p = softmax(z)                                (nats)

    Args, memory and errors are those of `logprobs`, less the labels.

    Returns:
        float32 [...], between 0 and ln V; 0 where masked.

    >>> import jax.numpy as jnp, jaxmem
    >>> jaxmem.entropy(jnp.zeros((1, 8)), jnp.zeros((4, 8)))
    Array([1.3862944], dtype=float32)
    """
    options = HeadOptions(
        chunk=chunk, where=where, temperature=temperature, softcap=softcap, bias=bias,
        vocab_size=vocab_size, layout=layout, frozen_head=frozen_head,
        residual_bytes=residual_bytes, gradient_samples=gradient_samples, key=key,
        axis_name=axis_name, implementation=implementation,
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
    """Log-probability of each label, for callers who already have logits [..., V].

        z = softcap·tanh(logits / softcap) / temperature
        out = z[label] - ln Σ_v e^(z_v)                                        (nats)

    Logits are read in chunks and never written to; arguments and errors are those of
    `logprobs`.

    **Memory** beyond inputs, outputs and gradients, with b the bytes of the logits'
    type and C = min(chunk, tokens rounded up to 16): (4 + b)·C·V forward and backward.
    No second [tokens, V] appears but the gradient itself, in the logits' own type. (XLA
    for CPUs in jaxlib older than 0.11 widens 16-bit logits whole.)

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
    """`token_stats` for callers who already have logits [..., V].

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
