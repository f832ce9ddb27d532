"""`token_loss`: loss and gradients in one pass over the vocabulary."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from jaxmem.head.maths import checks, eight_bits, vocab_shards
from jaxmem.head.maths.backend_operands import TokenRows
from jaxmem.head.maths.explicit_axes import sharded_like, with_automatic_axes
from jaxmem.head.maths.gradients import Gradient
from jaxmem.head.maths.head import Matrix
from jaxmem.head.maths.row_stats import TokenStats
from jaxmem.head.maths.spec import AxisName, CallOptions, Chunk, Implementation, Spec
from jaxmem.head.verbs import arguments, rule, traced_loss
from jaxmem.head.verbs.sampled_rule import SampledLossRule
from jaxmem.head.verbs.vjp import LossRule


def _shardings(arguments):
    """Shardings of the loss and of every metric."""
    return PartitionSpec(), sharded_like(labels=0, hidden=1)(arguments)


@with_automatic_axes(_shardings)
def token_loss(
    loss_fn: Callable,
    hidden: ArrayLike,
    W: Matrix,
    labels: ArrayLike,
    *per_token: ArrayLike,
    chunk: Chunk = 1024,
    normalizer: ArrayLike | None = None,
    where: ArrayLike | None = None,
    temperature: ArrayLike = 1.0,
    gradient: Gradient | None = None,
    key: jax.Array | None = None,
    axis_name: AxisName | None = None,
    vocab_groups: int | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """A loss of each token's statistics, with its gradient in the same pass.

        loss = Σ_i loss_fn(stats_i, *per_token_i) / normalizer     over active tokens i

    While a chunk's logits are alive, `loss_fn` computes losses of their statistics, and
    its derivative gives the derivative of the logits: three GEMMs under `jax.grad`,
    where a loss of `token_stats` takes four. Without a gradient, one.

    Args:
        loss_fn: `(TokenStats, *per_token)` of C tokens to their losses, a float array
            [C], or to `(losses, {name: [C]})`. The C tokens, a chunk for "xla", are any
            of the active ones: each token's loss and metrics must depend on its own
            values only, neither on other tokens nor on C. It is traced twice, for C
            tokens and for another number. It may close over arrays without an axis of
            tokens; those of a mesh with explicit axes that it uses in control flow or
            custom derivatives must be arguments of a `jax.tree_util.Partial`.
        per_token: further arguments of loss_fn, [...] or [..., K] each, of any real
            dtype: advantages, old log-probabilities. Floats are differentiable.
        normalizer: scalar divisor of the sum, where 0 counts as 1; None: the number of
            active tokens of this call. For micro-batches or devices whose gradients are
            summed, pass the number of tokens in all of them.
        gradient: as in `logprobs`. `Recompute(blocks)` with more than one block takes
            four GEMMs. With `Sample(k)`, loss and metrics are exact; the gradient with
            respect to hidden and the head is an unbiased estimate; that with respect to
            per_token is exact. Two GEMMs where W is not differentiated.
        axis_name: mesh axes that shard the vocabulary, as in `logprobs`; loss_fn gets
            the statistics of the whole vocabulary, and its shards must have the same
            per_token and normalizer. normalizer=None counts the tokens of this device
            only.
        vocab_groups: as in `logprobs`: loss and metrics have the same bits too, as far
            as loss_fn's own arithmetic does. Four GEMMs under `jax.grad`.
        implementation: "xla", "hopper", or None for the best one available.
        hidden, W, labels, chunk, where, temperature, key: as in `logprobs`.

    Returns:
        (loss, metrics): a float32 scalar, and loss_fn's metrics by name, as float32
        arrays of labels' shape without gradient; an empty dict if it returns none.
        Masked tokens and padding add exactly 0 to the loss and every gradient, for any
        values of hidden and per_token, and their metrics are 0; the loss of a batch
        without active tokens is 0.

    Raises:
        TypeError: as `logprobs`; or loss_fn is no function or returns something else.
        ValueError: as `logprobs`; or a per-token argument has another shape; or loss_fn
            closes over a per-token array, or combines tokens.
        NotImplementedError: as `logprobs`; or loss_fn closes over an array that is
            differentiated, or whose axes are explicit.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> def reinforce(stats, advantage):
    ...     return -advantage * stats.logprob, {"entropy": stats.entropy}
    >>> h, W, y = jnp.zeros((2, 8)), jnp.zeros((4, 8)), jnp.array([0, 3])
    >>> loss, metrics = jaxmem.token_loss(reinforce, h, W, y, jnp.array([1.0, 2.0]))
    >>> print(round(float(loss), 4), metrics["entropy"])
    2.0794 [1.3862944 1.3862944]

    Reference: the single pass is that of Liger Kernel's fused linear cross-entropy,
    Hsu et al., 2024, arXiv:2410.10989, here for any loss of a token's statistics.
    """
    traced_loss.check(loss_fn)
    options = CallOptions(
        chunk=chunk, where=where, temperature=temperature, gradient=gradient, key=key,
        axis_name=axis_name, vocab_groups=vocab_groups, implementation=implementation,
    )  # fmt: skip
    fields = TokenStats._fields
    operands = arguments.read_head(hidden, W)
    call = arguments.call("token_loss", fields, operands, labels, options)
    rule_of = SampledLossRule if call.spec.gradient_samples else LossRule
    call = call._replace(rows=(call.rows,))
    return run(rule_of, loss_fn, call, per_token, normalizer)


def run(
    rule_of: Callable[..., LossRule],
    loss_fn: Callable,
    call: arguments.CheckedCall,
    per_token: tuple,
    normalizer: ArrayLike | None,
    of_divergence: bool = False,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss and its metrics, by the rule of a spec, a backend and a traced loss.

    The rule of a divergence computes loss_fn's first per-token argument itself, a chunk
    at a time.
    """
    spec, source, constants, shape = call.spec, call.source, call.rows, call.shape
    flat = _flat_per_token(per_token, shape)
    count = _read_normalizer(normalizer, constants[0], spec)
    spec, source = arguments.typed(spec, source, (constants, flat, count))
    flat, count = vocab_shards.vary((flat, count), spec.varying)
    arrays, n_rows = flat, spec.chunk
    if of_divergence:
        first = jnp.zeros(math.prod(shape), spec.stats_dtype)
        arrays = vocab_shards.vary(first, spec.varying), *flat
    else:
        n_rows = call.backend.loops.loss_rows(spec, source)
    loss, operands = traced_loss.trace(loss_fn, spec, n_rows, arrays)
    if 0 in shape:
        nothing = traced_loss.nothing(loss, spec, operands, 0, pull=False)
        total, metrics = jnp.zeros((), spec.stats_dtype), nothing.metrics
        if spec.forward != "exact":
            metrics = metrics | {eight_bits.ERROR: jnp.zeros_like(total, shape=(0,))}
    else:
        trained, fixed = (source, flat, count), (constants, operands.closed)
        total, metrics = rule.run(rule_of(spec, call.backend, loss), trained, fixed)
    metrics = {k: lax.stop_gradient(jnp.reshape(v, shape)) for k, v in metrics.items()}
    return total, metrics


def _flat_per_token(per_token, shape: tuple[int, ...]) -> tuple[jax.Array, ...]:
    """Each per-token argument of a loss, checked, with all tokens in one axis."""
    arrays = []
    for i, value in enumerate(per_token):
        x = checks.as_array(f"per_token[{i}]", value)
        checks.check_per_token(f"per_token[{i}]", x, shape)
        arrays.append(jnp.reshape(x, (math.prod(shape), *x.shape[len(shape) :])))
    return tuple(arrays)


def _read_normalizer(normalizer, rows: TokenRows, spec: Spec) -> jax.Array:
    """The divisor of the sum; NaN for a negative one that is known at run time only."""
    if normalizer is None:
        count = jnp.sum(rows.active, dtype=jnp.int32)
    else:
        count = checks.as_visible_array("normalizer", normalizer)
        checks.check_normalizer(count)
    count = jnp.asarray(count).astype(spec.stats_dtype)
    # No intermediate NaN if the count is valid, for jax_debug_nans.
    return jnp.where(count == 0, 1, jnp.where(count > 0, count, jnp.nan))
