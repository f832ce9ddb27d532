"""Arguments that losses of one's own name: arrays and numbers, each by its name."""

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jaxmem.base import guests, messages, user_code
from jaxmem.head.verbs import token_independence

Row = TypeVar("Row")
_ROWS = 24  # of arrays that a loss is traced with; no size is like it by itself


def named(function: Callable, known: Collection[str]) -> tuple[str, ...]:
    """The known arguments that a function takes by name, and no partial has bound.

    Raises:
        ValueError: it needs an argument that is not known, or one without a name.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise ValueError(f"its parameters cannot be read: {error}") from error
    bound = getattr(function, "keywords", {})  # of a functools.partial
    arguments = []
    for name, parameter in parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        by_name = parameter.kind != parameter.POSITIONAL_ONLY
        if name in known and name not in bound and by_name:
            arguments.append(name)
        elif parameter.default is parameter.empty:
            raise ValueError(
                f"{getattr(function, '__name__', 'it')} takes {name!r}, which must be "
                f"one of {', '.join(known)}, passed by name"
            )
    return tuple(arguments)


def default_of(function: Any, name: str) -> Any:
    """The default of a parameter; `inspect.Parameter.empty` if it has none."""
    return inspect.signature(function).parameters[name].default


def check_section(section: str, config: Any) -> None:
    """Call `config.check_loss()`; its errors name the keys of the section."""
    try:
        config.check_loss()
    except user_code.UserCodeError:
        raise
    except ValueError as error:
        said = str(error).replace(f"{type(config).__name__}.", f"{section}.")
        raise ValueError(said) from error


def load_row(key: str, name: str, known: Mapping[str, Row], kind: type) -> Row:
    """A row that the user's code defines, or one that `kind` makes of its function.

    Args:
        key: the key that names it, such as grpo.loss, for errors.
        name: "file.py:name" or "package.module:name".
        known: the shipped rows by name, for errors.
        kind: the class of rows.

    Raises:
        UserCodeError: it cannot be loaded, or its parameters are not those of a row.
    """

    def is_row(loaded: Any) -> bool:
        return isinstance(loaded, kind) or callable(loaded)

    expected = f"a {kind.__name__} or a function"
    loaded = user_code.load(name, key, known, expected, is_row)
    try:
        return loaded if isinstance(loaded, kind) else kind(loaded)
    except ValueError as error:
        cause = error.__cause__ or error  # the user wrote a function, and no row
        raise user_code.UserCodeError(
            f"{key}={messages.short(name)}: {cause}"
        ) from error


def check(
    setting: str, code: Any, loss: Callable[..., Any], count: int, unit: str, whole: str
) -> None:
    """Raise unless a loss gives each token, or pair, a number by its values alone.

    The loss is traced, and nothing is computed.

    Args:
        setting: the key and the name of the loss, such as grpo.loss='my.py:f', for
            errors.
        code: the object that the name stands for, whose line is blamed.
        loss: the function, of arrays of any one length.
        count: the number of arrays.
        unit: "token" or "pair".
        whole: the arrays together, "chunk" or "micro-batch".

    Raises:
        UserCodeError: it raises, or returns anything but one number each, or one that
            depends on others.
    """

    def traced(rows: int) -> Any:
        array = jax.ShapeDtypeStruct((rows,), jnp.float32)
        return jax.make_jaxpr(loss, return_shape=True)(*[array] * count)

    try:
        with guests.received():
            jaxpr, result = traced(_ROWS)
    except BaseException as error:
        guests.raise_if_of_the_user(error)
        said = user_code.described(error, code)
        raise user_code.UserCodeError(f"{setting} raised{said}") from error
    shape, dtype = getattr(result, "shape", None), getattr(result, "dtype", None)
    is_number = dtype is not None and jnp.issubdtype(dtype, jnp.floating)
    if shape != (_ROWS,) or not is_number:
        got = type(result).__name__ if shape is None else f"{dtype} of shape {shape}"
        raise user_code.UserCodeError(
            f"{setting} must return a loss per {unit}, floats of shape ({_ROWS},) for "
            f"arguments of that shape, got {got}"
        )
    words = token_independence.LossWords(
        setting, unit, whole, "loss", "pass it by name"
    )
    try:
        token_independence.check(lambda n: traced(n)[0], jaxpr, _ROWS, words)
    except ValueError as error:
        raise user_code.UserCodeError(str(error)) from error
