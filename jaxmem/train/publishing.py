"""Cards of a run's results, and their upload to the Hub at its end."""

from pathlib import Path

from rich.console import Console

from jaxmem.base import files, hub, processes
from jaxmem.checkpoints import model_card
from jaxmem.train import cards, known_architecture
from jaxmem.train.jobs.job import Job
from jaxmem.train.output.progress import say
from jaxmem.train.settings import JobConfig
from jaxmem.train.state import ownership


def finish(job: Job, directory: Path, console: Console) -> None:
    """Write the cards of a run's results, and upload the result if run.push says so."""
    if processes.is_first():
        _write_cards(job, directory)
        if job.config.run.push is not None:
            _push(job, directory, console)


def _write_cards(job: Job, directory: Path) -> None:
    """Write the cards that the result, and the best evaluation's, lack in a run."""
    model, name = job.config.model, ownership.result_of(job.config)
    checkpoint = model.checkpoint
    base = None if checkpoint is None else hub.recorded(checkpoint)
    for folder in (directory, directory / "best"):
        target = folder / name
        lacks_card = target.is_dir() and not (target / model_card.NAME).exists()
        if name in ownership.SAVED and lacks_card:
            shown = job.config.run.push or str(files.shown(target))
            cards.write(target, shown, cards.base_of(target, base), directory)


def check_push(config: JobConfig) -> None:
    """Raise a HubError unless the result of a run can be uploaded at its end."""
    if not config.model.lora_rank and (
        reason := known_architecture.reason_without(config.model)
    ):
        raise hub.HubError(
            f"run.push={config.run.push!r}: there will be no model to upload, because "
            f"{reason}; leave run.push out"
        )
    try:
        hub.check_push(config.run.push or "")
    except hub.HubError as error:
        raise hub.HubError(f"run.push: {error}") from error


def _push(job: Job, directory: Path, console: Console) -> None:
    """Upload a run's result; a failure is printed with advice."""
    run, target = job.config.run, directory / ownership.result_of(job.config)
    assert run.push is not None
    private, is_own = run.push_private, model_card.is_own
    if not target.is_dir():
        say(console, f"run.push: there is no {files.shown(target)} to upload")
        return
    try:
        address = hub.push(target, run.push, private=private, is_own=is_own)
    except hub.HubError as error:
        flag = " --private" if private else ""
        again = f"jaxmem export {files.shown(directory)} --push {run.push}{flag}"
        say(
            console,
            f"run.push: {error}; the run is complete; to try again, run: {again}",
        )
    else:
        say(console, f"pushed to {address}")
