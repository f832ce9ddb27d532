"""Starting a run from a checkpoint, and exporting its result."""

import dataclasses
import functools
from pathlib import Path
from typing import TypeVar

import jax
import tokenizers
from rich.console import Console

from jaxmem import checkpoints
from jaxmem.core import processes
from jaxmem.data import documents as data, vocabulary
from jaxmem.data.chat import Templates, read_template
from jaxmem.data.documents import DataConfig
from jaxmem.models import lora
from jaxmem.models.decoder import Decoder, ModelConfig
from jaxmem.train import files
from jaxmem.train.program import DecoderProgram, ProgramConfig, TrainState

_Job = TypeVar("_Job", bound=ProgramConfig)


def resolved(config: _Job) -> _Job:
    """The config with its checkpoint's sizes; with adapters, other weights are frozen.

    If `optimizer.trainable` is given, it selects the trained weights instead.

    Args:
        config: of the job.

    Returns:
        The config.

    Raises:
        ValueError: `model.checkpoint` cannot be read, or a size of `model` differs.
    """
    changes: dict = {"model": checkpoints.with_checkpoint(config.model)}
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


def leave(directory: Path, decoder: Decoder, console: Console) -> None:
    """Export a run's result for other libraries, and print where.

    Adapters are saved in "adapter", in PEFT's layout; a whole model that started from a
    checkpoint in "model", as a checkpoint of the same kind. Otherwise nothing is saved.

    Args:
        directory: of the run.
        decoder: after its last step.
        console: receives the line.
    """
    source = decoder.config.checkpoint
    if source is None and not decoder.config.lora_rank:
        return
    if jax.process_count() > 1:
        console.print("no model to load is saved: its weights are in several processes")
        return
    if decoder.config.lora_rank:
        target = directory / "adapter"
        checkpoints.save_adapter(target, decoder, base=source or "", overwrite=True)
    else:
        assert source is not None
        target = directory / "model"
        checkpoints.save(target, decoder, like=source, overwrite=True)
    said = f"saved in {target}, for transformers to load"
    adapts = source if decoder.config.lora_rank else None
    if adapts is not None and checkpoints.read_config(adapts).text_part:
        said += ", with the text part of the checkpoint alone, once that is saved"
    console.print(said, highlight=False, soft_wrap=True)


def leave_best(
    directory: Path,
    state: TrainState | None,
    program: DecoderProgram,
    frozen: dict,
    console: Console,
) -> None:
    """`leave` in "best" of a run's directory, where a checkpoint of the best is kept.

    Args:
        directory: of the run.
        state: of the best evaluation; None: there is nothing to save.
        program: of the run.
        frozen: the weights that are not trained.
        console: receives the line.
    """
    if state is None:
        return
    tokenizer = directory / "tokenizer.json"
    if processes.is_first() and tokenizer.exists():
        files.write_whole(directory / "best" / tokenizer.name, tokenizer.read_text())
    leave(directory / "best", program.model(state.params, frozen), console)
