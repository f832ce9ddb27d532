"""Logits and one-hot labels for a distillation loss, without an array of either.

A trainer's own functions call the model and build the labels. In them,
`DeferredLogits` and `OneHot` replace arrays [..., V]: both can be indexed along tokens,
and one-hot labels can be multiplied by a mask. Any other use raises, and the trainer's
own loss is computed instead.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jaxmem.head.maths.head import Head
from jaxmem.head.verbs import selected, topk
from jaxmem.head.verbs.column_targets import Columns
from jaxmem.head.verbs.divergence import divergence
from jaxmem.head.verbs.divergence_loss import divergence_loss
from jaxmem.head.verbs.kinds import ForwardKL
from jaxmem.head.verbs.teacher import Teacher
from jaxmem.integrations._head import ModelHead, Options, scores


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["hidden", "head"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True, eq=False)
class DeferredLogits:
    """Logits [..., V] that are not computed: hidden states [..., D] and their head."""

    hidden: jax.Array
    head: ModelHead

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array that it stands for."""
        return (*self.hidden.shape[:-1], self.head.n_columns)

    def __getitem__(self, index: Any) -> "DeferredLogits":
        index = _token_index(index, self.hidden.ndim)
        return dataclasses.replace(self, hidden=self.hidden[index])

    def astype(self, dtype: DTypeLike) -> "DeferredLogits":
        """Itself: the logits are float32."""
        if jnp.dtype(dtype) != jnp.float32:
            raise TypeError(f"logits are cast to {jnp.dtype(dtype)}")
        return self

    def constant(self) -> "DeferredLogits":
        """Return the logits without a gradient."""
        return jax.tree.map(jax.lax.stop_gradient, self)

    def as_teacher(self, temperature: ArrayLike) -> ForwardKL:
        """A target whose logits are divided by the temperature besides."""
        return ForwardKL(Teacher(*self.operands, temperature * self.head.temperature))

    @property
    def operands(self) -> tuple[jax.Array, Head]:
        """Hidden states in the type of the product, and the head."""
        return self.hidden.astype(self.head.dtype), self.head.head

    def array(self) -> jax.Array:
        """The logits, float32 [..., V]."""
        head, dtype = self.head.head, self.head.dtype
        W = jnp.asarray(head.W, dtype)
        z = self.hidden.astype(dtype) @ (W.T if head.layout == "vd" else W)
        z = z.astype(jnp.float32)
        z = z if head.bias is None else z + head.bias
        z = head.softcap * jnp.tanh(z / head.softcap) if head.softcap else z
        return z / self.head.temperature


@dataclasses.dataclass(frozen=True, eq=False)
class OneHot:
    """Rows weight · one_hot(id): weights and ids [...] that stand for [..., n]."""

    ids: jax.Array
    weights: jax.Array
    n: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array that it stands for."""
        return (*self.ids.shape, self.n)

    @property
    def dtype(self) -> DTypeLike:
        """The dtype of the array that it stands for."""
        return self.weights.dtype

    def __getitem__(self, index: Any) -> "OneHot":
        index = _token_index(index, self.ids.ndim + 1)
        return OneHot(self.ids[index], self.weights[index], self.n)

    def __mul__(self, other: ArrayLike) -> "OneHot":
        other = jnp.asarray(other)
        if other.ndim and other.shape[-1] != 1:
            raise TypeError("one-hot labels are multiplied by more than a mask")
        weights = self.weights * (other[..., 0] if other.ndim else other)
        if weights.shape != self.ids.shape:
            raise TypeError("one-hot labels are broadcast by a product")
        return OneHot(self.ids, weights, self.n)

    __rmul__ = __mul__

    @property
    def counted(self) -> jax.Array:
        """Weights [...], which are 0 where a row is 0 because its id is no token."""
        return jnp.where((self.ids >= 0) & (self.ids < self.n), self.weights, 0)

    def array(self) -> jax.Array:
        """The labels [..., n]."""
        return jax.nn.one_hot(self.ids, self.n) * self.weights[..., None]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.array(), dtype)


def _token_index(index: Any, ndim: int) -> tuple:
    """`index` for all `ndim` axes but the last, which it must not select along."""
    index = index if isinstance(index, tuple) else (index,)
    if not all(i is Ellipsis or isinstance(i, (int, slice)) for i in index):
        raise TypeError(f"[..., V] is indexed by {[type(i).__name__ for i in index]}")
    ellipses = [i for i, part in enumerate(index) if part is Ellipsis]
    if ellipses:
        whole = (slice(None),) * (ndim - len(index) + 1)
        first = ellipses[0]
        index = (*index[:first], *whole, *index[first + 1 :])
    if len(index) == ndim and index[-1] != slice(None):
        raise TypeError("[..., V] is indexed along the vocabulary")
    return index[: ndim - 1]


def cross_entropy(
    logits: DeferredLogits, labels: OneHot, options: Options
) -> jax.Array:
    """-Σ_v labels_v ln softmax(logits)_v per token: float32 [...]."""
    counted = labels.counted
    logps, _, _ = scores(
        logits.hidden, logits.head, labels.ids, options, entropy=False,
        where=counted != 0,
    )  # fmt: skip
    return -counted * logps


def forward_kl(
    student: DeferredLogits,
    teacher: DeferredLogits,
    temperature: ArrayLike,
    options: Options,
    where: jax.Array | None = None,
) -> jax.Array:
    """KL(teacher ‖ student) per token: float32 [...], 0 where masked.

    The temperature divides the logits of both, after their softcaps; the teacher is a
    constant.
    """
    return divergence(
        *student.operands, teacher.as_teacher(temperature), where=where,
        temperature=temperature * student.head.temperature, **options.keywords,
    )  # fmt: skip


def forward_kl_and_cross_entropy(
    student: DeferredLogits,
    teacher: DeferredLogits,
    labels: OneHot,
    temperature: ArrayLike,
    weights: tuple[ArrayLike, ArrayLike],
    options: Options,
    where: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A weighted mean of `forward_kl` and `cross_entropy`, in one pass over both heads.

    The temperature is that of the divergence; the cross-entropy is at the student's
    own. Returns the mean over the tokens that are not masked, and both terms per token,
    [...], as constants that are 0 where masked.
    """
    own, counted = student.head.temperature, labels.counted

    def loss_fn(stats, kl, counted):
        # A row of zeros has no label: whatever is selected for it does not count.
        ce = jnp.where(counted != 0, -counted * stats.logprob, 0)
        return weights[0] * kl + weights[1] * ce, {"kl": kl, "ce": ce}

    same = isinstance(temperature, (int, float)) and temperature == 1
    loss, terms = divergence_loss(
        loss_fn, *student.operands, jnp.where(counted != 0, labels.ids, 0),
        teacher.as_teacher(temperature), counted, where=where,
        temperature=temperature * own,
        statistics_temperature=None if same else own, **options.keywords,
    )  # fmt: skip
    return loss, terms["kl"], terms["ce"]


def forward_kl_of_largest(
    student: DeferredLogits,
    teacher: DeferredLogits,
    k: int,
    temperature: ArrayLike,
    options: Options,
) -> jax.Array:
    """`forward_kl` within the teacher's k largest columns, where both are renormalised.

    Of equal logits, those of smaller ids are larger.
    """
    of_teacher, of_student = (
        {"temperature": temperature * logits.head.temperature, **options.keywords}
        for logits in (teacher, student)
    )
    log_q, ids = topk.topk(*teacher.operands, k, **of_teacher)
    target = ForwardKL(Columns(ids, log_q, tail=False))
    return divergence(*student.operands, target, **of_student)


def forward_kl_of_top(
    student: DeferredLogits,
    teacher: jax.Array,
    ids: jax.Array,
    temperature: ArrayLike,
    options: Options,
    where: jax.Array | None = None,
) -> jax.Array:
    """`forward_kl` of both distributions' restrictions to K columns, renormalised.

    The teacher's logits are [..., K], constants, and `ids` are their columns.
    """
    logp = selected.selected_logprobs(
        *student.operands, ids, where=where,
        temperature=temperature * student.head.temperature, **options.keywords,
    )  # fmt: skip
    log_q = jax.nn.log_softmax(teacher.astype(jnp.float32) / temperature)
    terms = jnp.exp(log_q) * (log_q - jax.nn.log_softmax(logp))
    total = jnp.sum(terms, axis=-1)
    return total if where is None else jnp.where(where, total, 0)
