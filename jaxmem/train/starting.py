"""Starting a run from a checkpoint, and exporting its result."""

import dataclasses
import functools
from pathlib import Path
from typing import TypeVar

import tokenizers
from rich.console import Console

from jaxmem import checkpoints
from jaxmem.core import processes
from jaxmem.data import documents as data, tasks, vocabulary
from jaxmem.data.chat import Templates, read_template
from jaxmem.data.documents import DataConfig
from jaxmem.models import lora
from jaxmem.models.decoder import Decoder, ModelConfig
from jaxmem.train import files, keys
from jaxmem.train.jobs import teachers
from jaxmem.train.jobs.config import (
    Config,
    DistillJobConfig,
    DpoJobConfig,
    GrpoJobConfig,
)
from jaxmem.train.program import ProgramConfig

JobConfig = Config | DpoJobConfig | GrpoJobConfig | DistillJobConfig
_Job = TypeVar("_Job", bound=ProgramConfig)


def resolved(config: _Job) -> _Job:
    """The config with its checkpoint's sizes; with adapters, other weights are frozen.

    If `optimizer.trainable` is given, it selects the trained weights instead. A student
    without a checkpoint has its teacher's vocabulary.

    Args:
        config: of the job.

    Returns:
        The config.

    Raises:
        ValueError: `model.checkpoint` cannot be read, or a size of `model` differs; or
            a teacher is missing, or has another vocabulary.
    """
    model = checkpoints.with_checkpoint(config.model)
    if isinstance(config, DistillJobConfig):
        model = teachers.of_same_vocabulary(config, model)
    changes: dict = {"model": model}
    if config.model.lora_rank and config.optimizer.trainable is None:
        trainable = lora.TRAINABLE
        changes["optimizer"] = dataclasses.replace(
            config.optimizer, trainable=trainable
        )
    return dataclasses.replace(config, **changes)  # pyright: ignore


def load_tokenizer(config: DataConfig, model: ModelConfig) -> tokenizers.Tokenizer:
    """The tokenizer of the checkpoint, or one trained on the text."""
    if model.checkpoint is not None:
        return vocabulary.of_checkpoint(model.checkpoint)
    return data.load_tokenizer(config)


def load_template(
    config: DataConfig, model: ModelConfig, tokenizer: tokenizers.Tokenizer
) -> Templates | None:
    """The checkpoint's chat template, read at its first use; None without one."""
    if model.checkpoint is None:
        return None
    return template_of(model.checkpoint, config.chat_template, tokenizer)


def template_of(
    checkpoint: str, path: str | None, tokenizer: tokenizers.Tokenizer
) -> Templates:
    """Likewise of a checkpoint's directory, or of the template's own path."""
    added = tokenizer.get_added_tokens_decoder().values()
    special = [token.content for token in added if token.special]
    return functools.cache(functools.partial(read_template, checkpoint, path, special))


def texts(
    config: JobConfig,
    operative_text: str,
    tokenizer: tokenizers.Tokenizer | None = None,
) -> dict[str, str]:
    """Files that a run has from its start: settings and vocabulary.

    Args:
        config: of the job.
        operative_text: a gin file with all settings.
        tokenizer: of the run's text, if it has one.
    """
    contents = {"operative.gin": operative_text}
    if operative_text:
        contents["settings.gin"] = keys.differing(config) + "\n"
    if tokenizer is not None:
        contents["tokenizer.json"] = tokenizer.to_str()
    return contents


def leave(
    directory: Path, decoder: Decoder, console: Console, config: JobConfig
) -> None:
    """Export a run's result for other libraries, and print where.

    Adapters are saved in "adapter", in PEFT's layout; a whole model in "model": as a
    checkpoint of the same kind as the one that it started from, or else of the known
    architecture that computes the same. All processes of a run call this.

    Args:
        directory: of the run.
        decoder: after its last step.
        console: receives the line.
        config: of the job.
    """
    source = decoder.config.checkpoint
    if decoder.config.lora_rank:
        target = directory / "adapter"
        checkpoints.save_adapter(target, decoder, base=source or "", overwrite=True)
    else:
        target = directory / "model"
        try:
            export(target, decoder, config, directory / "tokenizer.json")
        except checkpoints.CheckpointError as error:
            if source is not None:
                raise
            console.print(
                f"no {files.shown(target)}: {error}", highlight=False, soft_wrap=True
            )
            return
    line = f"saved in {files.shown(target)}, for transformers to load"
    adapts = source if decoder.config.lora_rank else None
    if adapts is not None and checkpoints.read_config(adapts).text_part:
        line += ", with the text part of the checkpoint alone, once that is saved"
    console.print(line, highlight=False, soft_wrap=True)


def leave_best(
    directory: Path, decoder: Decoder, console: Console, config: JobConfig
) -> None:
    """`leave` in "best" of a run's directory, where a checkpoint of the best is kept.

    Args:
        directory: of the run.
        decoder: after the best evaluation.
        console: receives the line.
        config: of the job.
    """
    tokenizer = directory / "tokenizer.json"
    if processes.is_first() and tokenizer.exists():
        files.write_whole(
            directory / "best" / tokenizer.name, tokenizer.read_text("utf-8")
        )
    leave(directory / "best", decoder, console, config)


def export(target: Path, decoder: Decoder, config: JobConfig, tokenizer: Path) -> None:
    """Save a whole model of a run as a checkpoint.

    Args:
        target: directory to create, or to replace.
        decoder: without adapters.
        config: of the job.
        tokenizer: path of the vocabulary that the run trained; where there is none, the
            words are those of the task.

    Raises:
        CheckpointError: no known architecture is that of the decoder.
    """
    source, template = decoder.config.checkpoint, template_path(config)
    if source is not None:
        checkpoints.save(
            target, decoder, like=source, chat_template=template, overwrite=True
        )
        return
    text = text_of(config, tokenizer)
    positions = max_positions(config)
    checkpoints.save_new(
        target, decoder, text=text, max_positions=positions, overwrite=True
    )


def max_positions(config: JobConfig) -> int:
    """The longest sequence that a job trains on, in tokens."""
    if isinstance(config, GrpoJobConfig) or (
        isinstance(config, DistillJobConfig) and config.is_on_policy
    ):
        return config.task.prompt_length + config.sampling.max_new_tokens
    return config.data.sequence_length


def template_path(config: JobConfig) -> str | None:
    """The path of a job's own chat template, if any."""
    if isinstance(config, GrpoJobConfig) or (
        isinstance(config, DistillJobConfig) and config.is_on_policy
    ):
        return config.task.chat_template
    return config.data.chat_template


def text_of(config: JobConfig, path: Path) -> checkpoints.Text:
    """How a run from random weights reads text.

    Args:
        config: of the job; a student reads text as its teacher does.
        path: of the tokenizer that was trained; without the file, the arithmetic
            task's own words.
    """
    if isinstance(config, DistillJobConfig):
        return teachers.text(config, template_path(config))
    content, template = None, template_path(config)
    if template is not None:
        content = Path(template).expanduser().read_text("utf-8")
    if not path.exists():
        pad, eos = tasks.VOCABULARY[:2]
        return checkpoints.Text(vocabulary.of_words(), None, eos, pad, content)
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    names = vocabulary.BOS, vocabulary.EOS, vocabulary.PAD
    return checkpoints.Text(tokenizer, *names, content)
