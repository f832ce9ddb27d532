"""A language-model head for Flax NNX that replaces `nnx.Linear`."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.linear import default_bias_init, default_kernel_init
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from jaxmem.head.maths.gradients import Gradient
from jaxmem.head.maths.head import Head
from jaxmem.head.maths.spec import Chunk, Implementation, Layout
from jaxmem.heads.verbs import (
    HeadSharding as HeadSharding,
    HeadVerbs,
    Weights,
    check_options,
    own_gradient,
)

_NO_METADATA: Mapping[str, Any] = MappingProxyType({})
_PLAIN = {
    "precision": None,
    "dot_general": lax.dot_general,
    "preferred_element_type": None,
}


class LMHead(HeadVerbs, nnx.Module):
    """`nnx.Linear` to the vocabulary, with verbs that need no logits.

        logits = h · kernel + bias,   kernel [D, V],   bias [V]

    Its own weights have the names, shapes, dtypes and initial values of `nnx.Linear`,
    so checkpoints are interchangeable. With `tied_to` there is no kernel: each call
    reads the weights of another layer. That is one parameter, whose gradient is the sum
    over its uses.

    Args:
        in_features: D; not needed with tied_to, unless that is a bare parameter.
        out_features: V, padding included; not needed in the same case.
        use_bias: True for a bias of the head's own, False for none. None: True, as for
            nnx.Linear; with tied_to, the bias of that layer, if it has one.
        dtype: dtype of hidden after a cast, and of the logits. None: tied_to's dtype,
            or promoted from hidden and weights, as nnx.Linear does.
        param_dtype: dtype of the head's own weights, and of their gradients, which are
            rounded once from float32 sums.
        kernel_init: initializer of the kernel.
        bias_init: initializer of the bias.
        rngs: source of the initial weights; not needed if there are none.
        kernel_metadata: metadata of the kernel, such as its sharding.
        bias_metadata: metadata of the bias.
        tied_to: an nnx.Embed (embedding [V, D]), an nnx.Linear (kernel [D, V]) or any
            nnx.Param of either shape, whose weights to use.
        softcap, chunk, vocab_size, gradient, implementation, sharding, vocab_groups:
            as in `jaxmem.heads.verbs.HeadVerbs`.

    Raises:
        TypeError: tied_to has another type, sizes or rngs are missing, or dtype is not
            a floating-point type.
        ValueError: sizes disagree with tied_to, or an option is out of range.
        NotImplementedError: tied_to has its own precision or dot_general.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from jaxmem.heads.nnx import LMHead
    >>> head = LMHead(8, 4, kernel_init=nnx.initializers.zeros, rngs=nnx.Rngs(0))
    >>> hidden, labels = jnp.ones((2, 8)), jnp.array([3, -1])
    >>> head.loss(hidden, labels)
    Array(1.3862944, dtype=float32)
    >>> head(hidden).shape
    (2, 4)
    >>> embed = nnx.Embed(4, 8, rngs=nnx.Rngs(0))
    >>> LMHead(tied_to=embed, softcap=30.0).logprobs(hidden, labels).shape
    (2,)
    """

    def __init__(
        self,
        in_features: int | None = None,
        out_features: int | None = None,
        *,
        use_bias: bool | None = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: nnx.Initializer = default_kernel_init,
        bias_init: nnx.Initializer = default_bias_init,
        rngs: nnx.Rngs | None = None,
        kernel_metadata: Mapping[str, Any] = _NO_METADATA,
        bias_metadata: Mapping[str, Any] = _NO_METADATA,
        tied_to: nnx.Embed | nnx.Linear | nnx.Variable | None = None,
        softcap: float | None = None,
        chunk: Chunk = 1024,
        vocab_size: int | None = None,
        gradient: Gradient | None = None,
        implementation: Implementation | None = None,
        sharding: HeadSharding | None = None,
        vocab_groups: int | None = None,
    ):
        depth, columns, layout = _describe(in_features, out_features, tied_to)
        self.in_features, self.out_features = depth, columns
        self.layout: Layout = layout
        self.use_bias = use_bias
        self.dtype, self.param_dtype = dtype, param_dtype
        self.softcap, self.chunk = softcap, chunk
        self.vocab_size, self.implementation = vocab_size, implementation
        self.gradient, self.vocab_groups = own_gradient(gradient), vocab_groups
        self.sharding = sharding
        check_options(self, columns)
        if tied_to is None:
            kernel = kernel_init(_params_key(rngs), (depth, columns), param_dtype)
            self.kernel = nnx.Param(kernel, **kernel_metadata)
        self.tied_to = nnx.data(tied_to)
        self.bias: nnx.Param | None = nnx.data(None)
        if use_bias or (use_bias is None and tied_to is None):
            bias = bias_init(_params_key(rngs), (columns,), param_dtype)
            self.bias = nnx.Param(bias, **bias_metadata)

    def _weights(self, depth: int) -> Weights:
        source = self if self.tied_to is None else self.tied_to
        W, bias, dtype = _read(source)
        if self.bias is not None:
            bias = self.bias[...]
        elif self.use_bias is False:
            bias = None
        dtype = dtype if self.dtype is None else self.dtype
        names = _names(source) if self.sharding else ()
        head = Head(W, bias, self.softcap, self.vocab_size, self.layout)
        return Weights(head, dtype, names)


def _params_key(rngs):
    if rngs is None:
        raise TypeError("rngs must be given, because the head creates its own weights")
    return rngs.params()


def _read(source) -> tuple:
    """Raw (W, bias, dtype) of the layer or parameter that owns the weights."""
    if isinstance(source, nnx.Variable):
        return source[...], None, None
    if isinstance(source, nnx.Embed):
        return source.embedding[...], None, source.dtype
    bias = None if source.bias is None else source.bias[...]
    return source.kernel[...], bias, source.dtype


def _names(source) -> tuple:
    """Mesh axes of the weights' two axes; () if their metadata have none."""
    if not isinstance(source, nnx.Variable):
        is_embed = isinstance(source, nnx.Embed)
        source = source.embedding if is_embed else source.kernel
    specs = nnx.get_partition_spec({"W": source})
    (spec,) = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    return tuple(spec) + (None,) * (2 - len(spec)) if spec else ()


def _describe(in_features, out_features, tied_to) -> tuple[int, int, Layout]:
    """(D, V, layout), from the arguments or from the owner of the weights."""
    given = {"in_features": in_features, "out_features": out_features}
    if tied_to is None or isinstance(tied_to, nnx.Variable):
        for name, size in given.items():
            if not isinstance(size, int) or size < 1:
                raise TypeError(f"{name} must be a positive integer, got {size!r}")
        sizes = in_features, out_features
        return *sizes, "dv" if tied_to is None else _layout(*sizes, tied_to)
    depth, columns, layout = _describe_layer(tied_to)
    for (name, size), actual in zip(given.items(), (depth, columns), strict=True):
        if size not in (None, actual):
            raise ValueError(f"{name} must be {actual}, as in tied_to, got {size!r}")
    return depth, columns, layout


def _layout(depth, columns, parameter) -> Layout:
    if depth == columns or parameter.shape not in ((columns, depth), (depth, columns)):
        raise ValueError(
            f"tied_to must be a parameter of shape {(columns, depth)} or "
            f"{(depth, columns)}, not square, got {parameter.shape}"
        )
    return "vd" if parameter.shape == (columns, depth) else "dv"


def _describe_layer(layer) -> tuple[int, int, Layout]:
    # A subclass that computes something else (LoRA, quantised) would be misread.
    kind = type(layer)
    if isinstance(layer, nnx.Embed) and kind.attend is nnx.Embed.attend:
        return layer.features, layer.num_embeddings, "vd"
    if isinstance(layer, nnx.Linear) and kind.__call__ is nnx.Linear.__call__:
        for name, plain in _PLAIN.items():
            if getattr(layer, name) not in (None, plain):
                raise NotImplementedError(
                    f"tied_to must be a plain nnx.Linear; this one has {name}="
                    f"{getattr(layer, name)!r}, which the head would not follow"
                )
        return layer.in_features, layer.out_features, "dv"
    raise TypeError(
        f"tied_to must be an nnx.Embed, nnx.Linear or nnx.Param, got {kind.__name__}"
    )
