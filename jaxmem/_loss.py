"""A caller's per-token loss: traced once, then evaluated and differentiated by chunks.

What loss_fn closes over becomes an operand, because a derivative's rule may run after
the trace that a closed-over value belongs to has ended.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer, eval_jaxpr

from jaxmem import _shards, _spec
from jaxmem._spec import Spec
from jaxmem._stats import Cotangents, TokenStats


class Operands(NamedTuple):
    """What the loss is made of besides statistics."""

    per_token: tuple[jax.Array, ...]  # [N, ...]
    closed: tuple[jax.Array, ...] | None  # closed over by loss_fn; None: no cotangents


class Values(NamedTuple):
    """What is kept of each row, arrays of [N, ...]."""

    loss: jax.Array
    metrics: dict[str, jax.Array]
    per_token: tuple[jax.Array | None, ...]  # cotangents; None: not a float, or unasked


class Loss:
    """loss_fn as a function of arrays alone, for chunks of one size; static under jit.

    Equal where loss_fn is the same object and its jaxpr reads the same, so that calls
    outside of jit compile once.

    Attributes:
        fields: names in TokenStats that the loss's derivative depends on.
        closed: whether it depends on each value that loss_fn closes over.
    """

    fields: tuple[str, ...]
    closed: tuple[bool, ...]

    def __init__(self, jaxpr, tree, key):
        self._jaxpr, self._tree, self._key = jaxpr, tree, key

    def __call__(
        self, stats: TokenStats, operands: Operands
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """(loss, metrics) of each row, in the statistics' type."""
        flat = eval_jaxpr(self._jaxpr, operands.closed, *stats, *operands.per_token)
        return jax.tree.unflatten(self._tree, flat)

    def __eq__(self, other):
        return isinstance(other, Loss) and self._key == other._key

    def __hash__(self):
        return hash(self._key)


def trace(
    loss_fn: Callable, spec: Spec, per_token: tuple[jax.Array, ...]
) -> tuple[Loss, Operands]:
    """loss_fn for chunks of spec.chunk rows, and what it is to be called with."""

    def checked(stats, *per_token):
        made = _spec.check_loss_result(loss_fn(stats, *per_token), spec.chunk)
        return jax.tree.map(lambda x: x.astype(spec.stats_dtype), made)

    rows = _examples(spec, per_token)
    jaxpr, made = jax.make_jaxpr(checked, return_shape=True)(_stats_like(spec), *rows)
    operands = Operands(per_token, tuple(jaxpr.consts))
    loss = Loss(jaxpr.jaxpr, jax.tree.structure(made), _key(loss_fn, jaxpr))
    loss.fields, loss.closed = _dependence(loss, spec, operands)
    return loss, operands


def evaluate(
    loss: Loss, row_ids: jax.Array, stats: TokenStats, operands: Operands, n_rows: int
) -> Values:
    """Values of one chunk; what stats holds for ids from n_rows on is not looked at."""
    stats, operands, _ = _complete(row_ids, stats, operands, n_rows)
    losses, metrics = loss(stats, operands)
    return Values(losses, metrics, (None,) * len(operands.per_token))


def differentiate(
    loss: Loss, row_ids: jax.Array, stats: TokenStats, operands: Operands, n_rows: int
) -> tuple[Values, Cotangents]:
    """`evaluate`, and what each row's loss does with what it is made of.

    The cotangents of ids from n_rows on are 0.
    """
    stats, operands, live = _complete(row_ids, stats, operands, n_rows)
    fields = {k: getattr(stats, k) for k in loss.fields}

    def run(fields, floats):
        per_token = _joined(floats, operands.per_token)
        return loss(stats._replace(**fields), operands._replace(per_token=per_token))

    floats = _floats(operands.per_token)
    losses, pull, metrics = jax.vjp(run, fields, floats, has_aux=True)
    # By choice, not by multiplication: 0 · NaN would be NaN.
    of_fields, of_floats = jax.tree.map(
        lambda x: jnp.where(_beside(live, x), x, jnp.zeros_like(x)),
        pull(jnp.ones_like(losses)),
    )
    cotangents = Cotangents(*(of_fields.get(k) for k in Cotangents._fields))
    return Values(losses, metrics, of_floats), cotangents


def nothing(
    loss: Loss, spec: Spec, operands: Operands, n_rows: int, pull: bool
) -> Values:
    """Values of rows that are not active; with cotangents if they are to be pulled."""
    rows = operands._replace(per_token=_examples(spec, operands.per_token))
    _, metrics = jax.eval_shape(loss, _stats_like(spec), rows)
    zeros = jnp.zeros(n_rows, spec.stats_dtype)
    floats = _floats(operands.per_token)
    return Values(
        loss=zeros,
        metrics={k: zeros for k in metrics},
        per_token=jax.tree.map(jnp.zeros_like, floats)
        if pull
        else (None,) * len(floats),
    )


def _complete(row_ids, stats, operands, n_rows):
    """Every row of the chunk; its first one, which is active, stands in where none is.

    So that loss_fn never sees a number that could not occur.
    """
    live = row_ids < n_rows
    row_ids = jnp.where(live, row_ids, row_ids[0])
    stats = TokenStats(*(jnp.where(live, x, x[0]) for x in stats))
    per_token = tuple(x.at[row_ids].get(mode="clip") for x in operands.per_token)
    return stats, operands._replace(per_token=per_token), live


def _dependence(loss, spec, operands):
    """Fields of TokenStats that the derivative needs; whether it needs each closed."""
    stats, closed = _stats_like(spec), operands.closed
    rows = _examples(spec, operands.per_token)

    def pull(cotangent, stats, closed, rows):
        def run(fields, floats):
            given = TokenStats(*_joined(fields, stats))
            return loss(given, Operands(rows, _joined(floats, closed)))[0]

        return jax.vjp(run, _floats(stats), _floats(closed))[1](cotangent)

    cotangent = stats.logprob
    jaxpr, shapes = jax.make_jaxpr(pull, return_shape=True)(
        cotangent, stats, closed, rows
    )
    # What does not follow from the loss's cotangent is a constant, 0.
    reached = {id(jaxpr.jaxpr.invars[0])}
    for equation in jaxpr.jaxpr.eqns:
        if any(id(x) in reached for x in equation.invars):
            reached.update(map(id, equation.outvars))
    flags = [id(x) in reached for x in jaxpr.jaxpr.outvars]
    fields, closed = jax.tree.unflatten(jax.tree.structure(shapes), flags)
    names = zip(TokenStats._fields, fields, strict=True)
    return tuple(k for k, flag in names if flag), tuple(map(bool, closed))


def _key(loss_fn, jaxpr):
    """Itself alone where jit's cache would keep a tracer alive, or cannot hash."""
    if any(isinstance(x, Tracer) for x in jaxpr.consts):
        return object()
    try:
        hash(loss_fn)
    except TypeError:
        return object()
    return loss_fn, str(jaxpr)


def _floats(arrays) -> tuple:
    """The arrays that have derivatives; None in the place of others."""
    return tuple(x if jnp.issubdtype(x.dtype, jnp.floating) else None for x in arrays)


def _joined(floats, arrays) -> tuple:
    """arrays, with floats where there are such."""
    pairs = zip(floats, arrays, strict=True)
    return tuple(array if x is None else x for x, array in pairs)


def _beside(live, x):
    return live.reshape(live.shape + (1,) * (x.ndim - 1))


def _stats_like(spec) -> TokenStats:
    x, flag = _example(spec, spec.stats_dtype), _example(spec, jnp.bool_)
    return TokenStats(x, x, x, x, flag)


def _examples(spec, per_token):
    return tuple(_example(spec, x.dtype, x.shape[1:]) for x in per_token)


def _example(spec, dtype, shape=()) -> Any:
    """Rows of one chunk, of the type that they have inside shard_map."""
    types = _shards.types(spec.varying) if spec.varying else {}
    return jax.ShapeDtypeStruct((spec.chunk, *shape), dtype, **types)
