"""`divergence_loss`: divergences of two heads inside a loss, in one pass."""

from collections.abc import Callable
from typing import Literal

import jax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from jaxmem.core import checks
from jaxmem.core.explicit_axes import sharded_like, with_automatic_axes
from jaxmem.core.head import Matrix
from jaxmem.core.options import CallOptions, Chunk, Implementation
from jaxmem.functional import loss_functions
from jaxmem.functional.divergence import (
    Reference,
    check_beta,
    read_two_heads,
    uses_kernels,
)
from jaxmem.functional.divergence_loss_rule import LossCall, run, statistics_scale
from jaxmem.functional.divergence_terms import JSD, KL, ForwardKL
from jaxmem.functional.two_heads_loss import TwoHeadsLossRule

Divergence = Literal["kl", "forward_kl", "jsd"]


def _shardings(given):
    """Shardings of the loss and of every metric."""
    return PartitionSpec(), sharded_like(labels=0, hidden=1)(given)


@with_automatic_axes(_shardings)
def divergence_loss(
    loss_fn: Callable,
    hidden: ArrayLike,
    W: Matrix,
    labels: ArrayLike,
    reference_hidden: ArrayLike,
    reference_W: Matrix,
    *per_token: ArrayLike,
    divergence: Divergence = "kl",
    beta: float = 0.5,
    chunk: Chunk = 1024,
    normalizer: ArrayLike | None = None,
    where: ArrayLike | None = None,
    temperature: ArrayLike = 1.0,
    reference_temperature: ArrayLike | None = None,
    statistics_temperature: ArrayLike | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """A loss of each token's divergence and statistics, with its gradient in one pass.

        loss = Σ_i loss_fn(stats_i, D_i, *per_token_i) / normalizer

    over the active tokens i, with D_i = `kl`, `forward_kl` or `jsd` of the policy from
    the reference. It is `token_loss` with a second head: distillation mixed with
    cross-entropy, or a policy gradient with an exact KL penalty. Under `jax.grad` four
    GEMMs are computed, both heads' logits and the policy's two gradients; a loss of
    `kl` takes six, and one of `kl` and `token_stats` ten.

    Args:
        loss_fn: `(TokenStats, D, *per_token)` of C tokens, D of shape [C], to their
            losses, a float array [C], or to `(losses, {name: [C]})`; as in
            `token_loss`.
        labels: as in `logprobs`; any valid ids if loss_fn uses D alone.
        divergence: "kl", KL(p ‖ q) of the policy p from the reference q; "forward_kl",
            KL(q ‖ p); or "jsd".
        beta: of "jsd", as there.
        statistics_temperature: of the statistics, a scalar or one per token; None for
            the policy's. Hinton's mixture has `temperature=2.0` or more for the
            divergence, and 1.0 for the cross-entropy.
        hidden, W, reference_hidden, reference_W, chunk, where, temperature,
            reference_temperature, implementation: as in `kl`; per_token, normalizer: as
            in `token_loss`.

    Returns:
        (loss, metrics), as `token_loss` does. The reference is constant: its gradient
        is zero. A token's divergence that is infinite makes the gradient NaN, unless
        loss_fn does not use it.

    Memory in docs/memory.md and communication in docs/meshes.md ("divergence_loss").

    Raises:
        TypeError: as `kl` and `token_loss`.
        ValueError: as `kl` and `token_loss`; or there is no such divergence.
        NotImplementedError: as `kl` and `token_loss`.

    >>> import jax.numpy as jnp, jaxmem
    >>> def distill(stats, divergence):
    ...     return divergence - 0.1 * stats.logprob, {"divergence": divergence}
    >>> h, W = jnp.ones((2, 1)), jnp.log(jnp.array([[0.5], [0.5]]))
    >>> teacher_W = jnp.log(jnp.array([[0.25], [0.75]]))
    >>> loss, metrics = jaxmem.divergence_loss(
    ...     distill, h, W, jnp.array([0, 1]), h, teacher_W, divergence="forward_kl")
    >>> print(round(float(loss), 4), metrics["divergence"].round(4))
    0.2001 [0.1308 0.1308]

    Reference: as `token_loss`; Hinton et al., "Distilling the Knowledge in a Neural
    Network", 2015, arXiv:1503.02531, for the mixture with cross-entropy.
    """
    loss_functions.check(loss_fn)
    options = CallOptions(
        chunk=chunk, where=where, temperature=temperature, implementation=implementation
    )
    reference = Reference(reference_hidden, reference_W, reference_temperature)
    kind = _kind(divergence, beta)
    call = read_two_heads("divergence_loss", hidden, W, reference, labels, options)
    spec, other_spec, policy, other, rows, other_rows, shape = call
    kernels = uses_kernels(implementation)

    def rule_of(spec, backend, loss):
        return TwoHeadsLossRule(spec, backend, loss, kind, other_spec, kernels)

    scale = statistics_scale(spec, shape, rows, statistics_temperature)
    call = LossCall(spec, policy, (rows, scale, other_rows, other), shape)
    return run(rule_of, loss_fn, call, per_token, normalizer)


def _kind(divergence, beta):
    kinds = {"kl": KL(), "forward_kl": ForwardKL(), "jsd": JSD(check_beta(beta))}
    if divergence not in kinds:
        raise ValueError(
            f"divergence must be one of {tuple(kinds)}, got {checks.brief(divergence)}"
        )
    return kinds[divergence]
