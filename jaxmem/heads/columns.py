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

    def topk(self, hidden: ArrayLike, k: int, **options: Any) -> TopK:
        """Return the k most likely ids of each token; see `jaxmem.topk`.

        Args:
            hidden: final hidden states [..., D].
            k: a Python integer from 1 to V.
            options: of the function, such as `where`, `temperature` and `gradient`.

        Returns:
            `TopK(logprobs, ids)`, float32 and int32 [..., k]; 0 and -1 where masked.

        **Memory**: that of `jaxmem.topk`, with the head's chunk.
        """
        return self._run(largest.topk, hidden, k, **{"implementation": None} | options)

    def sample_ids(
        self, hidden: ArrayLike, n: int, key: jax.Array, **options: Any
    ) -> jax.Array:
        """Return n ids drawn from each token's softmax; see `jaxmem.sample_ids`.

        Args:
            hidden: final hidden states [..., D].
            n: draws per token, a Python integer.
            key: PRNG key, or one per token, [...].
            options: of the function, such as `where` and `temperature`.

        Returns:
            int32 [..., n]; -1 where masked.

        **Memory**: that of `jaxmem.sample_ids`, with the head's chunk.
        """
        options = {"implementation": None} | options
        return self._run(sample_ids, hidden, n, key, **options)

    def selected_logprobs(
        self, hidden: ArrayLike, ids: ArrayLike, **options: Any
    ) -> jax.Array:
        """Return log-probabilities of given ids; see `jaxmem.selected_logprobs`.

        Args:
            hidden: final hidden states [..., D].
            ids: token ids [..., K]; negative ones are absent.
            options: of the function, such as `where`, `temperature` and `gradient`.

        Returns:
            float32 [..., K]; 0, with a gradient of 0, where masked or absent.

        **Memory**: that of `jaxmem.selected_logprobs`, with the head's chunk.
        """
        options = {"implementation": None} | options
        return self._run(selected_logprobs, hidden, ids, **options)
