"""The head of a language model: its matrix, and all that describes the matrix."""

import dataclasses
import functools
from typing import Any

import jax
from jax.typing import ArrayLike

from jaxmem.head.maths.spec import Layout


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["W", "bias"],
    meta_fields=["softcap", "vocab_size", "layout"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class Head:
    """The map of hidden states to logits; every verb takes one in place of W.

        z = softcap·tanh((h Wᵀ + bias) / softcap)

    An array alone means `Head(W)`. It is a pytree whose leaves are W and bias, so that
    a gradient by a head is a head, and so is a tree of shardings or masks. Nothing is
    checked when it is made; the verbs check it.

    Attributes:
        W: vocabulary matrix, [V, D] (an embedding table) or [D, V] (a Dense kernel).
        bias: [V], added to the logits first; None for none.
        softcap: caps logits at ±softcap by tanh, before the temperature (Gemma 2); a
            Python number, or None for no cap.
        vocab_size: logical vocabulary when W is padded; later entries get p = 0. None:
            all columns of the logits.
        layout: "vd" or "dv"; None: inferred from the shapes, unless W is square.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> head = jaxmem.Head(jnp.zeros((4, 8)), bias=jnp.zeros(4), vocab_size=3)
    >>> h, y = jnp.ones((2, 8)), jnp.array([0, 2])
    >>> jaxmem.logprobs(h, head, y)
    Array([-1.0986123, -1.0986123], dtype=float32)
    >>> slopes = jax.grad(lambda head: jaxmem.logprobs(h, head, y).sum())(head)
    >>> jax.tree.map(jnp.shape, slopes)
    Head(W=(4, 8), bias=(4,), softcap=None, vocab_size=3, layout=None)
    """

    W: Any
    bias: Any = None
    softcap: float | None = None
    vocab_size: int | None = None
    layout: Layout | None = None


Matrix = ArrayLike | Head  # what the verbs take for W


def as_head(W: Any) -> Head:
    """The head that an argument W means."""
    return W if isinstance(W, Head) else Head(W)
