"""The methods of a head that compare it with another one."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.typing import ArrayLike

from jaxmem.functional.divergence_loss import divergence_loss


class DivergenceVerbs:
    """`divergence` and `divergence_loss`, for a class that runs verbs by `_run`."""

    def _run(self, verb, hidden, *per_token, **keywords) -> Any:
        raise NotImplementedError

    def _prepare(self, hidden) -> tuple[jax.Array, Any]:
        raise NotImplementedError

    def divergence(
        self,
        verb: Callable,
        hidden: ArrayLike,
        reference: "DivergenceVerbs",
        reference_hidden: ArrayLike,
        **options: Any,
    ) -> jax.Array:
        """Return the divergence of this head's distribution from another head's.

            out = verb(hidden, W, reference_hidden, reference_W, ...),   per token

        Args:
            verb: `jaxmem.kl`, `jaxmem.forward_kl` or `jaxmem.jsd`.
            hidden: final hidden states [..., D] of this head's model.
            reference: a head over the same vocabulary, which is constant.
            reference_hidden: final hidden states [..., D'] of its model.
            options: of the verb, such as `where`, `temperature` and `beta`.

        Returns:
            float32 [...]; see `jaxmem.kl`.

        **Memory**: that of `jaxmem.kl`, with this head's chunk.

        >>> import jax.numpy as jnp, jaxmem
        >>> from flax import nnx
        >>> from jaxmem.heads.nnx import LMHead
        >>> student, teacher = (LMHead(d, 4, rngs=nnx.Rngs(d)) for d in (8, 16))
        >>> hidden, states = jnp.ones((2, 8)), jnp.ones((2, 16))
        >>> student.divergence(jaxmem.kl, hidden, teacher, states).shape
        (2,)
        """
        states, weights = reference._prepare(reference_hidden)
        return self._run(verb, hidden, states, weights.head, **options)

    def divergence_loss(
        self,
        loss_fn: Callable,
        hidden: ArrayLike,
        labels: ArrayLike,
        reference: "DivergenceVerbs",
        reference_hidden: ArrayLike,
        *per_token: ArrayLike,
        **options: Any,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return a loss of each token's divergence from another head, in one pass.

            loss = Σ_t loss_fn(stats_t, D_t, *per_token_t) / normalizer

        Args:
            loss_fn: see `jaxmem.divergence_loss`.
            hidden: final hidden states [..., D] of this head's model.
            labels: token ids [...]; negative marks padding.
            reference: a head over the same vocabulary, which is constant.
            reference_hidden: final hidden states [..., D'] of its model.
            per_token: further arguments of loss_fn, [...] or [..., K] each.
            options: of the function, such as `divergence`, `where` and `normalizer`.

        Returns:
            (loss, metrics): a float32 scalar, and the metrics that loss_fn returns,
            [...].

        **Memory**: that of `jaxmem.divergence_loss`, with this head's chunk.

        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from jaxmem.heads.nnx import LMHead
        >>> student, teacher = (LMHead(d, 4, rngs=nnx.Rngs(d)) for d in (8, 16))
        >>> hidden, states = jnp.ones((2, 8)), jnp.ones((2, 16))
        >>> loss, _ = student.divergence_loss(
        ...     lambda stats, divergence: divergence,
        ...     hidden, jnp.array([0, 3]), teacher, states)
        >>> loss.shape
        ()
        """
        states, weights = reference._prepare(reference_hidden)
        return self._run(
            functools.partial(divergence_loss, loss_fn),
            hidden,
            labels,
            states,
            weights.head,
            *per_token,
            **options,
        )
