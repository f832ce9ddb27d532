"""`divergence_loss`: divergences inside a loss, with its gradient in one pass."""

from collections.abc import Callable

import jax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from jaxmem.head.maths.explicit_axes import merged, spec_of, with_automatic_axes
from jaxmem.head.maths.gradients import Gradient
from jaxmem.head.maths.head import Matrix
from jaxmem.head.maths.spec import AxisName, CallOptions, Chunk, Implementation
from jaxmem.head.verbs import divergence_targets, traced_loss
from jaxmem.head.verbs.kinds import Kind
from jaxmem.head.verbs.single_pass import run


def _shardings(values):
    """Shardings of the loss and of every metric."""
    return PartitionSpec(), merged(
        spec_of(values["labels"]), *divergence_targets.specs(values)
    )


@with_automatic_axes(_shardings)
def divergence_loss(
    loss_fn: Callable,
    hidden: ArrayLike,
    W: Matrix,
    labels: ArrayLike,
    target: Kind,
    *per_token: ArrayLike,
    chunk: Chunk = 1024,
    normalizer: ArrayLike | None = None,
    where: ArrayLike | None = None,
    temperature: ArrayLike = 1.0,
    statistics_temperature: ArrayLike | None = None,
    gradient: Gradient | None = None,
    key: jax.Array | None = None,
    axis_name: AxisName | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """A loss of each token's divergence and statistics, with its gradient in one pass.

        loss = Σ_i loss_fn(stats_i, D_i, *per_token_i) / normalizer

    over the active tokens i, with D_i = `divergence` of the student from the target. It
    is `token_loss` with a target: distillation mixed with cross-entropy, or a policy
    gradient with an exact KL penalty. Under `jax.grad` four GEMMs are computed for a
    `Teacher`, both heads' logits and the student's two gradients, and three for
    `Columns` or `Drawn` ids; a loss of `divergence` takes six and four, and one of
    `divergence` and `token_stats` ten and eight.

    Args:
        loss_fn: `(TokenStats, D, *per_token)` of C tokens, D of shape [C], to their
            losses, a float array [C], or to `(losses, {name: [C]})`; as in
            `token_loss`.
        labels: as in `logprobs`; any valid ids if loss_fn uses only D.
        target: as in `divergence`, but a token without ids, whose D is 0, is active.
        statistics_temperature: of the statistics, a scalar or one per token; not
            differentiable; None for the student's. Hinton's mixture has
            `temperature=2.0` or more for the divergence, and 1.0 for the cross-entropy.
        gradient: as in `token_loss`, with one block. `Sample(k)` keeps the entries of
            the label and of given ids, and at most k others: entry v with probability
            min(1, k d_v), d as in `divergence`, or half of it and half of the softmax
            at statistics_temperature, if that differs.
        hidden, W, chunk, where, temperature, key, axis_name, implementation: as in
            `divergence`; per_token, normalizer: as in `token_loss`.

    Returns:
        (loss, metrics), as `token_loss` does. The target is constant: its gradient is
        zero. A token's divergence that is infinite makes the gradient NaN, unless
        loss_fn does not use it.

    Raises:
        TypeError, ValueError, NotImplementedError: as `divergence` and `token_loss`.

    >>> import jax.numpy as jnp, jaxmem
    >>> def distill(stats, divergence):
    ...     return divergence - 0.1 * stats.logprob, {"divergence": divergence}
    >>> h, W = jnp.ones((2, 1)), jnp.log(jnp.array([[0.5], [0.5]]))
    >>> teacher = jaxmem.Teacher(h, jnp.log(jnp.array([[0.25], [0.75]])))
    >>> loss, metrics = jaxmem.divergence_loss(
    ...     distill, h, W, jnp.array([0, 1]), jaxmem.ForwardKL(teacher))
    >>> print(round(float(loss), 4), metrics["divergence"].round(4))
    0.2001 [0.1308 0.1308]

    Reference: as `token_loss`; Hinton et al., "Distilling the Knowledge in a Neural
    Network", 2015, arXiv:1503.02531, for the mixture with cross-entropy.
    """
    traced_loss.check(loss_fn)
    options = CallOptions(
        chunk=chunk, where=where, temperature=temperature, gradient=gradient, key=key,
        axis_name=axis_name, implementation=implementation,
    )  # fmt: skip
    checked = divergence_targets.check(target)
    student = divergence_targets.Student(hidden, W, labels, options)
    rule_of, call = checked.of.loss(checked.kind, student, statistics_temperature)
    return run(rule_of, loss_fn, call, per_token, normalizer, of_divergence=True)
