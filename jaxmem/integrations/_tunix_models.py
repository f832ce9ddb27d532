"""Heads of Tunix's own models, and the hidden states that they multiply."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.head.maths.head import Head
from jaxmem.integrations._distillation import DeferredLogits
from jaxmem.integrations._head import (
    ModelHead,
    NotServed,
    check_parameters,
    check_product,
    plain_array,
)
from jaxmem.integrations._substitutes import holding


def head_of(model: Any) -> ModelHead:
    """The head of a model; raises `NotServed` for one that is not supported.

    A model of another package is supported if it has two methods: `jaxmem_head()`,
    which returns a `ModelHead` or the reason why there is none, and
    `jaxmem_hidden_states(*args, **kwargs)`, which takes the model's arguments and
    returns the hidden states [B, T, D] of its head.
    """
    if hasattr(model, "jaxmem_head"):
        head = model.jaxmem_head()
        if isinstance(head, str):
            raise NotServed(head)
        return head
    kind = type(model).__name__
    names = [each.__module__ for each in type(model).__mro__]
    if not any(name.startswith("tunix.models.") for name in names):
        raise NotServed(f"{kind} is none of Tunix's own models")
    owner, _ = _logits_module(model)
    check_parameters(f"the head of {kind}", owner)
    untied = owner is not model.embedder
    if untied and owner.einsum_str != "BTD,DV->BTV":
        raise NotServed(f"the head of {kind} computes {owner.einsum_str}")
    weights = owner.w if untied else owner.input_embedding
    W = plain_array(f"the head of {kind}", weights)
    softcap = getattr(model, "final_logits_softcap", None)
    softcap = softcap or getattr(model.config, "final_logit_softcap", None)
    dtype = getattr(owner, "dtype", None)
    dtype = dtype or getattr(model.config, "dtype", None) or W.dtype
    return ModelHead(Head(W, softcap=softcap, layout="dv" if untied else "vd"), dtype)


def hidden_states(
    model: Any, *args: Any, images: Any = None, **kwargs: Any
) -> jax.Array:
    """Run a model without its head: the states [B, T, D] that W multiplies."""
    if images is not None:  # not all models take them
        kwargs["images"] = images
    return _states_and_more(model, args, kwargs)[0]


def takes_segment_ids(model: Any) -> bool:
    """True if the model's call has an argument `segment_ids`."""
    parameters = inspect.signature(model.__call__).parameters.values()
    return any(p.name == "segment_ids" or p.kind == p.VAR_KEYWORD for p in parameters)


def _logits_module(model: Any) -> tuple[Any, str]:
    """The module that computes logits, and the name of its method."""
    if hasattr(model, "lm_head"):
        return model.lm_head, "__call__"
    return model.embedder, "decode"


@contextlib.contextmanager
def _stopped_at(owner: Any, method: str, name: str) -> Iterator[list[jax.Array]]:
    """Record the argument of one module's method, which returns a placeholder."""
    states: list[jax.Array] = []

    def keep(original: Callable, self: Any, x: jax.Array, *args: Any, **kwargs: Any):
        if self is not owner:  # a class may be used for other layers too
            return original(self, x, *args, **kwargs)
        check_product(name, lambda x: original(self, x, *args, **kwargs), x)
        states.append(x)
        return jnp.zeros((*x.shape[:-1], 1), x.dtype)

    with holding(type(owner), method, keep):
        yield states


@contextlib.contextmanager
def without_logits(model: Any) -> Iterator[None]:
    """Inside, calls of this model alone return `DeferredLogits` for logits."""

    def call(original: Callable, self: Any, *args: Any, **kwargs: Any) -> tuple:
        if self is not model:
            return original(self, *args, **kwargs)
        hidden, *more = _states_and_more(self, args, kwargs)
        return DeferredLogits(hidden, head_of(self)), *more

    with holding(type(model), "__call__", call):
        yield


def _states_and_more(model: Any, args: tuple, kwargs: dict) -> tuple:
    """The states that W multiplies, and what a model returns beside its logits."""
    if hasattr(model, "jaxmem_hidden_states"):
        return model.jaxmem_hidden_states(*args, **kwargs), None
    name = f"the head of {type(model).__name__}"
    with _stopped_at(*_logits_module(model), name) as states:
        _, *more = model(*args, **kwargs)
    (hidden,) = states
    return hidden, *more
