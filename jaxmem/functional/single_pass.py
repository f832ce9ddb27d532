"""The verb whose loss is known inside: one pass from hidden states to gradients."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from jaxmem.core import checks, shards as _shards
from jaxmem.core.explicit_axes import sharded_like, with_automatic_axes
from jaxmem.core.options import AxisName, Chunk, HeadOptions, Implementation, Layout
from jaxmem.core.stats import TokenStats
from jaxmem.functional import (
    arguments,
    loss_functions,
    rule,
    traced_loss,
)
from jaxmem.functional.sampled import SampledLossRule
from jaxmem.functional.vjp import LossRule


def _shardings(arguments):
    """Of the loss, and of every metric."""
    return PartitionSpec(), sharded_like(labels=0, hidden=1)(arguments)


@with_automatic_axes(_shardings)
def token_loss(
    loss_fn: Callable,
    hidden: ArrayLike,
    W: ArrayLike,
    labels: ArrayLike,
    *per_token: ArrayLike,
    chunk: Chunk = 1024,
    normalizer: ArrayLike | None = None,
    where: ArrayLike | None = None,
    temperature: ArrayLike = 1.0,
    softcap: float | None = None,
    bias: ArrayLike | None = None,
    vocab_size: int | None = None,
    layout: Layout | None = None,
    frozen_head: bool = False,
    gradient_samples: int | None = None,
    key: jax.Array | None = None,
    axis_name: AxisName | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Loss made of what each token's logits tell, with its gradient in the same pass.

        loss = Σ_i loss_fn(stats_i, *per_token_i) / normalizer     over active tokens i

    While a chunk's logits are alive, `loss_fn` turns their statistics into losses, and
    its derivative turns the logits into theirs: under `jax.grad` three GEMMs, where a
    loss made of `token_stats` takes four. Outside it, one.

    Args:
        loss_fn: `(TokenStats, *per_token)` of C tokens to their losses, a float array
            [C], or to `(losses, {name: [C]})`; C is a chunk on "xla", and on "hopper"
            what is kept at once. Each token's numbers must come from its own row.
            Traced once for a function object, as the body of `jax.lax.scan` is. It may
            close over arrays, except those being differentiated, and except those of a
            mesh with explicit axes for use in control flow or custom derivatives:
            these it takes as arguments of a `jax.tree_util.Partial`.
        hidden, W, labels: as in `logprobs`.
        per_token: what else the loss is made of, [...] or [..., K] each, of any real
            type: advantages, old log-probabilities. Differentiable where floats.
        normalizer: scalar that the sum is divided by, 0 counting as 1; None: the active
            tokens of this call. For microbatches or devices whose gradients are added
            up, pass the number of tokens in all of them.
        chunk, where, temperature, softcap, bias, vocab_size, layout: as in `logprobs`.
        frozen_head: W and bias are constants; there is no gradient of them to sum up.
        gradient_samples, key: as in `logprobs`: loss and metrics are exact, and their
            gradient by hidden and the head is an unbiased estimate; that by per_token
            is exact.
        axis_name: mesh axes that split the vocabulary, as in `logprobs`; loss_fn sees
            the statistics of all of it, and the shards of one vocabulary must have the
            same per_token and normalizer. normalizer=None counts the tokens that this
            device has, not those that other devices may have.
        implementation: "xla", "hopper", or None for the best there is here.

    Returns:
        (loss, metrics): a float32 scalar, and a dict of what loss_fn calls metrics,
        empty if nothing, as float32 arrays of labels' shape without gradient. Masked
        tokens and padding add exactly 0 to the loss and every gradient, whatever hidden
        and per_token hold there, and have metrics of 0; a batch without others has
        loss 0.

    **Memory** beyond inputs, outputs and gradients, with C = min(chunk, tokens rounded
    up to 16): 4·C·V; under `jax.grad` also 2·C·V if hidden has 16 bits, and 4·V·D for
    the float32 sum of W's gradient. Under jit, what is not differentiated has no part
    in it. "hopper" takes no more: instead of logits it keeps their exponentials, 2·V a
    token, of all tokens where those fit, which saves the float32 sum, or else of 3·C.
    XLA for CPUs needs 8·C·V where V is no multiple of 128. With gradient_samples, what
    `logprobs` takes with it in both passes. Gradients wait for the
    loss's own cotangent: hidden's is rounded to its type before it is scaled.

    **Communication** with axis_name: that of `logprobs`, but under `jax.grad` the max
    and the sum of statistics are made chunk by chunk.

    Raises:
        TypeError: also a loss_fn that is none, or returns something else.
        ValueError: also a per-token argument of another shape.
        NotImplementedError: also a loss_fn that closes over what it may not.

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
    loss_functions.check(loss_fn)
    options = HeadOptions(
        chunk=chunk, where=where, temperature=temperature, softcap=softcap, bias=bias,
        vocab_size=vocab_size, layout=layout, frozen_head=frozen_head,
        gradient_samples=gradient_samples, key=key, axis_name=axis_name,
        implementation=implementation,
    )  # fmt: skip
    fields = TokenStats._fields
    call = arguments.head_call("token_loss", fields, hidden, W, labels, options)
    (spec, backend, source, rows, shape), flat = call, _flat(per_token, call.shape)
    count = _normalizer(normalizer, rows, spec)
    spec, source = arguments.typed(spec, source, (rows, flat, count))
    flat, count = _shards.vary((flat, count), spec.varying)
    loss, operands = traced_loss.trace(
        loss_fn, spec, backend.loss_rows(spec, source), flat
    )
    if 0 in shape:
        nothing = traced_loss.nothing(loss, spec, operands, 0, pull=False)
        total, metrics = jnp.zeros((), spec.stats_dtype), nothing.metrics
    else:
        trained, fixed = (source, operands.per_token, count), (rows, operands.closed)
        made_by = SampledLossRule if spec.gradient_samples else LossRule
        total, metrics = rule.run(made_by(spec, backend, loss), trained, fixed)
    metrics = {k: lax.stop_gradient(jnp.reshape(v, shape)) for k, v in metrics.items()}
    return total, metrics


def _flat(per_token, shape):
    """Each with all of the tokens in one axis."""
    arrays = []
    for i, value in enumerate(per_token):
        x = checks.as_array(f"per_token[{i}]", value)
        checks.check_per_token(f"per_token[{i}]", x, shape)
        arrays.append(jnp.reshape(x, (math.prod(shape), *x.shape[len(shape) :])))
    return tuple(arrays)


def _normalizer(normalizer, rows, spec):
    """What to divide by; NaN for a negative number that only shows up at run time."""
    if normalizer is None:
        count = jnp.sum(rows.active, dtype=jnp.int32)
    else:
        count = checks.as_visible_array("normalizer", normalizer)
        checks.check_normalizer(count)
    count = jnp.asarray(count).astype(spec.stats_dtype)
    # No NaN on the way to a count that is fine, for jax_debug_nans.
    return jnp.where(count == 0, 1, jnp.where(count > 0, count, jnp.nan))
