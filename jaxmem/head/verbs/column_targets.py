"""Targets from a part of a teacher's distribution: known columns, or drawn ids."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jaxmem.head.maths import checks
from jaxmem.head.maths.spec import Spec
from jaxmem.head.verbs import arguments, kinds, rule
from jaxmem.head.verbs.columns_rule import ColumnsRule
from jaxmem.head.verbs.divergence_loss_rule import (
    ColumnsConstants,
    ColumnsLossRule,
    DrawnConstants,
    DrawnLossRule,
    statistics_scale,
)
from jaxmem.head.verbs.divergence_targets import LossCall, Target
from jaxmem.head.verbs.selected import logprobs_of
from jaxmem.head.verbs.token_ids import check_ids, flat_ids, ids_call

_LARGEST_LOGPROB = 0.1  # what 16 bits may make of ln 1


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["ids", "logprobs"],
    meta_fields=["tail"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class Columns(Target):
    """A divergence's target, given by K columns per token, such as a teacher's top K.

    With S the ids of a token, p the student and q the teacher,

        tail=True:   p = (p_v for v in S, 1 - Σ_S p_v),  and q in the same way
        tail=False:  p = (p_v / Σ_S p_u for v in S),     and q in the same way

    With a tail, the rest of the vocabulary is one outcome. The divergence is then a
    lower bound of the divergence over the whole vocabulary, and the student learns how
    much mass to leave to the rest. Without a tail, the student's mass outside of S has
    no influence. Nothing is clamped; docs/maths.md describes how both rests keep their
    digits. A divergence is inf if it is inf by definition: one of the two gives mass to
    an outcome that the other excludes. Without a tail, it is NaN if one of the two
    excludes all of the ids.

    Attributes:
        ids: token ids [..., K], any integer dtype, in any order. A negative id is
            absent. An id that repeats counts once, with the first of its
            log-probabilities. A token without ids has a divergence of 0.
        logprobs: the teacher's, constant log-probabilities of the ids [..., K] in the
            whole vocabulary, at the temperature that the student is compared at.
        tail: True if the rest of the vocabulary counts as one more outcome.

    >>> import jax.numpy as jnp, jaxmem
    >>> h, W = jnp.ones((1, 1)), jnp.log(jnp.array([[0.4], [0.3], [0.2], [0.1]]))
    >>> top = jaxmem.Columns(jnp.array([[0, 1]]), jnp.log(jnp.array([[0.5, 0.3]])))
    >>> # of (0.5, 0.3, 0.2) and (0.4, 0.3, 0.3)
    >>> jaxmem.divergence(h, W, jaxmem.ForwardKL(top)).round(4)
    Array([0.0305], dtype=float32)

    Reference: Anshumann et al., "Sparse Logit Sampling", 2025, arXiv:2503.16870, for
    what truncation without the rest does to a student's calibration.
    """

    ids: Any
    logprobs: Any
    tail: bool = True

    def divergence(self, kind, student):
        call, ids, where = ids_call("divergence", self.ids, *student)
        spec, rows, shape = call.spec, call.rows, call.shape
        tail = checks.check_flag("Columns.tail", self.tail)
        comparison = kinds.ColumnsComparison(kind, tail)
        logprobs = _check_logprobs(self.logprobs, ids, where, shape)
        if 0 in ids.shape:
            return jnp.zeros(shape, spec.stats_dtype)
        ids, log_q = _distinct_columns(spec, ids, logprobs)
        rows = rows._replace(active=rows.active & jnp.any(ids >= 0, axis=-1))
        spec, source = arguments.typed(spec, call.source, (rows, ids, log_q))
        log_p = rule.run(ColumnsRule(spec, call.backend), (source,), ((rows,), ids))
        values = kinds.values(comparison, log_p, log_q)
        return jnp.reshape(jnp.where(rows.active, values, 0), shape)

    def loss(self, kind, student, statistics_temperature):
        call, ids, where = ids_call("divergence_loss", self.ids, *student)
        spec, shape = call.spec, call.shape
        tail = checks.check_flag("Columns.tail", self.tail)
        comparison = kinds.ColumnsComparison(kind, tail)
        logprobs = _check_logprobs(self.logprobs, ids, where, shape)
        if not ids.shape[-1]:
            ids, logprobs = _absent_ids(shape), jnp.zeros((*shape, 1))
        scale = statistics_scale(spec, shape, call.rows, statistics_temperature)
        ids, log_q = _distinct_columns(spec, ids, logprobs)
        constants = ColumnsConstants(call.rows, scale, ids, log_q)
        rule_of = functools.partial(ColumnsLossRule, comparison=comparison)
        return LossCall(rule_of, call._replace(rows=constants))

    def placed(self, places):
        tokens = places.tokens
        ids = check_ids("ids", self.ids, places.where, tokens, places.vocab_size)
        logprobs = _check_logprobs(self.logprobs, ids, places.where, tokens)
        ids, logprobs = places.of_tokens(ids, -1), places.of_tokens(logprobs, 0)
        return Columns(ids, logprobs, self.tail)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["ids"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True, eq=False)
class Drawn(Target):
    """A divergence's target, given by ids drawn from it, as by `jaxmem.sample_ids`.

        out = -1/K Σ_k ln p[ids_k],   over the K present ids of a token

    Averaged over draws, this cross-entropy equals `ForwardKL` plus the teacher's
    entropy, and has its gradient. It cannot estimate other divergences.

    Attributes:
        ids: token ids [..., K], any integer dtype, which may repeat. A negative id is
            absent; a token without ids has 0.

    >>> import jax.numpy as jnp, jaxmem
    >>> h, W = jnp.ones((1, 1)), jnp.log(jnp.array([[0.5], [0.25], [0.25]]))
    >>> drawn = jaxmem.Drawn(jnp.array([[0, 0, 1, -1]]))
    >>> jaxmem.divergence(h, W, jaxmem.ForwardKL(drawn)).round(4)
    Array([0.9242], dtype=float32)

    Reference: Anshumann et al., "Sparse Logit Sampling", 2025, arXiv:2503.16870.
    """

    ids: Any

    def divergence(self, kind, student):
        _check_drawn(kind)
        call, ids, _ = ids_call("divergence", self.ids, *student)
        log_p = logprobs_of(call, ids)
        count = jnp.maximum(jnp.sum(ids >= 0, axis=-1), 1).astype(log_p.dtype)
        return -jnp.sum(log_p, axis=-1) / count

    def loss(self, kind, student, statistics_temperature):
        _check_drawn(kind)
        call, ids, _ = ids_call("divergence_loss", self.ids, *student)
        spec, shape = call.spec, call.shape
        ids = ids if ids.shape[-1] else _absent_ids(shape)
        scale = statistics_scale(spec, shape, call.rows, statistics_temperature)
        constants = DrawnConstants(call.rows, scale, flat_ids(ids, shape))
        return LossCall(DrawnLossRule, call._replace(rows=constants))

    def placed(self, places):
        ids = check_ids("ids", self.ids, places.where, places.tokens, places.vocab_size)
        return Drawn(places.of_tokens(ids, -1))


def _absent_ids(shape):
    """One id of each token, which is absent."""
    return jnp.full((*shape, 1), -1, jnp.int32)


def _check_drawn(kind):
    if not kind.of_draws:
        raise ValueError(
            "target must be jaxmem.ForwardKL of drawn ids, because they estimate that "
            f"divergence only, got {type(kind).__name__}"
        )


def _distinct_columns(
    spec: Spec, ids: jax.Array, logprobs: ArrayLike
) -> tuple[jax.Array, jax.Array]:
    """Ids [N, K], and the teacher's log-probabilities, -inf where absent.

    Repeats of an id are replaced by -1.
    """
    ids = jnp.reshape(ids, (-1, ids.shape[-1]))
    slot = lax.broadcasted_iota(jnp.int32, ids.shape, 1)
    in_order, slot = lax.sort((ids, slot), dimension=1, num_keys=1)
    repeats = jnp.pad(in_order[:, 1:] == in_order[:, :-1], ((0, 0), (1, 0)))
    in_order = jnp.where(repeats, -1, in_order)
    ids = lax.sort((slot, in_order), dimension=1, num_keys=1)[1]
    log_q = lax.stop_gradient(jnp.asarray(logprobs)).astype(spec.stats_dtype)
    return ids, jnp.where(ids < 0, -jnp.inf, jnp.reshape(log_q, ids.shape))


def _check_logprobs(logprobs, ids, where, shape: tuple[int, ...]):
    """The teacher's log-probabilities, one for each id."""
    name = "Columns.logprobs"
    logprobs = checks.as_visible_array(name, logprobs)
    checks.check_float(name, logprobs)
    if logprobs.shape != ids.shape:
        raise ValueError(
            f"{name} must have one entry for each of ids, shape {ids.shape}, got "
            f"{logprobs.shape}"
        )
    if not all(map(checks.is_visible, (logprobs, ids, where))):
        return logprobs
    counted = checks.counted_tokens(where, shape)
    visible = np.asarray(logprobs).astype(np.float64)
    wrong = counted[..., None] & (np.asarray(ids) >= 0) & ~(visible <= _LARGEST_LOGPROB)
    if wrong.any():
        raise ValueError(
            f"{name} must be log-probabilities, which are not positive, got "
            f"{visible[wrong][0]}"
        )
    return logprobs
