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

from jaxmem.head.backends import choose
from jaxmem.head.maths import checks, gradients
from jaxmem.head.maths.gradients import Gradient
from jaxmem.head.maths.head import Head
from jaxmem.head.maths.recorded import RecordedEntries
from jaxmem.head.maths.row_stats import TokenStats
from jaxmem.head.maths.spec import AxisName, Chunk, Implementation
from jaxmem.head.verbs import api
from jaxmem.head.verbs.divergence import divergence
from jaxmem.head.verbs.divergence_loss import divergence_loss
from jaxmem.head.verbs.draws import sample_ids
from jaxmem.head.verbs.kinds import Kind
from jaxmem.head.verbs.recording import record_entries
from jaxmem.head.verbs.selected import selected_logprobs
from jaxmem.head.verbs.single_pass import token_loss
from jaxmem.head.verbs.support import support_logprobs
from jaxmem.head.verbs.teacher import Teacher
from jaxmem.head.verbs.topk import TopK, topk
from jaxmem.heads.materialised import in_float32, logits
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
        mesh: devices; None: the mesh of `jax.set_mesh`.
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
                "sharding.mesh must be given, because jax.set_mesh has set no mesh"
            )
        names = weights.names[:: 1 if weights.head.layout == "vd" else -1]
        vocab, W_fsdp = names or (None, None)
        vocab = vocab if self.vocab is None else self.vocab
        W_fsdp = W_fsdp if self.W_fsdp is None else self.W_fsdp
        return parallel(verb, mesh, tokens=self.tokens, vocab=vocab, W_fsdp=W_fsdp)


class HeadVerbs:
    """Logits, and the verbs that need none, for a module with head weights.

    A verb is the function of jaxmem with its name, of hidden states [..., D] and of
    this head: it takes that function's other arguments and options, returns the same in
    the same memory, and raises its errors. Options that are not given are those of the
    module; a verb that has one implementation runs it, whichever the module names. A
    subclass finds its arrays in `_weights`.

    Attributes:
        softcap: caps logits at ±softcap by tanh.
        chunk: tokens whose logits may exist at once; None for all, or "auto".
        vocab_size: logical vocabulary if V is padded; later columns have p = 0.
        gradient: as in `jaxmem.logprobs`, for `logprobs`, `token_stats`, `entropy`,
            `loss` and `token_loss`.
        implementation: as in `jaxmem.logprobs`.
        sharding: sharding of the verbs on a mesh of devices; None: one device, or as
            XLA partitions them.
        vocab_groups: as in `jaxmem.logprobs`, for `logprobs`, `token_stats`, `entropy`,
            `loss` and `token_loss`; None: the bits depend on the vocabulary's shards.
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
        """Return logits [..., V], for sampling, in the compute dtype.

            z = h W + bias,   then softcap·tanh(z / softcap) if there is a softcap

        They are equal to those of the plain Flax layer if there is no softcap; -inf in
        columns from vocab_size on.
        """
        hidden, weights = self._prepare(hidden)
        return logits(hidden, weights.head)

    def float_logits(self, hidden: ArrayLike) -> jax.Array:
        """Return logits in float32, equal to those that the other verbs never store.

        `__call__` rounds them to the compute dtype; a policy that is sampled from
        rounded logits differs slightly from the trained one.
        """
        hidden, weights = self._prepare(hidden)
        return in_float32(hidden, weights.head)

    def logprobs(
        self, hidden: ArrayLike, labels: ArrayLike, **options: Any
    ) -> jax.Array:
        """Return the log-probability of each label; see `jaxmem.logprobs`."""
        return self._run(api.logprobs, hidden, labels, **self._with_own(options))

    def token_stats(
        self, hidden: ArrayLike, labels: ArrayLike, **options: Any
    ) -> TokenStats:
        """Return all statistics that one pass computes; see `jaxmem.token_stats`."""
        return self._run(api.token_stats, hidden, labels, **self._with_own(options))

    def entropy(self, hidden: ArrayLike, **options: Any) -> jax.Array:
        """Return the entropy of each token's softmax; see `jaxmem.entropy`."""
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
        """Return the mean cross-entropy over the unmasked tokens, by `token_loss`.

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

        Raises:
            TypeError, ValueError: as `jaxmem.logprobs`; or a normalizer or z_loss is
                not a scalar, or is negative.

        Reference: the z-loss is from Chowdhery et al., "PaLM", 2022,
        arXiv:2204.02311, section 5.
        """
        _check_scalar("z_loss", z_loss)
        if normalizer is not None:
            _check_scalar("normalizer", normalizer)
        if not isinstance(z_loss, Tracer) and np.asarray(z_loss) == 0:
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
        """Return a loss of each token's statistics; see `jaxmem.token_loss`."""
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

        See `jaxmem.support_logprobs`; the chunk is "auto" if none is given.
        """
        options = {"chunk": "auto"} | options
        return self._run_only(support_logprobs, hidden, labels, support_ids, **options)

    def topk(self, hidden: ArrayLike, k: int, **options: Any) -> TopK:
        """Return the k most likely ids of each token; see `jaxmem.topk`."""
        return self._run_only(topk, hidden, k, **options)

    def sample_ids(
        self, hidden: ArrayLike, n: int, key: jax.Array, **options: Any
    ) -> jax.Array:
        """Return n ids drawn from each token's softmax; see `jaxmem.sample_ids`."""
        return self._run_only(sample_ids, hidden, n, key, **options)

    def record_entries(
        self,
        hidden: ArrayLike,
        labels: ArrayLike,
        k: int,
        key: jax.Array,
        **options: Any,
    ) -> RecordedEntries:
        """Return logits of k columns of each token; see `jaxmem.record_entries`."""
        return self._run(record_entries, hidden, labels, k, key, **options)

    def selected_logprobs(
        self, hidden: ArrayLike, ids: ArrayLike, **options: Any
    ) -> jax.Array:
        """Return log-probabilities of given ids; see `jaxmem.selected_logprobs`."""
        return self._run_only(selected_logprobs, hidden, ids, **options)

    def teacher(
        self, hidden: ArrayLike, temperature: ArrayLike | None = None
    ) -> Teacher:
        """Return this head, of these hidden states, as a target of divergences.

        The temperature is as in `jaxmem.Teacher`.
        """
        hidden, weights = self._prepare(hidden)
        return Teacher(hidden, weights.head, temperature)

    def divergence(self, hidden: ArrayLike, target: Kind, **options: Any) -> jax.Array:
        """Return the divergence of this head from a target; see `jaxmem.divergence`.

        >>> import jax.numpy as jnp, jaxmem
        >>> from flax import nnx
        >>> from jaxmem.heads.nnx import LMHead
        >>> student, teacher = (LMHead(d, 4, rngs=nnx.Rngs(d)) for d in (8, 16))
        >>> target = jaxmem.ReverseKL(teacher.teacher(jnp.ones((2, 16))))
        >>> student.divergence(jnp.ones((2, 8)), target).shape
        (2,)
        """
        return self._run_only(divergence, hidden, target, **options)

    def divergence_loss(
        self,
        loss_fn: Callable,
        hidden: ArrayLike,
        labels: ArrayLike,
        target: Kind,
        *per_token: ArrayLike,
        **options: Any,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return a loss with each token's divergence; see `jaxmem.divergence_loss`."""
        verb = functools.partial(divergence_loss, loss_fn)
        return self._run_only(verb, hidden, labels, target, *per_token, **options)

    def _with_own(self, options):
        """The options, with the head's own gradient if none is named."""
        gradient = options.get("gradient") or self.gradient
        return {"vocab_groups": self.vocab_groups} | options | {"gradient": gradient}

    def _run_only(self, verb, hidden, *per_token, **options):
        """Run a verb that has one implementation."""
        options = {"implementation": None} | options
        return self._run(verb, hidden, *per_token, **options)

    def _run(self, verb, hidden, *per_token, **options):
        hidden, weights = self._prepare(hidden)
        if self.sharding:
            verb = self.sharding.apply(verb, weights)
        options = {"chunk": self.chunk, "implementation": self.implementation} | options
        return verb(hidden, weights.head, *per_token, **options)

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
        dtype = weights.dtype
        if dtype is None:
            with jax.numpy_dtype_promotion("standard"):
                dtype = jnp.result_type(hidden, *jax.tree.leaves(weights.head))
        return jnp.asarray(hidden).astype(dtype), weights


def check_options(head: Any, columns: int) -> None:
    """Raise, when a head is constructed, for options that every call would reject."""
    if head.dtype is not None and not jnp.issubdtype(head.dtype, jnp.floating):
        raise TypeError(f"dtype must be a floating type, got {jnp.dtype(head.dtype)}")
    checks.check_softcap(head.softcap)
    checks.check_chunk(head.chunk, tokens=1, columns=columns)
    checks.check_vocab_size(head.vocab_size, columns)
    choose.check(head.implementation)
    own_gradient(head.gradient)
    # `HeadSharding` pads the columns; the verbs check those of a head without it.
    checks.check_vocab_groups(head.vocab_groups, columns=0, n_shards=1)


def own_gradient(gradient: Gradient | None) -> Gradient | None:
    """The gradient of a head's calls that name none; an error for recorded entries."""
    if isinstance(gradients.check(gradient), gradients.Recorded):
        raise ValueError(
            "gradient=Recorded(entries) must be given to logprobs, token_stats, loss "
            "or token_loss, because entries are of one call's tokens"
        )
    return gradient


def _cross_entropy(stats):
    return -stats.logprob


def _cross_entropy_and_z_loss(stats, weight):
    return weight.astype(stats.logsumexp.dtype) * stats.logsumexp**2 - stats.logprob


def _check_scalar(name, value):
    if np.shape(value) != ():
        raise ValueError(f"{name} must be a scalar, got shape {np.shape(value)}")
    if not isinstance(value, Tracer) and not np.asarray(value) >= 0:
        raise ValueError(f"{name} must not be negative, got {value}")
