"""base.json of an adapter's directory: the codes of the base that it was trained on.

PEFT and transformers do not read it. Without it, an adapter of a 16-bit checkpoint that
was trained on its codes (`model.base`) would be added to other matrices.
"""

import dataclasses
from pathlib import Path
from typing import Any

from jaxmem.base import messages
from jaxmem.checkpoints.config_reader import (
    CheckpointError,
    Reader,
    read_object,
    write_object,
)
from jaxmem.models.coded_weights import BASES
from jaxmem.models.config import BASE_FIELDS, PLAIN, ModelConfig

NAME = "base.json"


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
            f"{path}: the adapter was trained on a base in {fields['base']}, and the "
            f"checkpoint's matrices are in {model.base}; remove the file to add it to "
            "them all the same"
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
