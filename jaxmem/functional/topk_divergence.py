"""Divergences between a teacher's given columns and a student, with the rest's mass."""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jaxmem.core import checks, stats as _stats
from jaxmem.core.explicit_axes import sharded_like, with_automatic_axes
from jaxmem.core.head import Matrix
from jaxmem.core.options import AxisName, CallOptions, Chunk, Implementation
from jaxmem.core.spec import Spec
from jaxmem.functional import arguments, rule
from jaxmem.functional.columns import ColumnsRule
from jaxmem.functional.divergence import check_beta
from jaxmem.functional.divergence_terms import JSD, KL, ForwardKL
from jaxmem.functional.given_ids import check_ids

Direction = Literal["forward", "reverse", "jsd"]
_LARGEST_LOGPROB = 0.1  # what 16 bits may make of ln 1


@with_automatic_axes(sharded_like(ids=1, hidden=1))
def topk_kl(
    hidden: ArrayLike,
    W: Matrix,
    ids: ArrayLike,
    teacher_logprobs: ArrayLike,
    chunk: Chunk = 1024,
    *,
    tail: bool = True,
    direction: Direction = "forward",
    beta: float = 0.5,
    where: ArrayLike | None = None,
    temperature: ArrayLike = 1.0,
    axis_name: AxisName | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Divergence of a student from a teacher of whom K columns per token are known.

    With S the ids of a token, p the student and q the teacher,

        tail=True:   p = (p_v for v in S, 1 - Σ_S p_v),  q likewise
        tail=False:  p = (p_v / Σ_S p_u for v in S),     q likewise
        "forward":   KL(q ‖ p) = Σ_k q_k (ln q_k - ln p_k)                     (nats)
        "reverse":   KL(p ‖ q)
        "jsd":       β KL(q ‖ m) + (1-β) KL(p ‖ m),  m = β q + (1-β) p

    With tail=True the rest of the vocabulary is one outcome: the divergence is a lower
    bound of that over the whole vocabulary, and tells the student how much mass to
    leave to the rest. Without it, the student's mass outside of S has no influence.
    Both are sums of terms that are never negative, and nothing is clamped. The FLOPs
    are those of `logprobs` for any K.

    Args:
        hidden: the student's final hidden states [..., D].
        W: the student's vocabulary matrix, [V, D] or [D, V], or its `jaxmem.Head`.
        ids: token ids [..., K], any integer dtype, in any order. A negative id is
            absent. An id that repeats counts once, with the first of its
            log-probabilities. A token without ids has a divergence of 0.
        teacher_logprobs: the teacher's, constant log-probabilities of the ids [..., K]
            in the whole vocabulary, at the temperature that the student is compared at.
        tail: whether the rest of the vocabulary counts as one more outcome.
        direction: "forward", "reverse" or "jsd".
        beta: weight of the teacher in the mixture of "jsd", between 0 and 1.
        where: booleans that broadcast to hidden.shape[:-1]; False masks a token, which
            then costs nothing.
        temperature: as in `logprobs`, of the student.
        axis_name: as in `logprobs`; the ids are those of the whole vocabulary.
        implementation: "xla", or None, which means the same.
        chunk: as in `logprobs`.

    Returns:
        float32 [...] (float64 for float64 hidden), not negative; 0 for a masked token,
        with a gradient of exactly 0, even where its hidden state is NaN. It is inf
        where one of the two gives mass to an outcome that the other excludes, in the
        directions where it is inf by definition; NaN for an id ≥ V that is known at run
        time only, and, without tail, where one of the two excludes all of the ids. How
        both rests keep their digits is in docs/maths.md.

    Memory in docs/memory.md and communication in docs/meshes.md ("topk_kl").

    Raises:
        TypeError: as `logprobs`.
        ValueError: as `logprobs`; or a log-probability is positive, or the direction is
            unknown.
        NotImplementedError: as `logprobs`; or another implementation than "xla".

    >>> import jax.numpy as jnp, jaxmem
    >>> h, W = jnp.ones((1, 1)), jnp.log(jnp.array([[0.4], [0.3], [0.2], [0.1]]))
    >>> ids, q = jnp.array([[0, 1]]), jnp.log(jnp.array([[0.5, 0.3]]))
    >>> jaxmem.topk_kl(h, W, ids, q).round(4)  # of (0.5, 0.3, 0.2) and (0.4, 0.3, 0.3)
    Array([0.0305], dtype=float32)

    Reference: Hinton et al., "Distilling the Knowledge in a Neural Network", 2015,
    arXiv:1503.02531; Anshumann et al., "Sparse Logit Sampling", 2025, arXiv:2503.16870,
    for what truncation without the rest does to a student's calibration.
    """
    verb = "topk_kl"
    options = CallOptions(
        chunk=chunk, where=where, temperature=temperature, axis_name=axis_name,
        implementation=implementation,
    )  # fmt: skip
    how = read_direction(direction, beta), checks.check_flag("tail", tail)
    spec, source, rows, shape = arguments.columns_call(verb, hidden, W, options)
    where = arguments.read_where(where, shape)
    ids = check_ids("ids", ids, where, shape, spec.vocab_size)
    teacher_logprobs = check_teacher(teacher_logprobs, ids, where, shape)
    shapes = arguments.shapes_of(source, shape) | {"ids": ids.shape}
    arguments.record_only_xla(verb, spec, shapes, implementation)
    if 0 in ids.shape:
        return jnp.zeros(shape, spec.stats_dtype)
    ids, log_q = teacher_columns(spec, ids, teacher_logprobs)
    rows = rows._replace(active=rows.active & jnp.any(ids >= 0, axis=-1))
    spec, source = arguments.typed(spec, source, (rows, ids, log_q))
    log_p = rule.run(ColumnsRule(spec), (source,), ((rows,), ids))
    values = _compare(how, log_p, log_q)
    return jnp.reshape(jnp.where(rows.active, values, 0), shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _compare(how, log_p, log_q):
    """The divergence per row from ln p [N, K + 1], the rest's last, and ln q [N, K]."""
    return compare(how, log_p, log_q)[0]


def compare(
    how: tuple[KL | ForwardKL | JSD, bool], log_p: jax.Array, log_q: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The divergence per row, and its derivative by ln p.

    Args:
        how: which divergence, and whether the rest is one more outcome.
        log_p: ln p [N, K + 1], the rest's last.
        log_q: ln q [N, K].

    Returns:
        ([N], [N, K + 1]).
    """
    (divergence, tail), given = how, log_p
    if tail:
        log_q = jnp.concatenate([log_q, _log_rest(log_q, log_p)], axis=1)
    else:
        log_p = log_p[:, :-1]
    log_p, log_q = _normalised(log_p), _normalised(log_q)
    p, q, log_ratio = jnp.exp(log_p), jnp.exp(log_q), log_p - log_q
    terms = divergence.terms(p, q, log_ratio)
    slopes = divergence.slopes(p, q, log_ratio)
    slopes = slopes - p * jnp.sum(slopes, axis=1, keepdims=True)
    slopes = jnp.pad(slopes, ((0, 0), (0, given.shape[1] - slopes.shape[1])))
    parts = [jnp.sum(x, axis=1) for x in terms]
    return sum(parts[1:], parts[0]), slopes


def _pull(how, slopes, g):
    # A row whose value is not used, maybe because it is NaN, has no derivative.
    g = g[:, None]
    return jnp.where(g == 0, 0, g * slopes), jnp.zeros_like(slopes[:, :-1])


_compare.defvjp(compare, _pull)


def _normalised(log_p):
    return _stats.log_softmax(log_p, _stats.normaliser(log_p))


def _log_rest(log_q, log_p):
    """ln(1 - Σ q) [N, 1], at least the logarithm of its rounding error's bound."""
    epsilon = jnp.finfo(log_q.dtype).eps
    first = jnp.argmax(log_q, axis=1, keepdims=True)
    largest = jnp.take_along_axis(log_q, first, axis=1)
    is_first = jnp.arange(log_q.shape[1], dtype=first.dtype) == first
    others = jnp.sum(jnp.where(is_first, 0, jnp.exp(log_q)), axis=1, keepdims=True)
    without_first = -jnp.expm1(largest)
    unknown = epsilon * jnp.maximum(without_first, epsilon)
    rest = jnp.log(jnp.maximum(without_first - others, unknown))
    return jnp.where(log_p[:, -1:] == -jnp.inf, -jnp.inf, rest)


def teacher_columns(
    spec: Spec, ids: jax.Array, teacher_logprobs: ArrayLike
) -> tuple[jax.Array, jax.Array]:
    """Distinct ids [N, K], and the teacher's log-probabilities, -inf where absent."""
    ids = _distinct(jnp.reshape(ids, (-1, ids.shape[-1])))
    log_q = lax.stop_gradient(jnp.asarray(teacher_logprobs)).astype(spec.stats_dtype)
    return ids, jnp.where(ids < 0, -jnp.inf, jnp.reshape(log_q, ids.shape))


def _distinct(ids):
    """The ids [N, K], of which those that came before are replaced by -1."""
    at = lax.broadcasted_iota(jnp.int32, ids.shape, 1)
    in_order, at = lax.sort((ids, at), dimension=1, num_keys=1)
    repeats = jnp.pad(in_order[:, 1:] == in_order[:, :-1], ((0, 0), (1, 0)))
    in_order = jnp.where(repeats, -1, in_order)
    return lax.sort((at, in_order), dimension=1, num_keys=1)[1]


def read_direction(direction: Direction, beta: float) -> KL | ForwardKL | JSD:
    """The divergence of a direction.

    Raises:
        TypeError: beta is not a number.
        ValueError: there is no such direction, or beta is not between 0 and 1.
    """
    beta = check_beta(beta)
    kinds = {"forward": ForwardKL(), "reverse": KL(), "jsd": JSD(beta)}
    if not isinstance(direction, str) or direction not in kinds:
        raise ValueError(
            "direction must be 'forward', 'reverse' or 'jsd', got "
            f"{checks.brief(direction)}"
        )
    return kinds[direction]


def check_teacher(teacher_logprobs, ids, where, shape: tuple[int, ...]):
    """The teacher's log-probabilities, one for each id.

    Raises:
        TypeError: they are not floats.
        ValueError: they have another shape than ids, or one of them is positive.
    """
    name = "teacher_logprobs"
    given = checks.as_visible_array(name, teacher_logprobs)
    checks.check_float(name, given)
    if given.shape != ids.shape:
        raise ValueError(
            f"{name} must have one entry for each of ids, shape {ids.shape}, got "
            f"{given.shape}"
        )
    if not all(map(checks.is_visible, (given, ids, where))):
        return given
    counted = np.broadcast_to(True if where is None else np.asarray(where), shape)
    visible = np.asarray(given).astype(np.float64)
    wrong = counted[..., None] & (np.asarray(ids) >= 0) & ~(visible <= _LARGEST_LOGPROB)
    if wrong.any():
        raise ValueError(
            f"{name} must be log-probabilities, which are not positive, got "
            f"{visible[wrong][0]}"
        )
    return given
