"""A head as other packages hold it, asked for log-probabilities and entropies."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxmem.core.options import Chunk, Implementation, Layout
from jaxmem.functional import api as _head


@dataclasses.dataclass(frozen=True)
class Options:
    """How the head runs, whatever the trainer says of chunks of its own.

    Attributes:
        chunk: tokens whose logits may be alive at once; None for all, or "auto".
        implementation: a backend by name; None: the best there is.
    """

    chunk: Chunk = 1024
    implementation: Implementation | None = None


class Head(NamedTuple):
    """Raw arrays, and what is done with them."""

    W: jax.Array
    layout: Layout
    dtype: DTypeLike  # of the product
    bias: jax.Array | None = None
    softcap: float | None = None
    temperature: float = 1.0  # divides logits, after the softcap

    @property
    def n_columns(self) -> int:
        """Ids of the vocabulary, V."""
        return self.W.shape[0 if self.layout == "vd" else 1]


def as_index(ids: jax.Array, head: Head) -> jax.Array:
    """Ids as `jnp.take_along_axis` reads them, which trainers gather logits with.

    A negative id counts from the end, where jaxmem would mask it; outside [-V, V) there
    is no token, of which jaxmem makes NaN, too.
    """
    V = head.n_columns
    return jnp.where(ids < -V, V, jnp.where(ids < 0, ids + V, ids))


def scores(
    hidden: jax.Array,
    head: Head,
    labels: jax.Array,
    options: Options,
    *,
    temperature: float = 1.0,
    entropy: bool = True,
    where: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Log-probability of each label, entropy and logsumexp before it: float32 [...].

    Args:
        hidden: [..., D] final hidden states.
        head: what makes logits of them.
        labels: [...] ids.
        options: how it runs.
        temperature: divides logits; 0 leaves them, as trainers have it.
        entropy: whether the other two are wanted; else they are None.
        where: [...] False masks a token.
    """
    arguments = jnp.asarray(hidden).astype(head.dtype), head.W, labels
    keywords = {
        "chunk": options.chunk,
        "implementation": options.implementation,
        "layout": head.layout,
        "bias": head.bias,
        "softcap": head.softcap,
        "temperature": (temperature or 1.0) * head.temperature,
        "where": where,
    }
    if not entropy:
        return _head.logprobs(*arguments, **keywords), None, None
    stats = _head.token_stats(*arguments, **keywords)
    return stats.logprob, stats.entropy, stats.logsumexp
