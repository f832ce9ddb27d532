"""`topk_kl_loss`: divergences from a teacher's columns inside a loss, in one pass."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from jaxmem.core import checks
from jaxmem.core.explicit_axes import sharded_like, with_automatic_axes
from jaxmem.core.head import Matrix
from jaxmem.core.options import AxisName, CallOptions, Chunk, Implementation
from jaxmem.functional import arguments, loss_functions
from jaxmem.functional.columns_loss import ColumnsLossRule, DrawnLossRule
from jaxmem.functional.divergence_loss_rule import LossCall, run, statistics_scale
from jaxmem.functional.given_ids import check_ids, flat_ids
from jaxmem.functional.topk_divergence import (
    Direction,
    check_teacher,
    read_direction,
    teacher_columns,
)


def _shardings(given):
    """Shardings of the loss and of every metric."""
    return PartitionSpec(), sharded_like(labels=0, ids=1, hidden=1)(given)


@with_automatic_axes(_shardings)
def topk_kl_loss(
    loss_fn: Callable,
    hidden: ArrayLike,
    W: Matrix,
    labels: ArrayLike,
    ids: ArrayLike,
    teacher_logprobs: ArrayLike | None,
    *per_token: ArrayLike,
    tail: bool = True,
    direction: Direction = "forward",
    beta: float = 0.5,
    chunk: Chunk = 1024,
    normalizer: ArrayLike | None = None,
    where: ArrayLike | None = None,
    temperature: ArrayLike = 1.0,
    statistics_temperature: ArrayLike | None = None,
    axis_name: AxisName | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """A loss of each token's `topk_kl` and statistics, with its gradient in one pass.

        loss = Σ_i loss_fn(stats_i, D_i, *per_token_i) / normalizer

    over the active tokens i, with D_i = `topk_kl` of the student from the columns that
    are known of its teacher. It is to `topk_kl` what `divergence_loss` is to `kl`:
    offline distillation, mixed with cross-entropy or not. Under `jax.grad` three GEMMs
    are computed, the logits and both gradients; a loss of `topk_kl` takes four, and one
    of `topk_kl` and `token_loss` seven.

    Args:
        loss_fn: `(TokenStats, D, *per_token)` of C tokens, D of shape [C], to their
            losses, a float array [C], or to `(losses, {name: [C]})`; as in
            `token_loss`.
        labels: as in `logprobs`; any valid ids if loss_fn uses D alone.
        ids: as in `topk_kl`, but a token without ids, whose D is 0, is active.
        teacher_logprobs: as in `topk_kl`; or None where the ids were drawn from the
            teacher, as by `sample_ids`. D_i is then the cross-entropy with them, the
            mean of -ln p over the ids, which may repeat: in the mean over draws the
            forward KL divergence plus the teacher's entropy, with its gradient.
        tail: as in `topk_kl`; not read of drawn ids.
        direction: as in `topk_kl`; "forward" with drawn ids.
        statistics_temperature: of the statistics, a scalar or one per token; None for
            that of the divergence.
        axis_name: as in `token_loss`; the ids are those of the whole vocabulary.
        implementation: "xla", or None, which means the same.
        hidden, W, beta, temperature: as in `topk_kl`; per_token, normalizer: as in
            `token_loss`; chunk, where: as in `logprobs`.

    Returns:
        (loss, metrics), as `token_loss` does. The teacher is constant: its gradient is
        zero.

    Memory in docs/memory.md and communication in docs/meshes.md ("topk_kl_loss").

    Raises:
        TypeError: as `topk_kl` and `token_loss`.
        ValueError: as `topk_kl` and `token_loss`; or drawn ids have another direction.
        NotImplementedError: as `topk_kl` and `token_loss`.

    >>> import jax.numpy as jnp, jaxmem
    >>> def distill(stats, divergence):
    ...     return divergence - 0.1 * stats.logprob, {"divergence": divergence}
    >>> h, W = jnp.ones((1, 1)), jnp.log(jnp.array([[0.4], [0.3], [0.2], [0.1]]))
    >>> ids, q = jnp.array([[0, 1]]), jnp.log(jnp.array([[0.5, 0.3]]))
    >>> loss, metrics = jaxmem.topk_kl_loss(distill, h, W, jnp.array([0]), ids, q)
    >>> print(round(float(loss), 4), metrics["divergence"].round(4))
    0.1221 [0.0305]

    Reference: as `topk_kl` and `token_loss`.
    """
    loss_functions.check(loss_fn)
    options = CallOptions(
        chunk=chunk, where=where, temperature=temperature, axis_name=axis_name,
        implementation=implementation,
    )  # fmt: skip
    verb = "topk_kl_loss"
    how = read_direction(direction, beta), checks.check_flag("tail", tail)
    spec, source, rows, shape = arguments.columns_call(verb, hidden, W, options, labels)
    where = arguments.read_where(where, shape)
    ids = check_ids("ids", ids, where, shape, spec.vocab_size)
    shapes = arguments.shapes_of(source, shape) | {"ids": ids.shape}
    arguments.record_only_xla(verb, spec, shapes, implementation)
    scale = statistics_scale(spec, shape, rows, statistics_temperature)
    if teacher_logprobs is not None:
        teacher_logprobs = check_teacher(teacher_logprobs, ids, where, shape)
    if not ids.shape[-1]:  # one that is absent
        ids, none = jnp.full((*shape, 1), -1, jnp.int32), jnp.zeros((*shape, 1))
        teacher_logprobs = None if teacher_logprobs is None else none
    if teacher_logprobs is None:
        _check_forward(direction)
        given, rule_of = (rows, scale, flat_ids(ids, shape)), DrawnLossRule
    else:
        given = rows, scale, *teacher_columns(spec, ids, teacher_logprobs)
        rule_of = functools.partial(ColumnsLossRule, how=how)
    call = LossCall(spec, source, given, shape)
    return run(rule_of, loss_fn, call, per_token, normalizer)


def _check_forward(direction):
    if direction != "forward":
        raise ValueError(
            "direction must be 'forward' where teacher_logprobs is None, because ids "
            f"drawn from the teacher estimate that divergence only; got {direction!r}"
        )
