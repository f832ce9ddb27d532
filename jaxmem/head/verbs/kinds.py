"""The kinds of divergence between two distributions; docs/maths.md has the derivation.

Each is a sum of terms that are never negative, e(a, b) = a ln(a/b) - a + b, in which an
error of either logsumexp cancels to first order. The derivative needs only s_v =
∂D/∂p_v: dz_v = p_v (s_v - Σ_u p_u s_u).
"""

import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp

from jaxmem.head.maths import checks, divergence_terms, row_stats
from jaxmem.head.maths.divergence_terms import XLA, ColumnBlocks


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of divergence of a student p from a target q.

    Without a target it is static, and computes terms.
    """

    of: Any = None
    in_blocks: ClassVar[bool] = True  # True if it follows from sums over blocks
    of_draws: ClassVar[bool] = False  # True if ids drawn from q estimate it

    @property
    def kind(self) -> Self:
        """This divergence without its target, which is an array; static under jit."""
        return dataclasses.replace(self, of=None)

    def terms(self, p, q, log_ratio, ops=XLA) -> tuple:
        """Terms, none negative, whose sum over the vocabulary is the divergence."""
        raise NotImplementedError

    def slopes(self, p, q, log_ratio, ops=XLA) -> Any:
        """Return p · ∂D/∂p, up to a multiple of p."""
        raise NotImplementedError

    def density(self, p, q):
        """Return the distribution by which columns of the derivative are sampled."""
        return p

    def block_terms(self, w, v, d, ops=XLA) -> Any:
        """Terms whose sums over a block, with its masses, are what it contributes."""
        raise NotImplementedError

    def of_blocks(self, b: ColumnBlocks) -> tuple:
        """(contributions of blocks to the divergence, and to the sum of the slopes)."""
        raise NotImplementedError


_is_tree = functools.partial(jax.tree_util.register_dataclass, data_fields=["of"])


@functools.partial(_is_tree, meta_fields=[])
@dataclasses.dataclass(frozen=True)
class ReverseKL(Kind):
    """KL divergence of the student p from the target q.

        KL(p ‖ q) = Σ_v p_v (ln p_v - ln q_v)                                  (nats)

    RLHF penalises it, with q the reference, and distillation on the student's own
    samples minimises it.

    Attributes:
        of: the target, a `jaxmem.Teacher` or `jaxmem.Columns`.

    >>> import jax.numpy as jnp, jaxmem
    >>> h, W = jnp.ones((2, 1)), jnp.log(jnp.array([[0.5], [0.5]]))
    >>> teacher = jaxmem.Teacher(h, jnp.log(jnp.array([[0.25], [0.75]])))
    >>> jaxmem.divergence(h, W, jaxmem.ReverseKL(teacher)).round(2)
    Array([0.14, 0.14], dtype=float32)

    Reference: Ouyang et al., "Training language models to follow instructions with
    human feedback", 2022, arXiv:2203.02155, for the penalty; Gu et al., "MiniLLM",
    2023, arXiv:2306.08543, for distillation.
    """

    def terms(self, p, q, log_ratio, ops=XLA):
        return (divergence_terms.excess_of(p, q, log_ratio, ops),)

    def slopes(self, p, q, log_ratio, ops=XLA):
        return divergence_terms.product(p, log_ratio)

    def block_terms(self, w, v, d, ops=XLA):
        return divergence_terms.relative(w, v, d, ops)

    def of_blocks(self, b: ColumnBlocks):
        excess, difference = (divergence_terms.product(b.p_scale, x) for x in b.sums)
        value = divergence_terms.shifted_excess(
            b.p, b.q, excess, difference, b.log_ratio
        )
        return value, excess + difference + divergence_terms.product(b.p, b.log_ratio)


@functools.partial(_is_tree, meta_fields=[])
@dataclasses.dataclass(frozen=True)
class ForwardKL(Kind):
    """KL divergence of the target q from the student p.

        KL(q ‖ p) = Σ_v q_v (ln q_v - ln p_v)                                  (nats)

    The classical loss of distillation: cross-entropy with the teacher q's
    probabilities, less the teacher's entropy.

    Attributes:
        of: the target, a `jaxmem.Teacher`, `jaxmem.Columns` or `jaxmem.Drawn`.

    >>> import jax.numpy as jnp, jaxmem
    >>> h, W = jnp.ones((2, 1)), jnp.log(jnp.array([[0.5], [0.5]]))
    >>> teacher = jaxmem.Teacher(h, jnp.log(jnp.array([[0.25], [0.75]])))
    >>> jaxmem.divergence(h, W, jaxmem.ForwardKL(teacher)).round(4)
    Array([0.1308, 0.1308], dtype=float32)

    Reference: Hinton et al., "Distilling the Knowledge in a Neural Network", 2015,
    arXiv:1503.02531.
    """

    of_draws: ClassVar[bool] = True

    def terms(self, p, q, log_ratio, ops=XLA):
        return (divergence_terms.excess_of(q, p, -log_ratio, ops),)

    def slopes(self, p, q, log_ratio, ops=XLA):
        """Return p - q: p · ∂D/∂p is -q, and p is a multiple of p."""
        near = jnp.abs(log_ratio) < divergence_terms.SERIES_BELOW
        return jnp.where(
            near,
            p * (log_ratio * divergence_terms.exp_series(log_ratio, 2, ops)),
            p - q,
        )

    def density(self, p, q):
        return (p + q) / 2

    def block_terms(self, w, v, d, ops=XLA):
        return divergence_terms.relative(v, w, -d, ops)

    def of_blocks(self, b: ColumnBlocks):
        excess, difference = (divergence_terms.product(b.q_scale, x) for x in b.sums)
        t = -b.log_ratio
        value = divergence_terms.shifted_excess(b.q, b.p, excess, difference, t)
        # Σ q (1 - e^-(d+t)), to be negated.
        series = t * divergence_terms.exp_series(t, 2)
        near = b.q * series + difference - series * difference
        return value, -jnp.where(
            jnp.abs(t) < divergence_terms.SERIES_BELOW, near, b.q - b.p
        )


@functools.partial(_is_tree, meta_fields=["beta"])
@dataclasses.dataclass(frozen=True)
class JSD(Kind):
    """Generalised Jensen-Shannon divergence of the student p and the target q.

        β KL(q ‖ m) + (1-β) KL(p ‖ m),   m = β q + (1-β) p                     (nats)

    It is symmetric at β = 0.5 and never above ln 2. Divided by β it tends to
    `ForwardKL` as β → 0, divided by 1-β to `ReverseKL` as β → 1.

    Attributes:
        of: the target, a `jaxmem.Teacher` or `jaxmem.Columns`.
        beta: weight of the target in the mixture, a Python number between 0 and 1.

    >>> import jax.numpy as jnp, jaxmem
    >>> h, W = jnp.ones((2, 1)), jnp.log(jnp.array([[0.5], [0.5]]))
    >>> teacher = jaxmem.Teacher(h, jnp.log(jnp.array([[0.25], [0.75]])))
    >>> jaxmem.divergence(h, W, jaxmem.JSD(teacher)).round(4)
    Array([0.0338, 0.0338], dtype=float32)

    Reference: Agarwal et al., "On-Policy Distillation of Language Models", 2023,
    arXiv:2306.13649, with their β.
    """

    beta: float = 0.5
    in_blocks: ClassVar[bool] = False

    def __post_init__(self):
        """Raise a TypeError or a ValueError for a weight that is none."""
        beta = self.beta
        if not isinstance(beta, (int, float)) or isinstance(beta, bool):
            raise TypeError(f"beta must be a Python number, got {checks.brief(beta)}")
        if not 0 < beta < 1:
            raise ValueError(
                f"beta must lie between 0 and 1, got {beta}; the limits are ForwardKL "
                "(towards 0) and ReverseKL (towards 1)"
            )

    def terms(self, p, q, log_ratio, ops=XLA):
        if self.beta == 0.5:
            return (divergence_terms.half_terms(p, q, log_ratio, ops),)
        heavy, light, weight, x = self._by_weight(p, q, log_ratio)
        log_heavy, log_light = divergence_terms.to_mixture(weight, x, ops)
        of_heavy = (1 - weight) * divergence_terms.product(heavy, log_heavy)
        of_light = weight * divergence_terms.product(light, log_light)
        m = (1 - weight) * heavy + weight * light
        near = m * (x * x) * divergence_terms.mixing_series(weight, x, ops)
        return (
            jnp.where(
                jnp.abs(x) < divergence_terms.SERIES_BELOW, near, of_heavy + of_light
            ),
        )

    def slopes(self, p, q, log_ratio, ops=XLA):
        """(1-β) p ln(p/m)."""
        if self.beta == 0.5:
            return divergence_terms.half_slopes(p, log_ratio, ops)
        _, _, weight, x = self._by_weight(p, q, log_ratio)
        log_heavy, log_light = divergence_terms.to_mixture(weight, x, ops)
        log_p = log_heavy if self.beta <= 0.5 else log_light
        return (1 - self.beta) * divergence_terms.product(p, log_p)

    def _by_weight(self, p, q, log_ratio):
        """The part of larger weight, the other, its weight, and ln(other/first)."""
        if self.beta <= 0.5:
            return p, q, self.beta, -log_ratio
        return q, p, 1 - self.beta, log_ratio


class ColumnsComparison(NamedTuple):
    """Static facts of a divergence over the columns that are known of a teacher."""

    divergence: Kind
    tail: bool  # True if all other columns together are one more outcome


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def values(comparison, log_p, log_q):
    """The divergence per row from ln p [N, K + 1], the rest's last, and ln q [N, K]."""
    return compare(comparison, log_p, log_q)[0]


def compare(
    comparison: ColumnsComparison, log_p: jax.Array, log_q: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The divergence per row, and its derivative by ln p [N, K + 1], the rest's last.

    ln q is [N, K].
    """
    divergence, n_slopes = comparison.divergence, log_p.shape[1]
    if comparison.tail:
        log_q = jnp.concatenate([log_q, _log_rest(log_q, log_p)], axis=1)
    else:
        log_p = log_p[:, :-1]
    log_p, log_q = _normalise(log_p), _normalise(log_q)
    p, q, log_ratio = jnp.exp(log_p), jnp.exp(log_q), log_p - log_q
    terms = divergence.terms(p, q, log_ratio)
    slopes = divergence.slopes(p, q, log_ratio)
    slopes = slopes - p * jnp.sum(slopes, axis=1, keepdims=True)
    slopes = jnp.pad(slopes, ((0, 0), (0, n_slopes - slopes.shape[1])))
    parts = [jnp.sum(x, axis=1) for x in terms]
    return sum(parts[1:], parts[0]), slopes


def _pull_back(comparison, slopes, g):
    # A row whose value is not used, maybe because it is NaN, has no derivative.
    g = g[:, None]
    return jnp.where(g == 0, 0, g * slopes), jnp.zeros_like(slopes[:, :-1])


values.defvjp(compare, _pull_back)


def _normalise(log_p):
    return row_stats.log_softmax(log_p, row_stats.normaliser(log_p))


def _log_rest(log_q, log_p):
    """ln(1 - Σ q) [N, 1], at least the logarithm of its rounding error's bound."""
    epsilon = jnp.finfo(log_q.dtype).eps
    first = jnp.argmax(log_q, axis=1, keepdims=True)
    largest = jnp.take_along_axis(log_q, first, axis=1)
    is_first = jnp.arange(log_q.shape[1], dtype=first.dtype)[None] == first
    others = jnp.sum(jnp.where(is_first, 0, jnp.exp(log_q)), axis=1, keepdims=True)
    without_first = -jnp.expm1(largest)
    unknown = epsilon * jnp.maximum(without_first, epsilon)
    rest = jnp.log(jnp.maximum(without_first - others, unknown))
    return jnp.where(log_p[:, -1:] == -jnp.inf, -jnp.inf, rest)
