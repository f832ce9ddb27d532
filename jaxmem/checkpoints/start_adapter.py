"""The adapter that training starts from: its directory, its base and its weights."""

import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flax import traverse_util

from jaxmem.checkpoints import base_record, names
from jaxmem.checkpoints.adapter_config import CONFIG, read_adapter_config
from jaxmem.checkpoints.adapters import read_adapter
from jaxmem.checkpoints.architectures import CheckpointConfig, read_config
from jaxmem.checkpoints.config_reader import read_object, write_object
from jaxmem.checkpoints.directories import new_directory
from jaxmem.checkpoints.tokenizer_files import check_tokens
from jaxmem.checkpoints.weight_files import kernels_of
from jaxmem.models import lora
from jaxmem.models.config import BASE_FIELDS, ModelConfig

_LORA = "lora_rank", "lora_alpha", "lora_targets", "lora_head", "lora_saved"


def adapter_directory(name: str | Path) -> Path | None:
    """The directory of an adapter, or of the one that a run has left; else None."""
    path = Path(name).expanduser()
    wholes = path / "config.json", path / "model" / "config.json"
    if any(whole.exists() for whole in wholes):
        return None
    candidates = path, path / "adapter"
    return next((x for x in candidates if (x / CONFIG).exists()), None)


def with_start(model: ModelConfig, kept: Path | None = None) -> ModelConfig:
    """The config with the base and the settings of the adapter that it starts from.

    Args:
        model: whose `checkpoint` may name the adapter, in place of its base.
        kept: copy of the adapter that a run has, which is read in its place.

    Raises:
        ValueError: there is no such adapter, training cannot go on with it, or the
            config has another rank, alpha or matrices.
    """
    if model.checkpoint is None:
        return model
    name, base = model.adapter, model.checkpoint
    is_gone = kept is not None and not Path(base).expanduser().exists()
    if is_gone or adapter_directory(base) is not None:
        if name not in (None, base):
            raise ValueError(
                f"model.checkpoint={base!r} is an adapter, and model.adapter={name!r} "
                "names another: name the base by model.checkpoint, or merge one of "
                f"them: jaxmem export {base} --merge --out NEW"
            )
        name, base = base, None
    if name is None:
        return model
    directory = kept or adapter_directory(name)
    if directory is None:
        raise ValueError(
            f"model.adapter={name!r}: name an adapter (a directory with {CONFIG}) or "
            "a run that has saved one (adapter/)"
        )
    if base is None:
        advice = f"name it by model.checkpoint, with model.adapter={name}"
        base = str(base_record.directory_of(directory, advice))
    config = read_config(base)
    check_tokens(directory, config.path.parent)
    described = _describe(config, model, directory, name)
    _check_choices(model, described, name)
    fields = _LORA if described.base is None else (*_LORA, *BASE_FIELDS)
    taken = {field: getattr(described, field) for field in fields}
    return dataclasses.replace(model, checkpoint=base, adapter=name, **taken)


def _describe(
    config: CheckpointConfig, model: ModelConfig, directory: Path, name: str
) -> ModelConfig:
    """The model of a checkpoint with the adapter, on the base that `model` chooses."""
    read = config.model
    if model.base is not None and config.coding is None:
        chosen = {field: getattr(model, field) for field in BASE_FIELDS}
        read = dataclasses.replace(read, **chosen)
    described = read_adapter_config(read, config.family, directory)
    if described.normalised:
        raise ValueError(
            f"{name} is a DoRA adapter, which jaxmem cannot train further; merge it, "
            f"and start from NEW: jaxmem export {name} --merge --out NEW"
        )
    return described.model


def _check_choices(model: ModelConfig, described: ModelConfig, name: str) -> None:
    """Raise for settings of adapters that are not those of the start."""
    default, differing = ModelConfig(), []
    for field in _LORA:
        ours, theirs = getattr(model, field), getattr(described, field)
        plain = getattr(default, field)
        if isinstance(theirs, tuple):
            ours, theirs, plain = sorted(ours), sorted(theirs), sorted(plain)
        if ours not in (theirs, plain):
            differing.append(field)
    if differing:
        facts = [
            f"model.{field}={getattr(model, field)!r} differs from "
            f"{getattr(described, field)!r}"
            for field in differing
        ]
        removals = " ".join(f"model.{field}=None" for field in differing)
        raise ValueError(
            f"{', '.join(facts)} of the adapter {name}: leave these settings to the "
            f"adapter ({removals}), or merge it and start from NEW: jaxmem export "
            f"{name} --merge --out NEW"
        )


def read_start(
    directory: Path, model: ModelConfig, shapes: Mapping[str, Any]
) -> dict[str, Any]:
    """The weights of an adapter, arrays nested by name, for the model of `with_start`.

    Args:
        directory: of the adapter.
        model: with the base as its `checkpoint`.
        shapes: `jax.ShapeDtypeStruct`s of all weights, nested by name.

    Raises:
        CheckpointError: as `checkpoints.load` with an adapter.
    """
    assert model.checkpoint is not None, "with_start has found it"
    config = read_config(model.checkpoint)
    described = read_adapter_config(model, config.family, directory)
    flat: dict[str, Any] = dict(traverse_util.flatten_dict(dict(shapes), sep="/"))
    expected = {path: x for path, x in flat.items() if lora.is_saved(path, model)}
    base = kernels_of(model.checkpoint, model.param_dtype)
    naming = names.Naming(config.family, model)
    read = read_adapter(described, naming, expected, base)
    return traverse_util.unflatten_dict(read, sep="/")


def copy_adapter(source: Path, target: Path, base: str) -> None:
    """Copy an adapter, without its tokenizer, and record its base by absolute path.

    Raises:
        CheckpointError: the target has files of others.
    """
    name = base_record.BaseName.of(base)
    with new_directory(target, replace=True) as unfinished:
        if unfinished is None:
            return
        for path in (base_record.NAME, "chat_template.jinja"):
            if (source / path).exists():
                shutil.copyfile(source / path, unfinished / path)
        for path in source.glob("adapter_model*safetensors*"):
            shutil.copyfile(path, unfinished / path.name)
        described = read_object(source / CONFIG) | name.keys()
        write_object(unfinished / CONFIG, described)
