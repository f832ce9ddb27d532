"""A language-model head for Flax NNX, in the place of `nnx.Linear`."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.linear import default_bias_init, default_kernel_init
from jax.typing import DTypeLike

from jaxmem._spec import Chunk
from jaxmem.heads._verbs import HeadVerbs, Weights, check_options

_NO_METADATA: Mapping[str, Any] = MappingProxyType({})


class LMHead(HeadVerbs, nnx.Module):
    """`nnx.Linear` to the vocabulary that also knows how to do without logits.

        logits = h · kernel + bias,   kernel [D, V],   bias [V]

    Own weights have the names, shapes, types and initial values of `nnx.Linear`, so
    checkpoints load either way. With `tied_to` there is no kernel: the head reads the
    weights of another layer at each call, one parameter, whose gradient is the sum of
    its uses.

    Args:
        in_features: D; not needed with tied_to.
        out_features: V, padding included; not needed with tied_to.
        use_bias: whether the head has a bias of its own. None: yes, as nnx.Linear; no
            with tied_to, where an nnx.Linear's bias is read with its kernel.
        dtype: type hidden is cast to, and of the logits. None: that of tied_to, or
            promoted from hidden and weights, as nnx.Linear does.
        param_dtype: type of the head's own weights; gradients come back in it, rounded
            once from float32 sums.
        kernel_init: initializer of the kernel.
        bias_init: initializer of the bias.
        rngs: source of the initial weights; not needed where there are none.
        kernel_metadata: metadata of the kernel, such as its sharding.
        bias_metadata: metadata of the bias.
        tied_to: an nnx.Embed (embedding [V, D]) or nnx.Linear (kernel [D, V]) whose
            weights to use.
        softcap: caps logits at ±softcap by tanh.
        chunk: tokens whose logits may be alive at once; None for all, or "auto".
        vocab_size: logical vocabulary when V is padded; later entries get p = 0.
        implementation: as in `jaxmem.logprobs`.

    Raises:
        TypeError: tied_to of another type, sizes or rngs missing, an integer dtype.
        ValueError: sizes that disagree with tied_to, an option out of range.

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
        tied_to: nnx.Embed | nnx.Linear | None = None,
        softcap: float | None = None,
        chunk: Chunk = 1024,
        vocab_size: int | None = None,
        implementation: str | None = None,
    ):
        sizes = _sizes(in_features, out_features, tied_to)
        check_options(sizes[1], dtype, softcap, chunk, vocab_size, implementation)
        use_bias = tied_to is None if use_bias is None else use_bias
        if rngs is None and (use_bias or tied_to is None):
            raise TypeError("rngs must be given: the head has weights of its own")
        if tied_to is None:
            kernel = kernel_init(rngs.params(), sizes, param_dtype)
            self.kernel = nnx.Param(kernel, **kernel_metadata)
        self.tied_to = nnx.data(tied_to)
        self.bias = nnx.data(None)
        if use_bias:
            bias = bias_init(rngs.params(), sizes[1:], param_dtype)
            self.bias = nnx.Param(bias, **bias_metadata)
        self.in_features, self.out_features = sizes
        self.use_bias = use_bias
        self.dtype, self.param_dtype = dtype, param_dtype
        self.softcap, self.chunk = softcap, chunk
        self.vocab_size, self.implementation = vocab_size, implementation

    def _weights(self, depth: int) -> Weights:
        source = self if self.tied_to is None else self.tied_to
        bias = self.bias if self.use_bias else getattr(source, "bias", None)
        bias = None if bias is None else bias[...]
        dtype = source.dtype if self.dtype is None else self.dtype
        if isinstance(source, nnx.Embed):
            return Weights(source.embedding[...], "vd", bias, dtype)
        return Weights(source.kernel[...], "dv", bias, dtype)


def _sizes(in_features, out_features, tied_to) -> tuple[int, int]:
    """(D, V), given or read off the layer that owns the weights."""
    if tied_to is None:
        given = {"in_features": in_features, "out_features": out_features}
        for name, size in given.items():
            if not isinstance(size, int) or size < 1:
                raise TypeError(f"{name} must be a positive integer, got {size!r}")
        return in_features, out_features
    if isinstance(tied_to, nnx.Embed):
        sizes = tied_to.features, tied_to.num_embeddings
    elif isinstance(tied_to, nnx.Linear):
        sizes = tied_to.in_features, tied_to.out_features
    else:
        raise TypeError(
            f"tied_to must be an nnx.Embed or nnx.Linear, got {type(tied_to).__name__}"
        )
    if in_features not in (None, sizes[0]) or out_features not in (None, sizes[1]):
        raise ValueError(
            f"in_features, out_features must be left out or {sizes}, the sizes of "
            f"tied_to, got {(in_features, out_features)}"
        )
    return sizes
