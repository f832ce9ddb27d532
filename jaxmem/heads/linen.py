"""A language-model head for Flax Linen that replaces `nn.Dense`."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen import spmd
from flax.linen.linear import default_kernel_init
from jax.typing import DTypeLike

from jaxmem.head.maths.gradients import Gradient
from jaxmem.head.maths.head import Head
from jaxmem.head.maths.spec import Chunk, Implementation
from jaxmem.heads.verbs import (
    HeadSharding as HeadSharding,
    HeadVerbs,
    Weights,
    check_options,
)


class LMHead(HeadVerbs, nn.Module):
    """`nn.Dense` to the vocabulary, with verbs that need no logits.

        logits = h · kernel + bias,   kernel [D, V],   bias [V]

    Its own weights have the names, shapes, dtypes and initial values of `nn.Dense`, so
    checkpoints are interchangeable. With `tied_to`, an `nn.Embed` of the parent, there
    is no kernel: the head reads the embedding in the parent's scope. That is one
    parameter, whose gradient is the sum over its uses. Every method creates or finds
    the same parameters: `head.apply(variables, hidden, labels, method="loss")`.

    Args:
        features: V, padding included; not needed with tied_to.
        use_bias: True if the head has its own bias. None: it has one, as nn.Dense, but
            not with tied_to.
        dtype: dtype of hidden after a cast, and of the logits. None: tied_to's dtype,
            or promoted from hidden and weights, as nn.Dense does.
        param_dtype: dtype of the head's own weights, and of their gradients, which are
            rounded once from float32 sums.
        kernel_init: initializer of the kernel.
        bias_init: initializer of the bias.
        tied_to: an nn.Embed (embedding [V, D]) whose weights to use.
        softcap, chunk, vocab_size, gradient, implementation, sharding, vocab_groups:
            as in `jaxmem.heads.verbs.HeadVerbs`.

    Raises:
        TypeError: tied_to has another type, features is missing, or dtype is not a
            floating-point type.
        ValueError: features disagrees with tied_to, or an option is out of range.

    >>> import jax, jax.numpy as jnp
    >>> from flax import linen as nn
    >>> from jaxmem.heads.linen import LMHead
    >>> head = LMHead(4, kernel_init=nn.initializers.zeros)
    >>> hidden, labels = jnp.ones((2, 8)), jnp.array([3, -1])
    >>> variables = head.init(jax.random.key(0), hidden)
    >>> jax.tree.map(jnp.shape, variables)
    {'params': {'bias': (4,), 'kernel': (8, 4)}}
    >>> head.apply(variables, hidden, labels, method="loss")
    Array(1.3862944, dtype=float32)
    """

    features: int | None = None
    use_bias: bool | None = None
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    kernel_init: nn.initializers.Initializer = default_kernel_init
    bias_init: nn.initializers.Initializer = nn.initializers.zeros_init()
    tied_to: nn.Embed | None = None
    softcap: float | None = None
    chunk: Chunk = 1024
    vocab_size: int | None = None
    gradient: Gradient | None = None
    implementation: Implementation | None = None
    sharding: HeadSharding | None = None
    vocab_groups: int | None = None

    def __post_init__(self):
        """Raise for options that no call could use."""
        check_options(self, _columns(self.features, self.tied_to))
        super().__post_init__()

    # Linen names, binds and transforms only methods in the class body.
    __call__ = HeadVerbs.__call__
    logprobs = HeadVerbs.logprobs
    token_stats = HeadVerbs.token_stats
    entropy = HeadVerbs.entropy
    float_logits = HeadVerbs.float_logits
    loss = HeadVerbs.loss
    token_loss = HeadVerbs.token_loss
    support_logprobs = HeadVerbs.support_logprobs
    topk = HeadVerbs.topk
    sample_ids = HeadVerbs.sample_ids
    record_entries = HeadVerbs.record_entries
    selected_logprobs = HeadVerbs.selected_logprobs
    teacher = HeadVerbs.teacher
    divergence = HeadVerbs.divergence
    divergence_loss = HeadVerbs.divergence_loss

    @nn.compact
    def _weights(self, depth: int) -> Weights:
        columns = _columns(self.features, self.tied_to)
        if self.tied_to is None:
            shape, dtype = (depth, columns), None
            init, stored = self.kernel_init, self.param_dtype
            W = self.param("kernel", init, shape, stored)
        else:
            W, dtype, shape = self.tied_to.embedding, self.tied_to.dtype, None
            init, stored = self.tied_to.embedding_init, self.tied_to.param_dtype
        names = _names(init, shape or W.shape, stored) if self.sharding else ()
        bias = None
        if self.use_bias or (self.use_bias is None and self.tied_to is None):
            bias = self.param("bias", self.bias_init, (columns,), self.param_dtype)
        dtype = dtype if self.dtype is None else self.dtype
        layout = "dv" if self.tied_to is None else "vd"
        return Weights(
            Head(W, bias, self.softcap, self.vocab_size, layout), dtype, names
        )


def _names(init, shape, dtype) -> tuple:
    """Mesh axes of the weights' two axes; () if their initializer names none.

    Unboxed variables no longer carry these names.
    """
    weights = jax.eval_shape(lambda: init(jax.random.key(0), shape, dtype))
    if isinstance(weights, nn.LogicallyPartitioned):
        return tuple(spmd.logical_to_mesh_axes(weights.names, weights.rules) or ())
    return tuple(weights.names) if isinstance(weights, nn.Partitioned) else ()


def _columns(features, tied_to) -> int:
    """V, from the argument or from the layer that owns the weights."""
    if tied_to is None:
        if not isinstance(features, int) or features < 1:
            raise TypeError(f"features must be a positive integer, got {features!r}")
        return features
    if not isinstance(tied_to, nn.Embed):
        raise TypeError(f"tied_to must be an nn.Embed, got {type(tied_to).__name__}")
    if features not in (None, tied_to.num_embeddings):
        raise ValueError(
            f"features must be left out or {tied_to.num_embeddings}, the size of "
            f"tied_to, got {features}"
        )
    return tied_to.num_embeddings
