"""The architecture of `config.json` that the model of a run has, if it has one."""

import dataclasses

from jaxmem import checkpoints
from jaxmem.models.config import ModelConfig

_ANY = 1024  # entries of a vocabulary, or positions: no architecture depends on them


def reason_without(model: ModelConfig) -> str | None:
    """The reason why no `config.json` can name a model; None if one can."""
    if model.factory is not None:
        return (
            f"the model of model.factory={model.factory!r} has no architecture that "
            "config.json can name"
        )
    if model.checkpoint is not None:
        return None
    sized = dataclasses.replace(model, vocab_size=model.vocab_size or _ANY)
    try:
        checkpoints.describe_known(sized, _ANY)
    except checkpoints.CheckpointError as error:
        return str(error)
    return None


def warning(model: ModelConfig, has_checkpoints: bool) -> str | None:
    """A line about a run that leaves no model for transformers; None for others."""
    reason = reason_without(model)
    if reason is None:
        return None
    left = "adapters without their base" if model.lora_rank else "no model/"
    reads = "jaxmem generate, score and eval read the run's checkpoints"
    if not has_checkpoints:
        reads = (
            "run.checkpoint_every=None keeps no checkpoint either, so that the weights "
            "are lost at the end: set it"
        )
    elif model.factory is not None:
        reads += ", and jaxmem export writes its weights"
    else:
        reads += "; to save a model for transformers, change these settings"
    return f"the run will leave {left}, because {reason}; {reads}"
