"""A caller's per-token loss: traced once, then evaluated and differentiated in chunks.

Values that loss_fn closes over become operands, because the rule of a derivative may
run after the trace that a closed-over value belongs to has ended.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer, eval_jaxpr
from jax.sharding import AbstractMesh

from jaxmem.base import messages
from jaxmem.head.maths import checks, explicit_axes, vocab_shards
from jaxmem.head.maths.row_stats import Cotangents, TokenStats
from jaxmem.head.maths.spec import Spec
from jaxmem.head.verbs import jaxprs, token_independence


def check(loss_fn) -> None:
    """Raise unless loss_fn can be called; its results are checked when it is traced."""
    if not callable(loss_fn):
        raise TypeError(
            "loss_fn must be a function of a TokenStats and the per-token arguments, "
            f"got {checks.brief(loss_fn)}"
        )


def call(loss_fn: Callable, stats, per_token, rows: int):
    """(loss [rows], metrics [rows] by name) of a chunk of rows.

    A TypeError says that loss_fn takes other arguments, or returns something else.
    Errors that loss_fn itself raises keep their type and traceback.
    """
    try:
        bound = inspect.signature(loss_fn)
    except (TypeError, ValueError):  # written in C, without one
        bound = None
    try:
        if bound is not None:
            bound.bind(stats, *per_token)
    except TypeError as error:
        raise _wrong_arguments(len(per_token), error) from error
    try:
        result = loss_fn(stats, *per_token)
    except Exception as error:
        frame = error.__traceback__
        entered = bound is not None and frame is not None and frame.tb_next is not None
        if isinstance(error, TypeError) and not entered:
            raise _wrong_arguments(len(per_token), error) from error
        error.add_note(
            f"jaxmem: raised by loss_fn, which gets {rows} tokens at a time; an array "
            "with one entry per token must be an argument of it"
        )
        raise
    return _check_result(result, rows)


def _wrong_arguments(count: int, error: TypeError) -> TypeError:
    more = {0: "", 1: " and 1 per-token argument"}
    return TypeError(
        "loss_fn must take a TokenStats"
        f"{more.get(count, f' and {count} per-token arguments')}, as many as were "
        f"given: {messages.cut(str(error))}"
    )


def _check_result(result: Any, rows: int) -> tuple[jax.Array, dict[str, jax.Array]]:
    """(loss, metrics) from the result of loss_fn for a chunk of rows."""
    loss: Any = result
    metrics: Any = {}
    if isinstance(result, (tuple, list)) and len(result) == 2:
        loss, metrics = result
    expected = f"of shape ({rows},), one number a token of its chunk"
    if not _is_column(loss, rows, jnp.floating):
        raise TypeError(
            f"loss_fn must return a float array {expected}, or a pair of it and a dict "
            f"of metrics, got {_describe_value(loss)}"
        )
    if not isinstance(metrics, dict) or not all(isinstance(k, str) for k in metrics):
        raise TypeError(
            "loss_fn's metrics must be a dict of names to arrays, got "
            f"{_describe_value(metrics)}"
        )
    for name, metric in metrics.items():
        if not _is_column(metric, rows, jnp.floating, jnp.integer, jnp.bool_):
            raise TypeError(
                f"loss_fn's metric {messages.short(name)} must be a real array "
                f"{expected}, got {_describe_value(metric)}"
            )
    return loss, metrics


def _is_column(value, rows, *kinds):
    if not isinstance(value, (jax.Array, np.ndarray)) or value.shape != (rows,):
        return False
    return any(jnp.issubdtype(value.dtype, kind) for kind in kinds)


def _describe_value(value):
    """Describes a result of loss_fn, whose values are not known while tracing."""
    if isinstance(value, (jax.Array, np.ndarray)):
        return f"{value.dtype} of shape {value.shape}"
    return type(value).__name__


class LossOperands(NamedTuple):
    """Operands of the loss besides statistics."""

    per_token: tuple[jax.Array, ...]  # [N, ...]
    closed: tuple[jax.Array, ...] | None  # closed over by loss_fn; None: no cotangents


class Values(NamedTuple):
    """Per-row results, arrays of [N, ...]."""

    loss: jax.Array
    metrics: dict[str, jax.Array]
    per_token: tuple[jax.Array | None, ...]  # cotangents, or None


class TracedLoss:
    """loss_fn as a function of arrays, for `n_rows` rows; static under jit.

    Equal where loss_fn is the same object and its jaxpr has the same text, so that
    calls outside of jit compile once.

    Attributes:
        n_rows: the number of rows.
        fields: names in TokenStats that the loss's derivative depends on.
        closed: for each value that loss_fn closes over, whether the loss depends on it.
    """

    fields: tuple[str, ...]
    closed: tuple[bool, ...]

    def __init__(self, n_rows, jaxpr, tree, identity):
        self.n_rows = n_rows
        self._jaxpr, self._tree, self._identity = jaxpr, tree, identity

    def __call__(
        self, stats: TokenStats, operands: LossOperands
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """(loss, metrics) of each row, in the statistics' dtype."""
        flat = eval_jaxpr(self._jaxpr, operands.closed, *stats, *operands.per_token)
        return jax.tree.unflatten(self._tree, flat)

    def __eq__(self, other):
        return isinstance(other, TracedLoss) and self._identity == other._identity

    def __hash__(self):
        return hash(self._identity)


def trace(
    loss_fn: Callable, spec: Spec, n_rows: int, per_token: tuple[jax.Array, ...]
) -> tuple[TracedLoss, LossOperands]:
    """The traced loss for `n_rows` rows at a time, and its operands."""

    def traced(n):
        def checked(stats, *rows):
            result = call(loss_fn, stats, rows, n)
            return jax.tree.map(lambda x: x.astype(spec.stats_dtype), result)

        stats, rows = _stats_like(spec, n), _example_shapes(spec, n, per_token)
        return _jaxpr_of(checked, stats, *rows)

    jaxpr, shapes = traced(n_rows)
    token_independence.check(lambda n: traced(n)[0], jaxpr, n_rows)
    operands = LossOperands(
        per_token, tuple(map(explicit_axes.automatic, jaxpr.consts))
    )
    loss = TracedLoss(
        n_rows, jaxpr.jaxpr, jax.tree.structure(shapes), _identify(loss_fn, jaxpr)
    )
    loss.fields, loss.closed = _find_dependence(loss, spec, operands)
    return loss, operands


def _jaxpr_of(loss_fn, *examples):
    """The jaxpr of loss_fn, with all that it closes over as constants, and its result.

    No axis is explicit inside a verb, but loss_fn may close over arrays of a mesh with
    explicit axes. Without a mesh, its operations get no explicit types; functions that
    it calls get none if they are traced inline.
    """
    make = jax.make_jaxpr(loss_fn, return_shape=True)
    if jax.sharding.get_abstract_mesh().manual_axes:
        return make(*examples)
    try:
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            jaxpr, shapes = make(*examples)
            inner = list(jaxprs.inner_consts(jaxpr.jaxpr))
            if inner or any(map(explicit_axes.mesh_of, jaxpr.consts)):
                with jax.disable_jit():
                    jaxpr, shapes = make(*examples)
    except Exception as error:
        if type(error).__name__ != "ShardingTypeError":
            raise
        raise _closes_over_types() from error
    _check_calls(jaxpr.jaxpr)
    return jaxpr, shapes


def _check_calls(jaxpr):
    """Raise if a function within the jaxpr has types of explicit axes."""
    for equation in jaxpr.eqns:
        values = (*equation.invars, *equation.outvars)
        types = (x.aval.sharding.mesh for x in values)
        if any(map(explicit_axes.explicit_axes, types)) and any(jaxprs.inner(equation)):
            raise _closes_over_types()


def _closes_over_types():
    return NotImplementedError(
        "jaxmem: loss_fn closes over an array of a mesh with explicit axes, and uses "
        "it in control flow, in a function with a custom derivative, or in a split; "
        "pass it as a per-token argument (broadcast to labels' shape), or "
        "as an argument of a jax.tree_util.Partial, as in Partial(loss_fn, array)"
    )


def evaluate(
    loss: TracedLoss,
    row_ids: jax.Array,
    stats: TokenStats,
    operands: LossOperands,
    n_rows: int,
) -> Values:
    """Values of some rows, without cotangents; indices of `n_rows` or more are no rows.

    The operands are of all rows, the statistics of these.
    """
    stats, operands, _ = _fill_rows(row_ids, stats, operands, n_rows)
    losses, metrics = loss(stats, operands)
    return Values(losses, metrics, (None,) * len(operands.per_token))


def differentiate(
    loss: TracedLoss,
    row_ids: jax.Array,
    stats: TokenStats,
    operands: LossOperands,
    n_rows: int,
) -> tuple[Values, Cotangents]:
    """`evaluate`, and cotangents of statistics and per-token arguments; 0 of no row.

    The number of rows may differ from the one that the loss was traced for, as it does
    where devices split the tokens.
    """
    size, pieces = row_ids.shape[0], -(-row_ids.shape[0] // loss.n_rows)
    if size == loss.n_rows:
        return _differentiate_rows(loss, row_ids, stats, operands, n_rows)

    def cut(x, fill):
        x = jnp.pad(x, (0, pieces * loss.n_rows - size), constant_values=fill)
        return x.reshape(pieces, loss.n_rows)

    results = lax.map(
        lambda rows: _differentiate_rows(loss, rows[0], rows[1], operands, n_rows),
        (cut(row_ids, n_rows), jax.tree.map(lambda x: cut(x, 0), stats)),
    )
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:size], results)


def _differentiate_rows(loss, row_ids, stats, operands, n_rows):
    stats, operands, live = _fill_rows(row_ids, stats, operands, n_rows)
    fields = {k: getattr(stats, k) for k in loss.fields}

    def run(fields, floats):
        per_token = _replace_floats(floats, operands.per_token)
        return loss(stats._replace(**fields), operands._replace(per_token=per_token))

    floats = _keep_floats(operands.per_token)
    losses, pull, metrics = jax.vjp(run, fields, floats, has_aux=True)
    # Selected, not multiplied: 0 · NaN would be NaN.
    of_fields, of_floats = jax.tree.map(
        lambda x: jnp.where(_broadcast_rows(live, x), x, jnp.zeros_like(x)),
        pull(jnp.ones_like(losses)),
    )
    return Values(losses, metrics, of_floats), Cotangents(**of_fields)


def nothing(
    loss: TracedLoss, spec: Spec, operands: LossOperands, n_rows: int, pull: bool
) -> Values:
    """Values of inactive rows; pull says whether to include cotangents."""
    rows = _example_shapes(spec, loss.n_rows, operands.per_token)
    stats = _stats_like(spec, loss.n_rows)
    _, metrics = jax.eval_shape(loss, stats, operands._replace(per_token=rows))
    zeros = jnp.zeros(n_rows, spec.stats_dtype)
    floats = _keep_floats(operands.per_token)
    return Values(
        loss=zeros,
        metrics={k: zeros for k in metrics},
        per_token=jax.tree.map(jnp.zeros_like, floats)
        if pull
        else (None,) * len(floats),
    )


def _fill_rows(row_ids, stats, operands, n_rows):
    """Operands of all rows, where the first row replaces missing ones.

    Then loss_fn gets only values that can occur; 0 might not be one. If the first row
    is missing too, they are 0.
    """
    live = row_ids < n_rows
    row_ids = jnp.where(live, row_ids, row_ids[0])
    firsts = (jnp.where(live[0], x[0], jnp.zeros_like(x[0])) for x in stats)
    stats = TokenStats(
        *(jnp.where(live, x, first) for x, first in zip(stats, firsts, strict=True))
    )
    per_token = tuple(x.at[row_ids].get(mode="clip") for x in operands.per_token)
    return stats, operands._replace(per_token=per_token), live


def _find_dependence(loss, spec, operands):
    """(fields of TokenStats, flags of closed arrays) that the derivative needs."""
    stats, closed = _stats_like(spec, loss.n_rows), operands.closed
    rows = _example_shapes(spec, loss.n_rows, operands.per_token)

    def pull(cotangent, stats, closed, rows):
        def run(fields, floats):
            all_stats = TokenStats(*_replace_floats(fields, stats))
            return loss(all_stats, LossOperands(rows, _replace_floats(floats, closed)))[
                0
            ]

        return jax.vjp(run, _keep_floats(stats), _keep_floats(closed))[1](cotangent)

    cotangent = stats.logprob
    jaxpr, shapes = jax.make_jaxpr(pull, return_shape=True)(
        cotangent, stats, closed, rows
    )
    # What does not depend on the loss's cotangent is a constant 0.
    reached = {id(jaxpr.jaxpr.invars[0])}
    for equation in jaxpr.jaxpr.eqns:
        if any(id(x) in reached for x in equation.invars):
            reached.update(map(id, equation.outvars))
    flags = [id(x) in reached for x in jaxpr.jaxpr.outvars]
    fields, closed = jax.tree.unflatten(jax.tree.structure(shapes), flags)
    names = zip(TokenStats._fields, fields, strict=True)
    return tuple(k for k, flag in names if flag), tuple(map(bool, closed))


def _identify(loss_fn, jaxpr):
    """The identity of a loss; a new object if jit's cache cannot hold or hash it."""
    inner = list(jaxprs.inner_consts(jaxpr.jaxpr))
    if any(isinstance(x, Tracer) for x in (*jaxpr.consts, *inner)):
        return object()
    try:
        hash(loss_fn)
    except TypeError:
        return object()
    # The text of the jaxpr omits their values, and the jaxpr keeps them alive.
    return loss_fn, str(jaxpr), tuple(map(id, inner))


def _keep_floats(arrays) -> tuple:
    """The arrays with a derivative, and None in place of the others."""
    return tuple(x if jnp.issubdtype(x.dtype, jnp.floating) else None for x in arrays)


def _replace_floats(floats, arrays) -> tuple:
    """`arrays`, replaced by `floats` where these are not None."""
    pairs = zip(floats, arrays, strict=True)
    return tuple(array if x is None else x for x, array in pairs)


def _broadcast_rows(live, x):
    return live.reshape(live.shape + (1,) * (x.ndim - 1))


def _stats_like(spec, n_rows) -> TokenStats:
    x = _example_shape(spec, n_rows, spec.stats_dtype)
    return TokenStats(x, x, x, x, _example_shape(spec, n_rows, jnp.bool_))


def _example_shapes(spec, n_rows, per_token):
    return tuple(_example_shape(spec, n_rows, x.dtype, x.shape[1:]) for x in per_token)


def _example_shape(spec, n_rows, dtype, shape=()) -> Any:
    """Shape and type of rows inside shard_map."""
    types = vocab_shards.types(spec.varying) if spec.varying else {}
    return jax.ShapeDtypeStruct((n_rows, *shape), dtype, **types)
