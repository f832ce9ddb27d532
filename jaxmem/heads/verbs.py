"""The methods of a head, shared by every kind of Flax module."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from jaxmem.backends import choose
from jaxmem.core import checks, gradients
from jaxmem.core.gradients import Gradient
from jaxmem.core.head import Head
from jaxmem.core.options import AxisName, Chunk, Implementation
from jaxmem.core.row_stats import TokenStats
from jaxmem.functional import api
from jaxmem.functional.single_pass import token_loss
from jaxmem.functional.support import support_logprobs
from jaxmem.heads.columns import ColumnVerbs
from jaxmem.heads.divergences import DivergenceVerbs
from jaxmem.heads.logits import in_float32, logits
from jaxmem.sharding import parallel


class Weights(NamedTuple):
    """Raw arrays, read from their module before anything is traced."""

    head: Head  # W as stored, and its layout
    dtype: DTypeLike | None  # compute dtype; None: promoted from hidden and weights
    names: tuple = ()  # mesh axes of W's two axes, if its metadata have any


@dataclasses.dataclass(frozen=True)
class HeadSharding:
    """The sharding of a head's verbs; see `jaxmem.sharding.parallel`.

    Attributes:
        mesh: devices; None: those of `jax.set_mesh`.
        tokens: mesh axes that shard hidden and labels.
        vocab: mesh axes that shard the vocabulary; None: those in the weights' metadata
            (of nnx.with_partitioning, of Linen's logical axes).
        W_fsdp: mesh axes along which the axis D of the weights is sharded; None: those
            in the weights' metadata.
    """

    mesh: Mesh | None = None
    tokens: AxisName | PartitionSpec | None = None
    vocab: AxisName | None = None
    W_fsdp: AxisName | None = None

    def apply(self, verb: Callable, weights: Weights) -> Callable:
        """Return the verb on this mesh, of the head with these weights."""
        mesh = self.mesh or jax.sharding.get_abstract_mesh()
        if mesh.empty:
            raise ValueError(
                "sharding.mesh must be given where jax.set_mesh has named none"
            )
        names = weights.names[:: 1 if weights.head.layout == "vd" else -1]
        vocab, W_fsdp = names or (None, None)
        return parallel(
            verb,
            mesh,
            tokens=self.tokens,
            vocab=vocab if self.vocab is None else self.vocab,
            W_fsdp=W_fsdp if self.W_fsdp is None else self.W_fsdp,
        )


class HeadVerbs(ColumnVerbs, DivergenceVerbs):
    """Logits, and the verbs that need none, for a module with head weights.

    A subclass finds its arrays in `_weights`; the options are attributes.
    """

    softcap: float | None
    chunk: Chunk
    vocab_size: int | None
    gradient: Gradient | None
    implementation: Implementation | None
    sharding: HeadSharding | None
    vocab_groups: int | None

    def _weights(self, depth: int) -> Weights:
        raise NotImplementedError

    def __call__(self, hidden: ArrayLike) -> jax.Array:
        """Return logits, for sampling: the one method that builds them.

            z = h W + bias,   then softcap·tanh(z / softcap) if there is a softcap

        Args:
            hidden: final hidden states [..., D].

        Returns:
            [..., V] in the compute dtype, equal to those of the plain Flax layer if
            there is no softcap; -inf in columns from vocab_size on.

        **Memory**: the result, tokens · V.
        """
        hidden, weights = self._prepare(hidden)
        return logits(hidden, weights.head)

    def float_logits(self, hidden: ArrayLike) -> jax.Array:
        """Return logits in float32, equal to those that the other verbs never store.

        `__call__` rounds them to the compute dtype; a policy that is sampled from
        rounded logits differs slightly from the trained one.

        Args:
            hidden: final hidden states [..., D].

        Returns:
            float32 [..., V].

        **Memory**: 4 · tokens · V.
        """
        hidden, weights = self._prepare(hidden)
        return in_float32(hidden, weights.head)

    def logprobs(
        self, hidden: ArrayLike, labels: ArrayLike, **options: Any
    ) -> jax.Array:
        """Return the log-probability of each label; see `jaxmem.logprobs`.

            out = z[label] - ln Σ_v e^(z_v),   z = head(h) / temperature       (nats)

        Args:
            hidden: final hidden states [..., D].
            labels: token ids [...]; negative marks padding.
            options: of the function, such as `where`, `key` and `gradient`
                (None: the head's own).

        Returns:
            float32 [...]; 0, with a gradient of 0, where masked.

        **Memory**: that of `jaxmem.logprobs`, with the head's chunk.
        """
        return self._run(api.logprobs, hidden, labels, **self._with_own(options))

    def token_stats(
        self, hidden: ArrayLike, labels: ArrayLike, **options: Any
    ) -> TokenStats:
        """Return all statistics that one pass computes; see `jaxmem.token_stats`.

        Args:
            hidden: final hidden states [..., D].
            labels: token ids [...]; negative marks padding.
            options: of the function, such as `where`, `key` and `gradient`
                (None: the head's own).

        Returns:
            `TokenStats(logprob, entropy, logsumexp, sum_pi_squared, is_argmax)` of
            labels' shape; 0 (False) where masked.

        **Memory**: that of `jaxmem.token_stats`, with the head's chunk.
        """
        return self._run(api.token_stats, hidden, labels, **self._with_own(options))

    def entropy(self, hidden: ArrayLike, **options: Any) -> jax.Array:
        """Return the entropy of each token's softmax; see `jaxmem.entropy`.

            out = -Σ_v p_v ln p_v,   p = softmax(head(h) / temperature)        (nats)

        Args:
            hidden: final hidden states [..., D].
            options: of the function, such as `where`, `key` and `gradient`
                (None: the head's own).

        Returns:
            float32 [...]; 0 where masked.

        **Memory**: that of `jaxmem.entropy`, with the head's chunk.
        """
        return self._run(api.entropy, hidden, **self._with_own(options))

    def loss(
        self,
        hidden: ArrayLike,
        labels: ArrayLike,
        where: ArrayLike | None = None,
        normalizer: ArrayLike | None = None,
        z_loss: float = 0.0,
        gradient: Gradient | None = None,
        key: jax.Array | None = None,
    ) -> jax.Array:
        """Return the mean cross-entropy over the unmasked tokens.

            out = Σ_t (-logprob_t + z_loss · logsumexp_t²) / normalizer        (nats)

        Args:
            hidden: final hidden states [..., D].
            labels: the next token ids [...]; negative marks padding.
            where: booleans that broadcast to labels; False masks a token.
            normalizer: divisor of the sum, for instance the token count of the global
                batch; 0 counts as 1. None: the number of tokens that are not masked
                here.
            z_loss: weight of the squared logsumexp, which keeps logits from drifting.
            gradient: as in `jaxmem.logprobs`; None: the head's own.
            key: PRNG key of the samples of `jaxmem.Sample(k)`.

        Returns:
            float32 scalar; 0, with gradients of 0, if every token is masked.

        **Memory**: that of `jaxmem.token_loss`, with the head's chunk. Loss and
        gradients are computed in one pass, with three matrix products, or two if W is
        not differentiated.

        Raises:
            TypeError, ValueError: as `jaxmem.logprobs`; or a normalizer or z_loss is
            not a
                scalar, or is negative.

        Reference: the z-loss is that of Chowdhery et al., "PaLM", 2022,
        arXiv:2204.02311, section 5.
        """
        _check_scalar("z_loss", z_loss)
        if normalizer is not None:
            _check_scalar("normalizer", normalizer)
        if _is_zero(z_loss):
            loss_fn, per_token = _cross_entropy, ()
        else:  # an operand of loss_fn, because it may be traced and differentiated
            loss_fn = _cross_entropy_and_z_loss
            per_token = (jnp.broadcast_to(jnp.asarray(z_loss), jnp.shape(labels)),)
        return self.token_loss(
            loss_fn, hidden, labels, *per_token, where=where, normalizer=normalizer,
            gradient=gradient, key=key,
        )[0]  # fmt: skip

    def token_loss(
        self,
        loss_fn: Callable,
        hidden: ArrayLike,
        labels: ArrayLike,
        *per_token: ArrayLike,
        **options: Any,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return a loss of each token's statistics, with its gradient in the same pass.

            loss = Σ_t loss_fn(stats_t, *per_token_t) / normalizer

        Args:
            loss_fn: see `jaxmem.token_loss`.
            hidden: final hidden states [..., D].
            labels: token ids [...]; negative marks padding.
            per_token: further arguments of loss_fn, [...] or [..., K] each.
            options: of the function, such as `where`, `key` and `gradient`
                (None: the head's own).

        Returns:
            (loss, metrics): a float32 scalar, and the metrics that loss_fn returns,
            [...].

        **Memory**: that of `jaxmem.token_loss`, with the head's chunk.
        """
        verb = functools.partial(token_loss, loss_fn)
        return self._run(verb, hidden, labels, *per_token, **self._with_own(options))

    def support_logprobs(
        self,
        hidden: ArrayLike,
        labels: ArrayLike,
        support_ids: ArrayLike,
        **options: Any,
    ) -> jax.Array:
        """Return the log-probability of each label within its sampling support.

            out = z[label] - ln Σ_(v in support) e^(z_v)                       (nats)

        Args:
            hidden: final hidden states [..., D].
            labels: token ids [...]; negative marks padding.
            support_ids: the support of each token, [..., K], padded by negative ids; or
                with offsets those of all tokens, [M].
            options: of the function, such as `where`, `offsets` and `max_ids`.

        Returns:
            float32 [...]; 0 where masked.

        **Memory**: that of `jaxmem.support_logprobs`, with chunk="auto".
        """
        # There is one implementation, whichever runs the other verbs.
        options = {"chunk": "auto", "implementation": None} | options
        return self._run(support_logprobs, hidden, labels, support_ids, **options)

    def _with_own(self, options):
        """The options, with the head's own gradient if none is named."""
        gradient = options.get("gradient") or self.gradient
        return {"vocab_groups": self.vocab_groups} | options | {"gradient": gradient}

    def _run(self, verb, hidden, *per_token, **keywords):
        hidden, weights = self._prepare(hidden)
        options = {
            "chunk": self.chunk,
            "implementation": self.implementation,
        }
        if self.sharding:
            verb = self.sharding.apply(verb, weights)
        return verb(hidden, weights.head, *per_token, **options | keywords)

    def _prepare(self, hidden) -> tuple[jax.Array, Weights]:
        """Hidden in the compute dtype, and the weights as they are stored."""
        hidden = checks.as_array("hidden", hidden)
        checks.check_hidden(hidden)
        weights = self._weights(hidden.shape[-1])
        depth = weights.head.W.shape[1 if weights.head.layout == "vd" else 0]
        if hidden.shape[-1] != depth:
            raise ValueError(
                f"hidden must be [..., {depth}], as the head's weights are, got shape "
                f"{hidden.shape}"
            )
        return jnp.asarray(hidden).astype(_compute_dtype(hidden, weights)), weights


def check_options(
    columns: int, dtype: Any, softcap: Any, chunk: Any, vocab_size: Any,
    implementation: Any,
) -> None:  # fmt: skip
    """Raise, when a head is constructed, for options that every call would reject."""
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"dtype must be a floating type, got {jnp.dtype(dtype)}")
    checks.check_softcap(softcap)
    checks.check_chunk(chunk, tokens=1, columns=columns)
    checks.check_vocab_size(vocab_size, columns)
    choose.check(implementation)


def check_division(gradient: Any, vocab_groups: Any) -> None:
    """Raise, when a head is constructed, for numbers that every call would reject."""
    gradients.check(gradient)
    # `HeadSharding` pads the columns; the verbs check those of a head without it.
    checks.check_vocab_groups(vocab_groups, columns=0, n_shards=1)


def _compute_dtype(hidden, weights):
    if weights.dtype is not None:
        return weights.dtype
    arrays = [hidden, *jax.tree.leaves(weights.head)]
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*arrays)


def _cross_entropy(stats):
    return -stats.logprob


def _cross_entropy_and_z_loss(stats, weight):
    return weight.astype(stats.logsumexp.dtype) * stats.logsumexp**2 - stats.logprob


def _check_scalar(name, value):
    if np.shape(value) != ():
        raise ValueError(f"{name} must be a scalar, got shape {np.shape(value)}")
    if not isinstance(value, Tracer) and not np.asarray(value) >= 0:
        raise ValueError(f"{name} must not be negative, got {value}")


def _is_zero(value):
    return not isinstance(value, Tracer) and np.asarray(value) == 0
