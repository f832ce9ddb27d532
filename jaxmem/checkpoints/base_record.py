"""The base of an adapter, as its directory records it: its name, and its codes.

The name is in adapter_config.json. The codes are in base.json, which PEFT and
transformers do not read. Without it, an adapter of a 16-bit checkpoint that was trained
on its codes (`model.base`) would be added to other matrices.
"""

import dataclasses
import os
from pathlib import Path
from typing import Any

from jaxmem.base import hub, messages
from jaxmem.checkpoints.config_reader import (
    CheckpointError,
    Reader,
    read_object,
    write_object,
)
from jaxmem.models.coded_weights import BASES
from jaxmem.models.config import BASE_FIELDS, PLAIN, ModelConfig

NAME = "base.json"
_CONFIG, _KEY = "adapter_config.json", "base_model_name_or_path"


@dataclasses.dataclass(frozen=True)
class BaseName:
    """The name of an adapter's base, as adapter_config.json records it."""

    name: str  # OWNER/NAME of the Hub, or a directory's absolute path
    revision: str | None = None  # of the Hub

    @classmethod
    def of(cls, base: str) -> "BaseName":
        """The name of a base: of the Hub, or else the absolute path of a directory."""
        if (model := hub.model_of(base)) is not None:
            return cls(model.repository, model.revision)
        path = Path(base).expanduser()
        is_directory = bool(base) and path.is_dir()
        return cls(os.path.abspath(path) if is_directory else base)

    @classmethod
    def recorded(cls, directory: Path) -> "BaseName":
        """The name that an adapter's directory records, relative paths as absolute."""
        reader = Reader(directory / _CONFIG, read_object(directory / _CONFIG))
        name = reader.take(_KEY, (str, type(None)), None)
        revision = reader.take("revision", (str, type(None)), None)
        return dataclasses.replace(cls.of(name or ""), revision=revision)

    def directory(self) -> Path:
        """The directory that has the base here, downloaded from the Hub if need be.

        Raises:
            HubError: the Hub cannot serve it.
        """
        model = hub.parse(self.name)
        if model is None:
            return Path(self.name)
        named = hub.HubModel(model.repository, model.revision or self.revision)
        return Path(hub.local_directory(str(named)))

    def keys(self) -> dict[str, str | None]:
        """The keys of adapter_config.json that name it."""
        return {_KEY: self.name, "revision": self.revision}


def directory_of(directory: Path, advice: str) -> Path:
    """The directory of the base that an adapter's directory names.

    Raises:
        CheckpointError: it is no checkpoint here; the message ends with the advice.
    """
    base = BaseName.recorded(directory)
    if not base.name:
        raise CheckpointError(
            f"{directory / _CONFIG}: {_KEY} is empty, as in an adapter of random "
            "weights (model.checkpoint=None). Only a run with checkpoints "
            "(run.checkpoint_every) can draw these weights again: name that run, or "
            f"{advice}"
        )
    try:
        found = base.directory()
    except hub.HubError as error:
        raise CheckpointError(
            f"{directory / _CONFIG}: {_KEY} is {error}; or {advice}"
        ) from error
    if not (found / "config.json").exists():
        raise CheckpointError(
            f"{directory / _CONFIG}: {_KEY} {base.name!r} is not the directory of a "
            f"checkpoint on this machine; {advice}"
        )
    return found


def write(directory: Path, model: ModelConfig) -> None:
    """Record the base of a model, if it has one."""
    if model.base is not None:
        fields = {name: getattr(model, name) for name in BASE_FIELDS}
        write_object(directory / NAME, fields)


def with_recorded(model: ModelConfig, directory: Path) -> ModelConfig:
    """The model with the base that an adapter's directory records, if it does.

    A model that has this base already, without saying of which matrices, gets them
    from the record: codes of others would be another base.

    Raises:
        CheckpointError: the record is none, or the model is coded in another base.
    """
    path = directory / NAME
    if not path.exists():
        return model
    fields = _read(path)
    if model.base not in (None, fields["base"]):
        raise CheckpointError(
            f"{path}: the adapter was trained on a base in {fields['base']}, but the "
            f"checkpoint's matrices are in {model.base}; to use the adapter with them "
            "nevertheless, remove the file"
        )
    if any(getattr(model, name) != PLAIN[name] for name in BASE_FIELDS[1:]):
        return model  # its files, or the caller, say which matrices are coded
    try:
        return dataclasses.replace(model, **fields)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _read(path: Path) -> dict[str, Any]:
    """The fields of a record."""
    reader = Reader(path, read_object(path))
    base = reader.take("base", str)
    if base not in BASES:
        raise reader.error(f"base must be nf4 or int8, got {messages.short(base)}")
    targets = reader.take("base_targets", (list, type(None)), None)
    fields = {
        "base": base,
        "base_targets": None
        if targets is None
        else tuple(reader.strings("base_targets")),
        "base_plain": tuple(reader.strings("base_plain")),
        "base_double": reader.take("base_double", bool, True),
    }
    reader.finish({})
    return fields
