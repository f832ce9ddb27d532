"""The interface of a job, between a run and the steps that it takes."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from jaxmem.train.checkpoint import Checkpoints
from jaxmem.train.evaluation import Evaluated
from jaxmem.train.metrics import AnyMetrics
from jaxmem.train.program import TrainState


class Resumable(Protocol):
    """What a run saves and restores of a job."""

    def initial_state(self) -> TrainState:
        """The state before the first step."""
        ...

    def restored_state(
        self, checkpoints: Checkpoints, step: int
    ) -> tuple[TrainState, dict[str, Any]]:
        """The state after a saved step, and what `get_state` returned then."""
        ...

    def evaluate(self, state: TrainState, taken: Any) -> Evaluated | None:
        """Score what is held out; None where nothing is."""
        ...

    def get_state(self) -> dict[str, Any]:
        """Return the position in the job's data, as JSON-able values."""
        ...

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from the position that `get_state` returned."""
        ...


class Job(Resumable, Protocol):
    """The interface of a job, whose steps a run takes."""

    def step(self, number: int, state: TrainState) -> tuple[TrainState, AnyMetrics]:
        """Take the step of that number, from 1; the given state is consumed."""
        ...


@runtime_checkable
class Dispatches(Resumable, Protocol):
    """A job whose next step starts before the numbers of the last one are read."""

    def dispatch(
        self, number: int, state: TrainState
    ) -> tuple[TrainState, Callable[[], AnyMetrics]]:
        """Start a step, as `Job.step`; a call of what is returned waits for its end."""
        ...


@runtime_checkable
class ShowsSamples(Protocol):
    """A job with something to read."""

    def samples(self) -> list[dict[str, Any]]:
        """Rows of the report's table: prompt, tokens, logprobs and reward (or None)."""
        ...
