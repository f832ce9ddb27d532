"""A loss function given by the caller: checks of its arguments and results."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.base import messages
from jaxmem.core import checks


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
    return _checked(result, rows)


def _wrong_arguments(count: int, error: TypeError) -> TypeError:
    others = {0: "", 1: " and 1 per-token argument"}
    return TypeError(
        "loss_fn must take a TokenStats"
        f"{others.get(count, f' and {count} per-token arguments')}, as many as were "
        f"given: {messages.cut(str(error))}"
    )


def _checked(result: Any, rows: int) -> tuple[jax.Array, dict[str, jax.Array]]:
    """(loss, metrics) from the result of loss_fn for a chunk of rows."""
    loss: Any = result
    metrics: Any = {}
    if isinstance(result, (tuple, list)) and len(result) == 2:
        loss, metrics = result
    expected = f"of shape ({rows},), one number a token of its chunk"
    if not _is_column(loss, rows, jnp.floating):
        raise TypeError(
            f"loss_fn must return a float array {expected}, or a pair of it and a dict "
            f"of metrics, got {_kind(loss)}"
        )
    if not isinstance(metrics, dict) or not all(isinstance(k, str) for k in metrics):
        raise TypeError(
            f"loss_fn's metrics must be a dict of names to arrays, got {_kind(metrics)}"
        )
    for name, metric in metrics.items():
        if not _is_column(metric, rows, jnp.floating, jnp.integer, jnp.bool_):
            raise TypeError(
                f"loss_fn's metric {messages.short(name)} must be a real array "
                f"{expected}, got {_kind(metric)}"
            )
    return loss, metrics


def _is_column(value, rows, *kinds):
    if not isinstance(value, (jax.Array, np.ndarray)) or value.shape != (rows,):
        return False
    return any(jnp.issubdtype(value.dtype, kind) for kind in kinds)


def _kind(value):
    """Describes a result of loss_fn, whose values are not known while tracing."""
    if isinstance(value, (jax.Array, np.ndarray)):
        return f"{value.dtype} of shape {value.shape}"
    return type(value).__name__
