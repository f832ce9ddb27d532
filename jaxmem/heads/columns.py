"""The methods of a head that are about some columns: top k, distillation, draws."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.typing import ArrayLike

from jaxmem.functional import largest
from jaxmem.functional.draws import sample_ids
from jaxmem.functional.largest import TopK
from jaxmem.functional.selected import selected_logprobs
from jaxmem.functional.topk_divergence import Direction, topk_kl
from jaxmem.functional.topk_divergence_loss import topk_kl_loss


class ColumnVerbs:
    """Verbs of some columns, for a class that runs verbs by `_run`.

    They have one implementation, whichever the head names for the others.
    """

    def _run(self, verb, hidden, *per_token, **keywords) -> Any:
        raise NotImplementedError

    def topk(
        self,
        hidden: ArrayLike,
        k: int,
        where: ArrayLike | None = None,
        temperature: ArrayLike = 1.0,
    ) -> TopK:
        """Return the k most likely ids of each token; see `jaxmem.topk`.

        Args:
            hidden: final hidden states [..., D].
            k: a Python integer from 1 to V.
            where: booleans that broadcast to the tokens; False masks a token.
            temperature: positive scalar or one per token, [...]; not differentiable.

        Returns:
            `TopK(logprobs, ids)`, float32 and int32 [..., k]; 0 and -1 where masked.

        **Memory**: that of `jaxmem.topk`, with the head's chunk.
        """
        return self._run(
            largest.topk,
            hidden,
            k,
            where=where,
            temperature=temperature,
            implementation=None,
        )

    def topk_kl(
        self,
        hidden: ArrayLike,
        ids: ArrayLike,
        teacher_logprobs: ArrayLike,
        where: ArrayLike | None = None,
        temperature: ArrayLike = 1.0,
        tail: bool = True,
        direction: Direction = "forward",
        beta: float = 0.5,
    ) -> jax.Array:
        """Return the divergence from a teacher's given columns; see `jaxmem.topk_kl`.

        Args:
            hidden: final hidden states [..., D].
            ids: token ids [..., K]; negative ones are absent.
            teacher_logprobs: the teacher's log-probabilities of the ids, [..., K].
            where: booleans that broadcast to the tokens; False masks a token.
            temperature: positive scalar or one per token, [...]; not differentiable.
            tail: whether the rest of the vocabulary counts as one more outcome.
            direction: "forward", "reverse" or "jsd".
            beta: weight of the teacher in the mixture of "jsd".

        Returns:
            float32 [...]; 0, with a gradient of 0, where masked.

        **Memory**: that of `jaxmem.topk_kl`, with the head's chunk.
        """
        return self._run(
            topk_kl, hidden, ids, teacher_logprobs, where=where,
            temperature=temperature, tail=tail, direction=direction, beta=beta,
            implementation=None,
        )  # fmt: skip

    def topk_kl_loss(
        self,
        loss_fn: Callable,
        hidden: ArrayLike,
        labels: ArrayLike,
        ids: ArrayLike,
        teacher_logprobs: ArrayLike | None,
        *per_token: ArrayLike,
        **options: Any,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return a loss of each token's divergence from given columns, in one pass.

            loss = Σ_t loss_fn(stats_t, D_t, *per_token_t) / normalizer

        Args:
            loss_fn: see `jaxmem.topk_kl_loss`.
            hidden: final hidden states [..., D].
            labels: token ids [...]; negative marks padding.
            ids: token ids [..., K]; negative ones are absent.
            teacher_logprobs: the teacher's log-probabilities of the ids, [..., K]; None
                where the ids were drawn from the teacher.
            per_token: further arguments of loss_fn, [...] or [..., K] each.
            options: of the function, such as `direction`, `where` and `normalizer`.

        Returns:
            (loss, metrics): a float32 scalar, and the metrics that loss_fn returns,
            [...].

        **Memory**: that of `jaxmem.topk_kl_loss`, with the head's chunk.
        """
        verb = functools.partial(topk_kl_loss, loss_fn)
        given = hidden, labels, ids, teacher_logprobs, *per_token
        return self._run(verb, *given, implementation=None, **options)

    def sample_ids(
        self,
        hidden: ArrayLike,
        n: int,
        key: jax.Array,
        where: ArrayLike | None = None,
        temperature: ArrayLike = 1.0,
    ) -> jax.Array:
        """Return n ids drawn from each token's softmax; see `jaxmem.sample_ids`.

        Args:
            hidden: final hidden states [..., D].
            n: draws per token, a Python integer.
            key: PRNG key, or one per token, [...].
            where: booleans that broadcast to the tokens; False masks a token.
            temperature: positive scalar or one per token, [...].

        Returns:
            int32 [..., n]; -1 where masked.

        **Memory**: that of `jaxmem.sample_ids`, with the head's chunk.
        """
        return self._run(
            sample_ids,
            hidden,
            n,
            key,
            where=where,
            temperature=temperature,
            implementation=None,
        )

    def selected_logprobs(
        self,
        hidden: ArrayLike,
        ids: ArrayLike,
        where: ArrayLike | None = None,
        temperature: ArrayLike = 1.0,
    ) -> jax.Array:
        """Return log-probabilities of given ids; see `jaxmem.selected_logprobs`.

        Args:
            hidden: final hidden states [..., D].
            ids: token ids [..., K]; negative ones are absent.
            where: booleans that broadcast to the tokens; False masks a token.
            temperature: positive scalar or one per token, [...]; not differentiable.

        Returns:
            float32 [..., K]; 0, with a gradient of 0, where masked or absent.

        **Memory**: that of `jaxmem.selected_logprobs`, with the head's chunk.
        """
        return self._run(
            selected_logprobs,
            hidden,
            ids,
            where=where,
            temperature=temperature,
            implementation=None,
        )
