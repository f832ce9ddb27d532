"""What every job does with its steps: take them, and leave the model behind."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from jaxmem.train import starting
from jaxmem.train.loop import Run
from jaxmem.train.program import DecoderProgram, TrainState
from jaxmem.train.starting import JobConfig
from jaxmem.train.steps import Dispatches, Job


def train_and_leave(
    run: Run,
    job: Job | Dispatches,
    program: DecoderProgram,
    frozen: Any,
    texts: Mapping[str, str],
    console: Console,
    config: JobConfig,
) -> TrainState:
    """Take a run's remaining steps; export the last model, and the best one.

    Args:
        run: the run.
        job: whose steps to take.
        program: of the model.
        frozen: its frozen weights.
        texts: as in `Run.take_steps`.
        console: receives where the models are.
        config: of the job.

    Returns:
        The state after the last step.

    Raises:
        What `Run.take_steps` does.
    """
    state = run.take_steps(job, texts)
    model = program.model(state.params, frozen)
    starting.leave(run.out_dir, model, console, config)
    if (best := run.best_state(job)) is not None:
        model = program.model(best.params, frozen)
        starting.leave_best(run.out_dir, model, console, config)
    return state
