"""Files that a run has from its start, and the export of its result."""

import contextlib
import datetime
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxmem import checkpoints
from jaxmem.base import files, processes
from jaxmem.models.decoder import Decoder, ModelConfig
from jaxmem.models.own_model import LanguageModel, OwnModel
from jaxmem.train import (
    about,
    keys,
    known_architecture,
    model_factory,
    model_names,
    precision,
)
from jaxmem.train.jobs.job import Job
from jaxmem.train.output.progress import say
from jaxmem.train.output.run_facts import ABOUT
from jaxmem.train.settings import JobConfig

_STARTED = "started.txt"  # the time of a run's start
END_OF_TURN = "end_of_turn.txt"  # the token that ends the turns it learned from


def texts(job: Job, operative_text: str, config: JobConfig) -> dict[str, str]:
    """Files that a run has from its start: settings, vocabulary and facts.

    `config` is as the user gave it: `job.config` has the sizes of a checkpoint, too.
    """
    contents = {
        "operative.gin": operative_text,
        "settings.gin": keys.differing(model_names.recorded(config)) + "\n",
    }
    if processes.is_first():
        contents[ABOUT] = json.dumps(about.facts(job), indent=1) + "\n"
    if job.tokenizer is not None:
        contents["tokenizer.json"] = job.tokenizer.to_str()
    if job.reads.today is not None:
        contents[_STARTED] = f"{job.reads.today:%Y-%m-%d %H:%M:%S}\n"
    if (end := job.reads.end_of_turn()) is not None:
        contents[END_OF_TURN] = end + "\n"
    return contents


def started(directory: str) -> datetime.datetime:
    """The time at which a directory's run started; now, if none did."""
    path = Path(directory).expanduser() / _STARTED
    if path.exists():
        return datetime.datetime.fromisoformat(path.read_text("utf-8").strip())
    return datetime.datetime.now()


def read_summary(directory: Path, result: str) -> dict[str, Any] | None:
    """The content of summary.json of a run that has left its result; else None."""
    if not (directory / result).exists():
        return None
    with contextlib.suppress(OSError, ValueError, RecursionError):
        summary = json.loads((directory / "summary.json").read_text("utf-8"))
        return summary if isinstance(summary, dict) else None
    return None


def leave(directory: Path, decoder: LanguageModel, console: Console, job: Job) -> None:
    """Export a run's result for other libraries, and print where.

    Adapters are saved in "adapter", in PEFT's layout; a whole model in "model": as a
    checkpoint of the same kind as the one that it started from, or else of the known
    architecture that computes the same, with weights in model.param_dtype. All
    processes of a run call this.
    """
    source = decoder.config.checkpoint
    if decoder.config.lora_rank:
        target = directory / "adapter"
        checkpoints.save_adapter(
            target,
            known(decoder),
            base=source or "",
            chat_template=job.reads.chat_template,
            overwrite=True,
        )
        if source is not None:
            add_end(target, job.reads.end_of_turn(), Path(source).expanduser())
    else:
        target = directory / "model"
        try:
            export(target, decoder, job, directory)
        except checkpoints.CheckpointError as error:
            if source is not None and decoder.config.factory is None:
                raise
            say(console, f"{files.shown(target)} is not saved: {error}")
            if isinstance(decoder, OwnModel) and processes.is_first():
                write_text(directory / model_factory.TEXT, decoder, job, directory)
            return
    loader = "PEFT" if decoder.config.lora_rank else "transformers"
    line = f"saved in {files.shown(target)}, for {loader} to load"
    stored = decoder.config.param_dtype
    if not decoder.config.lora_rank and precision.is_narrower(stored, decoder):
        line += f"; weights are in {stored} there (model.param_dtype)"
    if decoder.config.lora_rank and source is None:
        line = (
            f"saved in {files.shown(target)}: adapters of random weights "
            "(model.checkpoint=None), which only the run's checkpoints contain"
        )
        if known_architecture.reason_without(decoder.config) is None:
            line += "; jaxmem export --merge saves the whole model"
    adapts = source if decoder.config.lora_rank else None
    if decoder.config.lora_rank and decoder.config.base is not None:
        line += f"; adapters of a base in {decoder.config.base}"
    if adapts is not None and checkpoints.read_config(adapts).text_part:
        line += (
            ", together with the text part of the checkpoint once that is saved "
            "separately"
        )
    say(console, line)


def leave_best(
    directory: Path, decoder: LanguageModel, console: Console, job: Job
) -> None:
    """Export the best evaluation's model to "best" of a run's directory, as `leave`."""
    tokenizer = directory / "tokenizer.json"
    if processes.is_first() and tokenizer.exists():
        files.write_whole(
            directory / "best" / tokenizer.name, tokenizer.read_text("utf-8")
        )
    leave(directory / "best", decoder, console, job)


def export(target: Path, decoder: LanguageModel, job: Job, directory: Path) -> None:
    """Save a run's whole model as a checkpoint, if an architecture computes it."""
    source, reads = decoder.config.checkpoint, job.reads
    decoder = known(decoder)
    if source is None:
        checkpoints.save_new(
            target, decoder, text=job.text(directory), max_positions=reads.longest,
            overwrite=True,
        )  # fmt: skip
        return
    checkpoints.save(
        target, decoder, like=source, chat_template=reads.chat_template, overwrite=True
    )
    add_end(target, reads.end_of_turn())


def write_text(target: Path, model: LanguageModel, job: Job, directory: Path) -> None:
    """Write the text files of a model without a known architecture."""
    target.mkdir(parents=True, exist_ok=True)
    source, reads = job.config.model.checkpoint, job.reads
    if source is None:
        # Of any decoder with this vocabulary: only the text files are read.
        decoder = ModelConfig(vocab_size=model.config.vocab_size)
        described = checkpoints.describe(decoder, reads.longest)
        text = job.text(directory)
        checkpoints.write_text_files(target, described, text, "float32")
        return
    source = Path(source).expanduser()
    checkpoints.copy_text_files(source, target, reads.chat_template)
    add_end(target, reads.end_of_turn())


def known(model: LanguageModel) -> Decoder:
    """The model as a `Decoder`; raise for a model of `model.factory`."""
    if isinstance(model, OwnModel):
        reason = known_architecture.reason_without(model.config)
        raise checkpoints.CheckpointError(
            f"{reason}; jaxmem generate, score and eval read the run itself, and "
            "jaxmem export writes its weights"
        )
    return model


def add_end(target: Path, end: str | None, like: Path | None = None) -> None:
    """Name the token that ends turns, if there is one, in a saved directory."""
    if end is not None and processes.is_first():
        checkpoints.add_end(target, end, like)
