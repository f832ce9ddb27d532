"""The head of another package's model, and its per-token scores."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxmem.core.head import Head
from jaxmem.core.options import Chunk, Implementation
from jaxmem.functional import api


class NotServed(Exception):
    """A call that is left to the trainer's own function; the message says why."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the head, which replace the trainer's own chunking options."""

    # tokens whose logits may be alive at once; None for all, or "auto"
    chunk: Chunk = 1024
    # name of a backend; None chooses the best available one
    implementation: Implementation | None = None

    @property
    def keywords(self) -> dict[str, Any]:
        """Both, as the verbs take them."""
        return dataclasses.asdict(self)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["head"],
    meta_fields=["dtype", "temperature"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class ModelHead:
    """A head, whose layout is known, and how another package's model applies it."""

    head: Head
    dtype: DTypeLike  # of the matrix product
    temperature: float = 1.0  # divides logits, after the softcap

    @property
    def n_columns(self) -> int:
        """The size of the vocabulary, V."""
        return self.head.W.shape[0 if self.head.layout == "vd" else 1]


def as_index(ids: jax.Array, head: ModelHead) -> jax.Array:
    """Ids with the meaning of `jnp.take_along_axis`, by which trainers gather logits.

    A negative id counts from the end, whereas jaxmem would mask it. An id outside [-V,
    V) is no token, and gives NaN in jaxmem too.
    """
    V = head.n_columns
    return jnp.where(ids < -V, V, jnp.where(ids < 0, ids + V, ids))


def scores(
    hidden: jax.Array,
    head: ModelHead,
    labels: jax.Array,
    options: Options,
    *,
    temperature: float = 1.0,
    entropy: bool = True,
    where: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Log-probability of each label, entropy and logsumexp: float32 [...].

    Labels are [...] ids of hidden states [..., D]. The temperature divides logits; 0
    means 1, as in trainers. Without `entropy` the other two are None.
    """
    arguments = jnp.asarray(hidden).astype(head.dtype), head.head, labels
    keywords: dict[str, Any] = {
        "temperature": (temperature or 1.0) * head.temperature, "where": where,
        **options.keywords,
    }  # fmt: skip
    if not entropy:
        return api.logprobs(*arguments, **keywords), None, None
    stats = api.token_stats(*arguments, **keywords)
    return stats.logprob, stats.entropy, stats.logsumexp
