"""Reward functions, a user's own or shipped ones, called on a batch of completions.

    score(prompts, completions, **columns) -> list[float | None]

TRL's and Tunix's reward functions have this signature. A prompt is a string or a list
of messages, as in the data; a completion is a string, or for messages a list of one
assistant message. Columns are lists of the other fields of the data, and of
`completion_ids` and `max_new_tokens`. A function with a parameter `trainer_state` gets
a `TrainerState`. A reward of None does not count.
"""

import dataclasses
import functools
import inspect
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxmem.base import guests, messages, user_code
from jaxmem.data import event_loop
from jaxmem.data.math_answers import AnswerRewards, MathAnswers
from jaxmem.data.unit_tests import UnitTests, protections, sources_of
from jaxmem.data.verifiers import SHIPPED

Function = Callable[..., Any]
_LARGEST = 1e18  # float32 holds the sum of the squares of so many
# Names of the arguments that are no columns of the data.
ARGUMENTS = (
    "prompts", "completions", "completion_ids", "max_new_tokens", "trainer_state",
)  # fmt: skip
_SILENT_CALLS = 3  # in a row without any reward, after which a run has nothing to learn


class RolloutError(ValueError):
    """Something outside the trainer cannot complete a rollout.

    The state is still that before the step.
    """


class RewardError(RolloutError):
    """A reward function cannot be used; the message names it and the prompt."""


def checked(reward: Any) -> float:
    """The reward as a finite number that float32 can hold squared.

    Raises:
        ValueError: it is no finite number, or float32 cannot hold its square in a sum;
            the message begins with the reward.
    """
    try:
        number = float(reward)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{messages.short(reward)}, which is not a finite number")
    if abs(number) > _LARGEST:
        raise ValueError(
            f"{messages.short(reward)}; advantages are computed in float32, for "
            f"rewards of at most {_LARGEST:g}"
        )
    return number


@dataclasses.dataclass(frozen=True)
class TrainerState:
    """The position of a run, with the names of TRL's argument `trainer_state`."""

    global_step: int = 0  # steps that have been taken
    max_steps: int = 0  # `run.steps`


class RewardArguments(NamedTuple):
    """Arguments of reward functions, lists of N each."""

    where: Sequence[str]  # names of the prompts' records in errors
    prompts: Sequence[Any]
    completions: Sequence[Any]
    columns: Mapping[str, Sequence[Any]]
    trainer_state: TrainerState = TrainerState()

    def only(self, i: int) -> "RewardArguments":
        """The arguments for the i-th completion alone."""
        columns = {name: [values[i]] for name, values in self.columns.items()}
        return RewardArguments(
            [self.where[i]],
            [self.prompts[i]],
            [self.completions[i]],
            columns,
            self.trainer_state,
        )


class Rewards(NamedTuple):
    """Rewards of N completions.

    A completion without a reward is to be left out of the mean of its group and of the
    loss: `total` is NaN where every function returned None, or one of them failed.
    """

    total: np.ndarray  # float32 [N], weighted sum over the functions
    parts: dict[str, np.ndarray]  # float64 [N] by function; NaN for None and failures
    failed: np.ndarray  # bool [N], True where a function failed
    # bool [N], True where a function found no answer that it can read; None where no
    # function tells that
    unparsed: np.ndarray | None = None


def in_form_of(prompt: Any, text: str) -> Any:
    """A completion as text or as a message, as its prompt is; TRL does the same."""
    if isinstance(prompt, str):
        return text
    return [{"role": "assistant", "content": text}]


class Outcome(NamedTuple):
    """The value that a call returned, or else its error."""

    value: Any
    error: BaseException | None


class Scorer:
    """Several reward functions and their weights.

    Args:
        names: of shipped functions, or "file.py:function", or
            "package.module:function".
        weights: one per function; None: 1 each.
        timeout: maximum seconds of a call, or None. Plain functions without a timeout
            are called in the main thread, those with one in a thread of their own.
            Async functions run in the event loop of the process.
        on_error: `task.reward_errors`. "raise"; or "mask": a function that raises or
            takes too long gives no reward. It is called again for one completion at a
            time, and completions for which it fails have no total.
        unrewarded: `task.unrewarded`. "mask": a completion for which all functions
            return None has no total; or "raise".
        named: names of the functions and of the data in errors of what is missing.

    Raises:
        UserCodeError: a function cannot be imported.
    """

    def __init__(
        self,
        names: Sequence[str],
        weights: Sequence[float] | None = None,
        timeout: float | None = None,
        on_error: Literal["raise", "mask"] = "raise",
        unrewarded: Literal["mask", "raise"] = "mask",
        named: tuple[str, str] = ("task.reward", "task.source"),
    ):
        self._key, self._source = named
        self._functions = {
            name: user_code.load(name, self._key, SHIPPED) for name in names
        }
        self._weights = [1.0] * len(names) if weights is None else list(weights)
        self._timeout, self._on_error = timeout, on_error
        self._unrewarded = unrewarded
        self._failures = Counter[tuple[str, type]]()  # by function and exception
        self._silent = 0  # last calls in a row that gave no reward

    def __call__(self, arguments: RewardArguments) -> Rewards:
        """Call all functions: async ones together, plain ones beside them in turn.

        Returns:
            The rewards, whose total is NaN where a completion has none.

        Raises:
            RewardError: a function ends the process, changes its directory, closes its
                output, or returns a wrong number of rewards or one that float32 cannot
                hold with its square; it raises, or exceeds the timeout, and `on_error`
                is "raise"; all return None and `unrewarded` is "raise"; or three calls
                in a row gave no reward at all.
        """
        graded = {
            name: self._grade(name, outcome, arguments)
            for name, outcome in self._call_all(arguments).items()
        }
        parts = {name: graded[name].rewards for name in self._functions}
        failed = np.any([of_one.failed for of_one in graded.values()], axis=0)
        table = np.stack(list(parts.values()))
        total = np.nansum(table * np.c_[self._weights], axis=0)
        total[np.isnan(table).all(axis=0) | failed] = np.nan
        self._check_total(total, failed, arguments)
        told = [x.unparsed for x in graded.values() if x.unparsed is not None]
        unparsed = np.any(told, axis=0) if told else None
        return Rewards(total.astype(np.float32), parts, failed, unparsed)

    def check(self, entries: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Raise unless the data have the columns that functions read.

        Args:
            entries: columns of the records, by entry of `task.source`.

        Raises:
            RewardError: a function requires a column that no record has, a shipped one
                reads a column without any value; or, where all functions are shipped
                and read columns, an entry has a value of none of them.
        """
        records = [record for of_entry in entries.values() for record in of_entry]
        columns = {name for record in records for name in record}
        for name, function in self._functions.items():
            for column in _required_columns(function) - columns:
                raise RewardError(
                    f"{self._key}: {name} requires the argument {column!r}, which is "
                    f"not a column of {self._source}; {self._rename}, or give the "
                    "argument a default"
                )
        read = {name: _column_read_by(name) for name in self._functions}
        for name, column in read.items():
            if column is not None and not _has_value(records, [column]):
                raise RewardError(
                    f"{self._key}: {name} reads the column {column!r}, which has no "
                    f"value in any record of {self._source}; {self._rename}"
                )
        if any(isinstance(f, UnitTests) for f in self._functions.values()):
            _check_tests(entries)
        for function in self._functions.values():
            if isinstance(function, MathAnswers):
                try:
                    function.check()
                except ImportError as error:
                    raise RewardError(str(error)) from error
        for entry, of_entry in entries.items():
            known = [column for column in read.values() if column is not None]
            if len(known) == len(read) and not _has_value(of_entry, known):
                columns_read = ", ".join(dict.fromkeys(known))
                raise RewardError(
                    f"{self._source}: no record of {entry} has a value in a column "
                    f"that {self._key} reads ({columns_read}); {self._rename}"
                )

    @property
    def _rename(self) -> str:
        section, dot, _ = self._key.partition(".")
        return f"rename one by {section}.columns" if dot else "rename one"

    def lines(self) -> list[str]:
        """Protections of functions that run programs, to be printed by a run."""
        runs = [isinstance(f, UnitTests) for f in self._functions.values()]
        return [protections().sentence] if any(runs) else []

    @property
    def _async_names(self) -> list[str]:
        """Names of functions that are awaited."""
        return [name for name, f in self._functions.items() if _is_async(f)]

    def _check_total(
        self, total: np.ndarray, failed: np.ndarray, arguments: RewardArguments
    ) -> None:
        names, silent = ", ".join(self._functions), np.isnan(total)
        if self._unrewarded == "raise" and (silent & ~failed).any():
            where = _name_prompt(names, arguments, int((silent & ~failed).argmax()))
            raise RewardError(
                f"{where} returned no reward (None); task.unrewarded='mask' leaves "
                "such completions out"
            )
        self._silent = self._silent + 1 if silent.all() else 0
        if self._silent == _SILENT_CALLS:
            raise RewardError(
                f"{_name_prompt(names, arguments, 0)} no completion of the last "
                f"{_SILENT_CALLS} calls has a reward; {int(failed.sum())} of "
                f"{len(failed)} failed in this call, and for the others all functions "
                "returned None"
            )
        for i in np.flatnonzero(~silent).tolist():
            try:
                checked(float(total[i]))
            except ValueError as error:
                where = _name_prompt(names, arguments, i)
                said = f"{where} gave, with task.reward_weights, {error}"
                raise RewardError(said) from error

    def _call_all(self, arguments: RewardArguments) -> dict[str, Outcome]:
        """Call all functions for all completions; return outcomes by function."""
        started: dict[str, event_loop.Awaited] = {}
        outcomes: dict[str, Outcome] = {}
        try:
            with guests.received():
                for name in self._async_names:
                    started[name] = self._start_coroutine(
                        self._functions[name], arguments
                    )
                for name, function in self._functions.items():
                    if name not in started:
                        (call,) = self._prepare_calls(function, [arguments])
                        outcomes[name] = _run_call(call)
                for name, awaited in started.items():
                    outcomes[name] = _run_call(awaited.result)
        except guests.Misbehaved as error:
            raise self._to_error(next(iter(started)), arguments, 0, error) from error
        finally:
            for awaited in started.values():
                awaited.cancel()
        return {name: outcomes[name] for name in self._functions}

    def _start_coroutine(
        self, function: Function, arguments: RewardArguments
    ) -> event_loop.Awaited:
        async def coroutine() -> Any:
            return await _call_function(function, arguments, None)

        return event_loop.of_process().start(coroutine(), self._timeout)

    def _prepare_calls(
        self, function: Function, parts: Sequence[RewardArguments]
    ) -> list[Callable[[], Any]]:
        """Calls of a function for each part; async ones are started at once."""
        if _is_async(function):
            return [self._start_coroutine(function, part).result for part in parts]
        return [
            functools.partial(_call_function, function, part, self._timeout)
            for part in parts
        ]

    def _call_each(self, name: str, arguments: RewardArguments) -> Iterator[Outcome]:
        """Yield the outcomes of a function for one completion at a time.

        It ends after a call that exceeds the timeout.
        """
        parts = [arguments.only(i) for i in range(len(arguments.prompts))]
        for call in self._prepare_calls(self._functions[name], parts):
            outcome = _run_call(call)
            yield outcome
            if isinstance(outcome.error, guests.Late):
                return

    def _grade(
        self, name: str, outcome: Outcome, arguments: RewardArguments
    ) -> "_Graded":
        """Rewards of one function; a failure is raised or masked, by `on_error`."""
        count, error = len(arguments.prompts), outcome.error
        if error is None:
            rewards = _check_returned(name, outcome.value, arguments)
            return _Graded(rewards, np.zeros(count, bool), _unparsed(outcome.value))
        if self._on_error == "raise" or not _is_failure(error):
            raise self._find_failure(name, arguments, error) from error
        graded = _Graded(np.full(count, np.nan), np.ones(count, bool))
        if isinstance(error, guests.Late):
            self._count_failures(name, arguments, 0, error, count)
            return graded
        late = 0
        for i, (value, again) in enumerate(self._call_each(name, arguments)):
            if again is None:
                graded.rewards[i] = _check_returned(name, value, arguments.only(i))[0]
                graded.failed[i] = False
                if (told := _unparsed(value)) is not None:
                    before = graded.unparsed
                    known = np.zeros(count, bool) if before is None else before
                    known[i] = told[0]
                    graded = graded._replace(unparsed=known)
                continue
            if not _is_failure(again):
                raise self._to_error(name, arguments, i, again) from again
            if isinstance(again, guests.Late):
                late = count - i
            self._count_failures(name, arguments, i, again, late or 1)
        return graded

    def _count_failures(
        self,
        name: str,
        arguments: RewardArguments,
        i: int,
        error: BaseException,
        completions: int,
    ) -> None:
        """Count failures; warn at the first, the tenth, the hundredth, ... of them."""
        key = name, type(error)
        before = self._failures[key]
        self._failures[key] += completions
        if len(str(self._failures[key])) > len(str(before)) or not before:
            failure = self._to_error(name, arguments, i, error)
            warnings.warn(
                f"{failure}; completions left out for failures of this kind so far: "
                f"{self._failures[key]}",
                stacklevel=1,
            )

    def _find_failure(
        self, name: str, arguments: RewardArguments, error: BaseException
    ) -> RewardError:
        """The error of a call, with the first prompt for which it occurs again."""
        index = 0
        if not isinstance(error, guests.Misbehaved | guests.Late):
            for i, (_, again) in enumerate(self._call_each(name, arguments)):
                if again is not None:
                    index = 0 if isinstance(again, guests.Late) else i
                    break
        return self._to_error(name, arguments, index, error)

    def _to_error(
        self, name: str, arguments: RewardArguments, i: int, error: BaseException
    ) -> RewardError:
        where = _name_prompt(name, arguments, i)
        if isinstance(error, guests.Late):
            seconds = self._timeout or 0
            return RewardError(f"{where} took longer than task.timeout={seconds:g} s")
        if isinstance(error, guests.Misbehaved):  # or a function that ran beside it
            names = ", ".join(dict.fromkeys([name, *self._async_names]))
            return RewardError(f"{_name_prompt(names, arguments, i)} {error}")
        said = user_code.described(error, self._functions[name])
        return RewardError(f"{where} raised{said}")


class _Graded(NamedTuple):
    """Rewards of one function for N completions."""

    rewards: np.ndarray  # float64 [N]; NaN for None and failures
    failed: np.ndarray  # bool [N]
    unparsed: np.ndarray | None = None  # as in `Rewards`


# ------------------------------------------------------------- columns of the data


def _required_columns(function: Function) -> set[str]:
    """Columns without which a function cannot be called."""
    try:
        parameters = inspect.signature(function, follow_wrapped=False).parameters
    except (TypeError, ValueError):  # a built-in function
        return set()
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    return {
        name
        for name, parameter in parameters.items()
        if parameter.kind in kinds and parameter.default is inspect.Parameter.empty
    } - set(ARGUMENTS)


def _column_read_by(name: str) -> str | None:
    """The column that a shipped function reads; None: it reads none, or is a user's."""
    if name not in SHIPPED:
        return None
    parameters = set(inspect.signature(SHIPPED[name]).parameters)
    return next(iter(parameters & {"answer", "pattern", "schema", "tests"}), None)


def _check_tests(entries: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Raise for the first record whose tests cannot be run."""
    for entry, records in entries.items():
        for record in records:
            if record.get("tests") is not None:
                try:
                    sources_of(record["tests"])
                except ValueError as error:
                    value = messages.short(record["tests"])
                    raise RewardError(
                        f"task.source: a record of {entry} has the tests {value}: "
                        f"{error}"
                    ) from error


def _has_value(records: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> bool:
    return any(record.get(name) is not None for record in records for name in columns)


# -------------------------------------------------------------------- calls


def _is_async(function: Function) -> bool:
    """True for an async function, or an object whose `__call__` is one."""
    is_coroutine = inspect.iscoroutinefunction
    return is_coroutine(function) or is_coroutine(type(function).__call__)


def _run_call(call: Callable[[], Any]) -> Outcome:
    """Run a call, restore the state of the process, and return the outcome."""
    try:
        with guests.received():
            return Outcome(call(), None)
    except BaseException as error:
        guests.raise_if_of_the_user(error)
        return Outcome(None, error)


def _is_failure(error: BaseException) -> bool:
    """True if an error affects its call alone, and not the process."""
    return isinstance(error, Exception) and not isinstance(error, guests.Misbehaved)


def _call_function(
    function: Function, arguments: RewardArguments, timeout: float | None
) -> Any:
    """Call a function, in a thread of its own if there is a timeout."""
    call = functools.partial(
        function,
        prompts=list(arguments.prompts),
        completions=list(arguments.completions),
        **{name: list(values) for name, values in arguments.columns.items()},
    )
    if _names_trainer_state(function):
        call = functools.partial(call, trainer_state=arguments.trainer_state)
    if timeout is None:
        return call()
    ((value, error),) = guests.together([call], timeout)
    if error is not None:
        raise error
    return value


def _names_trainer_state(function: Function) -> bool:
    try:
        return "trainer_state" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # a built-in function
        return False


def _check_returned(name: str, returned: Any, arguments: RewardArguments) -> np.ndarray:
    """The rewards that a function returned, as an array with NaN for None."""

    def wrong(said: str, i: int = 0) -> RewardError:
        return RewardError(f"{_name_prompt(name, arguments, i)} returned {said}")

    count = len(arguments.prompts)
    values = _to_sequence(returned)
    if values is None:
        raise wrong(f"{messages.short(returned)}, not a list of {count} rewards")
    if len(values) != count:
        raise wrong(f"{len(values)} rewards for {count} completions")
    out = np.full(count, np.nan)
    for i, value in enumerate(values):
        if value is None:
            continue
        try:
            out[i] = checked(value)
        except ValueError as error:
            raise wrong(str(error), i) from error
    return out


def _unparsed(returned: Any) -> np.ndarray | None:
    """Booleans [N] of `AnswerRewards`; None for other lists of rewards."""
    if not isinstance(returned, AnswerRewards):
        return None
    return np.array(returned.unparsed, bool)


def _to_sequence(returned: Any) -> Sequence[Any] | None:
    """The elements of a sequence, or of an array of numpy, jax or torch."""
    if not isinstance(returned, Sequence) and hasattr(returned, "tolist"):
        try:
            returned = returned.tolist()
        except Exception:  # such as of a tensor without data
            return None
    is_list = isinstance(returned, Sequence) and not isinstance(returned, str | bytes)
    return returned if is_list else None


def _name_prompt(name: str, arguments: RewardArguments, i: int) -> str:
    prompt = messages.short(arguments.prompts[i])
    return f"reward {name}, prompt {prompt} ({arguments.where[i]}):"
