"""The methods of a head that compare it with a target."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.typing import ArrayLike

from jaxmem.functional.divergence import divergence
from jaxmem.functional.divergence_loss import divergence_loss
from jaxmem.functional.kinds import Kind
from jaxmem.functional.teacher import Teacher


class DivergenceVerbs:
    """`divergence` and `divergence_loss`, for a class that runs verbs by `_run`.

    They have one implementation, whichever the head names for the others.
    """

    def _run(self, verb, hidden, *per_token, **keywords) -> Any:
        raise NotImplementedError

    def _prepare(self, hidden) -> tuple[jax.Array, Any]:
        raise NotImplementedError

    def teacher(
        self, hidden: ArrayLike, temperature: ArrayLike | None = None
    ) -> Teacher:
        """Return this head, of these hidden states, as a target of divergences.

        Args:
            hidden: final hidden states [..., D] of this head's model.
            temperature: positive scalar or one per token; None for the student's.

        Returns:
            A `jaxmem.Teacher`.
        """
        hidden, weights = self._prepare(hidden)
        return Teacher(hidden, weights.head, temperature)

    def divergence(self, hidden: ArrayLike, target: Kind, **options: Any) -> jax.Array:
        """Return the divergence of this head from a target; see `jaxmem.divergence`.

        Args:
            hidden: final hidden states [..., D] of this head's model.
            target: such as `jaxmem.ReverseKL(teacher.teacher(states))`.
            options: of the function, such as `where` and `temperature`.

        Returns:
            float32 [...].

        **Memory**: that of `jaxmem.divergence`, with this head's chunk.

        >>> import jax.numpy as jnp, jaxmem
        >>> from flax import nnx
        >>> from jaxmem.heads.nnx import LMHead
        >>> student, teacher = (LMHead(d, 4, rngs=nnx.Rngs(d)) for d in (8, 16))
        >>> target = jaxmem.ReverseKL(teacher.teacher(jnp.ones((2, 16))))
        >>> student.divergence(jnp.ones((2, 8)), target).shape
        (2,)
        """
        options = {"implementation": None} | options
        return self._run(divergence, hidden, target, **options)

    def divergence_loss(
        self,
        loss_fn: Callable,
        hidden: ArrayLike,
        labels: ArrayLike,
        target: Kind,
        *per_token: ArrayLike,
        **options: Any,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return a loss of each token's divergence from a target, in one pass.

            loss = Σ_t loss_fn(stats_t, D_t, *per_token_t) / normalizer

        Args:
            loss_fn: see `jaxmem.divergence_loss`.
            hidden: final hidden states [..., D] of this head's model.
            labels: token ids [...]; negative marks padding.
            target: as in `divergence`.
            per_token: further arguments of loss_fn, [...] or [..., K] each.
            options: of the function, such as `where` and `normalizer`.

        Returns:
            (loss, metrics): a float32 scalar, and the metrics that loss_fn returns,
            [...].

        **Memory**: that of `jaxmem.divergence_loss`, with this head's chunk.

        >>> import jax.numpy as jnp, jaxmem
        >>> from flax import nnx
        >>> from jaxmem.heads.nnx import LMHead
        >>> student, teacher = (LMHead(d, 4, rngs=nnx.Rngs(d)) for d in (8, 16))
        >>> target = jaxmem.ForwardKL(teacher.teacher(jnp.ones((2, 16))))
        >>> loss, _ = student.divergence_loss(
        ...     lambda stats, divergence: divergence,
        ...     jnp.ones((2, 8)), jnp.array([0, 3]), target)
        >>> loss.shape
        ()
        """
        verb = functools.partial(divergence_loss, loss_fn)
        options = {"implementation": None} | options
        return self._run(verb, hidden, labels, target, *per_token, **options)
