"""The methods of a head that are about some columns: top k, draws, given ids."""

from typing import Any

import jax
from jax.typing import ArrayLike

from jaxmem.functional import largest
from jaxmem.functional.draws import sample_ids
from jaxmem.functional.largest import TopK
from jaxmem.functional.selected import selected_logprobs


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
