"""The head of another package's model, and its per-token scores."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxmem.head.maths.head import Head
from jaxmem.head.maths.spec import Chunk, Implementation
from jaxmem.head.verbs import api


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


def check_parameters(name: str, module: Any) -> None:
    """Raise `NotServed` if a head's own parameters are not a plain matrix and bias.

    LoRA and quantisation of other layers do not matter: they are part of the hidden
    states. `name` is the head's, for the message.
    """
    own = vars(module).values()
    if any(isinstance(each, nnx.LoRAParam) for each in own):
        raise NotServed(f"{name} has LoRA")


def plain_array(name: str, parameter: Any) -> jax.Array:
    """A head's weights; raises `NotServed` if they are not an array of floats."""
    is_plain = isinstance(parameter, (nnx.Variable, jax.Array))
    value = parameter[...] if is_plain else parameter
    if not isinstance(value, jax.Array) or not jnp.issubdtype(
        value.dtype, jnp.floating
    ):
        raise NotServed(f"{name} is quantised, or not a plain array")
    return value


# Primitives that leave the numbers of a product as they are.
_KEEPING = {
    "broadcast_in_dim", "convert_element_type", "copy", "dot_general", "mesh_cast",
    "reshape", "reshard", "sharding_constraint", "squeeze", "transpose",
}  # fmt: skip


def check_product(name: str, head: Callable[[jax.Array], Any], x: jax.Array) -> None:
    """Raise `NotServed` unless a head, as the model calls it now, is one product.

    A library may change the call alone and leave the parameters as they are:
    quantisation-aware training does, of the layers that its rules name. So this traces
    the head itself where the model would call it. A bias may be added.
    """
    try:
        jaxpr = jax.make_jaxpr(head)(x).jaxpr
    except Exception as error:  # the package's own call raises a genuine one again
        reason = f"{name} cannot be traced separately ({type(error).__name__})"
        raise NotServed(reason) from error
    names = collections.Counter(_primitive_names(jaxpr))
    others = sorted(set(names) - _KEEPING - {"add"})
    if others or names["dot_general"] != 1 or names["add"] > 1:
        more = ", ".join(others) or f"{names['dot_general']} products"
        raise NotServed(f"{name} does more than multiply by its weights ({more})")


def _primitive_names(jaxpr: Any) -> Iterator[str]:
    """Names of a jaxpr's primitives, without the calls that only contain others."""
    for equation in jaxpr.eqns:
        inner = [x.jaxpr for x in equation.params.values() if hasattr(x, "jaxpr")]
        if not inner:
            yield equation.primitive.name
        for each in inner:
            yield from _primitive_names(each)


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
