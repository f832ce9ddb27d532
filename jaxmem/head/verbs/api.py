"""The public functions: they check, flatten, compute, and restore the shape."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxmem.head.maths.backend_operands import no_outputs
from jaxmem.head.maths.explicit_axes import sharded_like, with_automatic_axes
from jaxmem.head.maths.gradients import Gradient
from jaxmem.head.maths.head import Head, Matrix
from jaxmem.head.maths.row_stats import TokenStats
from jaxmem.head.maths.spec import AxisName, CallOptions, Chunk, Implementation
from jaxmem.head.verbs import arguments, rule
from jaxmem.head.verbs.sampled_rule import SampledStatisticsRule
from jaxmem.head.verbs.vjp import StatisticsRule


@with_automatic_axes(sharded_like(labels=0, hidden=1))
def logprobs(
    hidden: ArrayLike,
    W: Matrix,
    labels: ArrayLike,
    chunk: Chunk = 1024,
    *,
    where: ArrayLike | None = None,
    temperature: ArrayLike = 1.0,
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
        W: vocabulary matrix, [V, D] (an embedding table) or [D, V] (a Dense kernel),
            cast once to hidden's dtype; its gradient has its own, rounded once. Or a
            `jaxmem.Head`, which also has a bias, softcap, vocab_size or layout.
        labels: token ids [...], any integer dtype. Negative marks padding.
        chunk: tokens whose logits may exist at once; None for all of them; "auto"
            for 1,024, or 2^22 / D up to an eighth of the tokens if that is more, but
            for no more than 1 GiB of float32 logits.
        where: booleans that broadcast to labels; False masks a token, which costs
            nothing.
        temperature: positive scalar or one per token, [...]; not differentiable.
        gradient: None, `jaxmem.Recompute(blocks)` or `jaxmem.Sample(k)`: how gradients
            are computed. With `jaxmem.Recorded(entries)`, results are estimates too.
            Where neither W nor bias is differentiated, None takes two GEMMs in all
            instead of four, and rounds hidden's gradient to its dtype before and after
            scaling it; `Recompute()` takes three, and least memory.
        key: PRNG key of `Sample(k)`, or one per token, [...]; another one each step. A
            token's samples depend on the key and its position only: the devices of a
            `jax.shard_map`, the examples of a `jax.vmap` and the steps of a scan need
            different keys, or their samples are the same.
        axis_name: mesh axis, or tuple of axes, of an enclosing `jax.shard_map` along
            which the vocabulary is sharded: W and bias are this device's shards, of one
            size on all devices; the head's vocab_size and labels are of the whole
            vocabulary; all other arrays and the result are replicated over the shards.
            `jaxmem.sharding.parallel` does this for global arrays.
        vocab_groups: G, a power of two that divides W's columns: results and gradients
            have the same bits for any number of shards that divides G (docs/meshes.md).
        implementation: "xla", "hopper" (16-bit hidden on an H100 or H200), or None for
            the best one available; `jaxmem.report()` shows which.

    Returns:
        float32 [...] (float64 for float64 hidden): 0 for a masked token, with a
        gradient of exactly 0, even where its hidden state is NaN; NaN for a label
        ≥ V that is known at run time only. On a CPU a token's bits depend neither on
        other tokens nor on the chunk, if it is a multiple of 16.

    Memory of this and of every verb is in docs/memory.md, communication in
    docs/meshes.md.

    Raises:
        TypeError: an argument has the wrong type; the message names it.
        ValueError: an argument is out of its range, or shapes disagree; the layout is
            ambiguous; no shard_map binds axis_name, or W is not sharded along it; only
            one of `Sample(k)` and key is given.
        NotImplementedError: a gradient of the temperature or a second derivative is
            requested, or the implementation cannot run this call here.

    >>> import jax.numpy as jnp, jaxmem
    >>> h, W = jnp.zeros((2, 8)), jnp.zeros((4, 8))
    >>> jaxmem.logprobs(h, W, jnp.array([0, 3]))
    Array([-1.3862944, -1.3862944], dtype=float32)

    Reference: Wijmans et al., "Cut Your Losses", 2024, arXiv:2411.09009.
    """
    options = CallOptions(
        chunk=chunk, where=where, temperature=temperature, gradient=gradient, key=key,
        axis_name=axis_name, vocab_groups=vocab_groups, implementation=implementation,
    )  # fmt: skip
    operands = arguments.read_head(hidden, W)
    return _run_verb("logprobs", ("logprob",), operands, labels, options)["logprob"]


@with_automatic_axes(sharded_like(labels=0, hidden=1))
def token_stats(
    hidden: ArrayLike,
    W: Matrix,
    labels: ArrayLike,
    chunk: Chunk = 1024,
    *,
    where: ArrayLike | None = None,
    temperature: ArrayLike = 1.0,
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
    one backward pass. Arguments, memory and errors are as in `logprobs`. But the
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
    options = CallOptions(
        chunk=chunk, where=where, temperature=temperature, gradient=gradient, key=key,
        axis_name=axis_name, vocab_groups=vocab_groups, implementation=implementation,
    )  # fmt: skip
    operands, fields = arguments.read_head(hidden, W), TokenStats._fields
    return TokenStats(**_run_verb("token_stats", fields, operands, labels, options))


@with_automatic_axes(sharded_like(hidden=1))
def entropy(
    hidden: ArrayLike,
    W: Matrix,
    chunk: Chunk = 1024,
    *,
    where: ArrayLike | None = None,
    temperature: ArrayLike = 1.0,
    gradient: Gradient | None = None,
    key: jax.Array | None = None,
    axis_name: AxisName | None = None,
    vocab_groups: int | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Entropy of the head's softmax for each token, without the logits.

        out = -Σ_v p_v ln p_v,   p = softmax(z)                                (nats)

    Arguments, memory and errors are as in `logprobs`, without labels.

    Returns:
        float32 [...], between 0 and ln V; 0 where masked.

    >>> import jax.numpy as jnp, jaxmem
    >>> jaxmem.entropy(jnp.zeros((1, 8)), jnp.zeros((4, 8)))
    Array([1.3862944], dtype=float32)
    """
    options = CallOptions(
        chunk=chunk, where=where, temperature=temperature, gradient=gradient, key=key,
        axis_name=axis_name, vocab_groups=vocab_groups, implementation=implementation,
    )  # fmt: skip
    operands, labels = arguments.read_head(hidden, W), arguments.NO_LABELS
    return _run_verb("entropy", ("entropy",), operands, labels, options)["entropy"]


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

    Logits are read in chunks and not copied. Arguments and errors are as in
    `logprobs`; softcap and vocab_size are described in `jaxmem.Head`.

    >>> import jax.numpy as jnp, jaxmem
    >>> jaxmem.logprobs_from_logits(jnp.zeros((1, 4)), jnp.array([2]))
    Array([-1.3862944], dtype=float32)
    """
    options = CallOptions(
        chunk=chunk, where=where, temperature=temperature, axis_name=axis_name,
        implementation=implementation,
    )  # fmt: skip
    described = Head(None, softcap=softcap, vocab_size=vocab_size)
    verb, operands = "logprobs_from_logits", arguments.read_logits(logits, described)
    return _run_verb(verb, ("logprob",), operands, labels, options)["logprob"]


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
    options = CallOptions(
        chunk=chunk, where=where, temperature=temperature, axis_name=axis_name,
        implementation=implementation,
    )  # fmt: skip
    described = Head(None, softcap=softcap, vocab_size=vocab_size)
    verb, operands = "token_stats_from_logits", arguments.read_logits(logits, described)
    return TokenStats(**_run_verb(verb, TokenStats._fields, operands, labels, options))


def _run_verb(verb, outputs, operands, labels, options) -> dict:
    """The call's outputs by name, in the shape of its tokens."""
    spec, backend, source, rows, shape = arguments.call(
        verb, outputs, operands, labels, options
    )
    if 0 in shape:
        return no_outputs(spec, outputs, shape)
    rule_type = SampledStatisticsRule if spec.gradient_samples else StatisticsRule
    results = rule.run(rule_type(spec, backend), (source,), (rows,))
    return {k: jnp.reshape(v, shape) for k, v in results.items()}
