"""Reward functions: a user's own, or those shipped, called on a batch of completions.

    score(prompts, completions, **columns) -> list[float | None]

That is the signature of TRL's and Tunix's reward functions. A prompt is that of the
data, a string or a list of messages; a completion is a string, or for messages a list
of one assistant message. Columns are lists of the other fields of the data, and of
`completion_ids` and `max_new_tokens`. A reward of None does not count.
"""

import asyncio
import functools
import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxmem.base import messages
from jaxmem.data import guests
from jaxmem.data.verifiers import SHIPPED

Function = Callable[..., Any]
_LARGEST = 1e18  # float32 holds the sum of the squares of so many


class RewardError(ValueError):
    """A reward function cannot be used; the message names it and the prompt."""


def checked(reward: Any) -> float:
    """The reward as a finite number that float32 can hold squared.

    Raises:
        ValueError: it is no finite number, or float32 cannot hold its square in a sum;
            the message begins with what was got.
    """
    try:
        number = float(reward)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{messages.short(reward)}, which is no finite number")
    if abs(number) > _LARGEST:
        raise ValueError(
            f"{messages.short(reward)}; advantages are computed in float32, for "
            f"rewards of at most {_LARGEST:g}"
        )
    return number


class Questions(NamedTuple):
    """Arguments of reward functions, lists of N each."""

    where: Sequence[str]  # places of the prompts in the data, for errors
    prompts: Sequence[Any]
    completions: Sequence[Any]
    columns: Mapping[str, Sequence[Any]]

    def only(self, i: int) -> "Questions":
        """The i-th question alone."""
        columns = {name: [values[i]] for name, values in self.columns.items()}
        return Questions(
            [self.where[i]], [self.prompts[i]], [self.completions[i]], columns
        )


class Rewards(NamedTuple):
    """Rewards of completions: float64 arrays."""

    total: np.ndarray  # [N] weighted sum over the functions
    parts: dict[str, np.ndarray]  # [N] by function; NaN for None


class Scorer:
    """Several reward functions and their weights.

    Args:
        names: of shipped functions, or "file.py:function", or
            "package.module:function".
        weights: one per function; None: 1 each.
        timeout: maximum seconds of a call, or None. Functions without a timeout
            are called in the main thread, those with one in a thread of their own.

    Raises:
        RewardError: a function cannot be imported.
    """

    def __init__(
        self,
        names: Sequence[str],
        weights: Sequence[float] | None = None,
        timeout: float | None = None,
    ):
        self._functions = {name: load(name) for name in names}
        self._weights = [1.0] * len(names) if weights is None else list(weights)
        self._timeout = timeout

    def __call__(self, questions: Questions) -> Rewards:
        """Call all functions; async ones are awaited together.

        Raises:
            RewardError: a function raises anything, ends the process, changes its
                directory or closes its output, exceeds the timeout, returns a wrong
                number of rewards or one that float32 cannot hold with its square, or
                all of them return None.
        """
        waiting = {n: f for n, f in self._functions.items() if _is_async(f)}
        returned = self._await(waiting, questions)
        for name, function in self._functions.items():
            if name not in waiting:
                returned[name] = self._call(name, function, questions)
        parts = {
            name: _checked(name, returned[name], questions) for name in self._functions
        }
        table = np.stack(list(parts.values()))
        silent = np.isnan(table).all(axis=0)
        names = ", ".join(parts)
        if silent.any():
            place = _place(names, questions, int(silent.argmax()))
            raise RewardError(f"{place} gave no reward (None)")
        total = np.nansum(table * np.c_[self._weights], axis=0)
        for i, value in enumerate(total.tolist()):
            try:
                checked(value)
            except ValueError as error:
                said = f"{_place(names, questions, i)} gave, with task.reward_weights, "
                raise RewardError(f"{said}{error}") from error
        return Rewards(total, parts)

    def _call(self, name: str, function: Function, questions: Questions) -> Any:
        try:
            with guests.received():
                return _call(function, questions, self._timeout)
        except guests.Late as error:
            raise self._too_slow(name, questions) from error
        except BaseException as error:
            guests.raise_if_of_the_user(error)
            raise self._failure(name, questions, error) from error

    def _await(self, functions: Mapping[str, Function], questions: Questions) -> dict:
        if not functions:
            return {}

        async def together():
            calls = [_awaited(f, questions, self._timeout) for f in functions.values()]
            return await asyncio.gather(*calls)

        try:
            with guests.received():
                values = asyncio.run(together())
        except guests.Misbehaved as error:
            raise RewardError(
                f"{_place(', '.join(functions), questions, 0)} {error}"
            ) from error
        returned = dict(zip(functions, values, strict=True))
        for name, value in returned.items():
            if isinstance(value, guests.Late):
                raise self._too_slow(name, questions) from value
            if isinstance(value, BaseException):
                guests.raise_if_of_the_user(value)
                raise self._failure(name, questions, value) from value
        return returned

    def _too_slow(self, name: str, questions: Questions) -> RewardError:
        place = _place(name, questions, 0)
        return RewardError(f"{place} took longer than task.timeout={self._timeout:g} s")

    def _failure(
        self, name: str, questions: Questions, error: BaseException
    ) -> RewardError:
        """Call for one prompt at a time, to find the one for which a function raises.

        One that takes too long ends the search.
        """
        if isinstance(error, guests.Misbehaved):
            return RewardError(f"{_place(name, questions, 0)} {error}")
        function, place = self._functions[name], 0
        for i in range(len(questions.prompts)):
            try:
                with guests.received():
                    if _is_async(function):
                        one = _awaited(function, questions.only(i), self._timeout)
                        if isinstance(raised := asyncio.run(one), BaseException):
                            raise raised
                    else:
                        _call(function, questions.only(i), self._timeout)
            except guests.Late:
                break
            except BaseException as again:
                guests.raise_if_of_the_user(again)
                place = i
                break
        said = described(error, _file_name(function))
        return RewardError(f"{_place(name, questions, place)} raised{said}")


def load(
    name: str,
    key: str = "task.reward",
    shipped: Mapping[str, Function] = SHIPPED,
) -> Function:
    """The function of a name: shipped, in a file, or in a module; `key` has the name.

    Raises:
        RewardError: it does not exist, or importing it fails.
    """
    if name in shipped:
        return shipped[name]
    source, colon, attribute = name.rpartition(":")
    if not colon:
        known = f"one of {', '.join(map(repr, shipped))}, or " if shipped else ""
        raise RewardError(
            f'{key} must be {known}"file.py:function" or "package.module:function", '
            f"got {messages.short(name)}"
        )
    try:
        with guests.received():
            module = _file(source) if source.endswith(".py") else _module(source)
    except BaseException as error:
        guests.raise_if_of_the_user(error)
        line = _line_of(error, Path(source).name)
        raise RewardError(
            f"{key}: cannot import {source}{line}: {_message(error)}"
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise RewardError(f"{key}: {source} has no function {attribute!r}")
    return function


def _file(path: str) -> Any:
    file = Path(path).expanduser()
    if not file.is_file():
        raise FileNotFoundError("no such file")
    name = f"jaxmem_rewards_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # for pickling, and for annotations
    spec.loader.exec_module(module)
    return module


def _module(name: str) -> Any:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # absent for `jaxmem`
    return importlib.import_module(name)


# -------------------------------------------------------------------- calls


def _is_async(function: Function) -> bool:
    """Whether it is awaited: a function, or an object with such a `__call__`."""
    is_coroutine = inspect.iscoroutinefunction
    return is_coroutine(function) or is_coroutine(type(function).__call__)


def _call(function: Function, questions: Questions, timeout: float | None) -> Any:
    """What a function returns, in a thread of its own if there is a timeout."""
    _, prompts, completions, columns = questions
    call = functools.partial(
        function,
        prompts=list(prompts),
        completions=list(completions),
        **{name: list(values) for name, values in columns.items()},
    )
    if timeout is None:
        return call()
    ((value, error),) = guests.together([call], timeout)
    if error is not None:
        raise error
    return value


async def _awaited(
    function: Function, questions: Questions, timeout: float | None
) -> Any:
    """What an async function returns, or raises, be it the end of the process."""

    async def call() -> Any:
        try:
            return await _call(function, questions, None)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            return error

    try:
        return await asyncio.wait_for(call(), timeout)
    except asyncio.CancelledError as error:  # of the function; nobody else cancels
        return error
    except TimeoutError:
        return guests.Late()


def described(error: BaseException, file_name: str) -> str:
    """What a function of a file raised, and in which line of it."""
    return f"{_line_of(error, file_name)} {type(error).__name__}: {_message(error)}"


def _checked(name: str, returned: Any, questions: Questions) -> np.ndarray:
    """Rewards as an array, None as NaN."""

    def wrong(said: str, i: int = 0) -> RewardError:
        return RewardError(f"{_place(name, questions, i)} returned {said}")

    count = len(questions.prompts)
    if not isinstance(returned, Sequence | np.ndarray) or isinstance(returned, str):
        raise wrong(f"{messages.short(returned)}, not a list of {count} rewards")
    if len(returned) != count:
        raise wrong(f"{len(returned)} rewards for {count} completions")
    out = np.full(count, np.nan)
    for i, value in enumerate(returned):
        if value is None:
            continue
        try:
            out[i] = checked(value)
        except ValueError as error:
            raise wrong(str(error), i) from error
    return out


def _place(name: str, questions: Questions, i: int) -> str:
    prompt = messages.short(questions.prompts[i])
    return f"reward {name}, prompt {prompt} ({questions.where[i]}):"


def _file_name(function: Function) -> str:
    """The name of the file that defines a function; empty for a built-in one."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return Path(code.co_filename).name if code else ""


def _line_of(error: BaseException, file_name: str) -> str:
    """The last line of the function's own file that raised, which is not ours."""
    lines = []
    trace = error.__traceback__
    while trace is not None:
        path = trace.tb_frame.f_code.co_filename
        if Path(path).name == file_name and path != __file__:
            lines.append(trace.tb_lineno)
        trace = trace.tb_next
    return f" (line {lines[-1]})" if lines else ""


def _message(error: BaseException) -> str:
    try:
        return messages.cut(str(error)) or type(error).__name__
    except Exception:  # its own `__str__` raises
        return type(error).__name__
