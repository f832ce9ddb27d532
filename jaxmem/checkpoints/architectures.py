"""Reads `config.json` of a checkpoint into a `ModelConfig`, strictly.

It is an error if a key is neither read by the model's family nor known to be irrelevant
to the model, or if the decoder does not implement a value: nothing is guessed.
"""

import dataclasses
import difflib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxmem.base import hub, messages
from jaxmem.base.fields import build
from jaxmem.base.ranges import integers
from jaxmem.checkpoints import coded_files, names, quantization
from jaxmem.checkpoints.bitsandbytes import CodedTensors
from jaxmem.checkpoints.config_reader import CheckpointError, Reader, read_object
from jaxmem.checkpoints.families import FAMILIES, WITH_IMAGES
from jaxmem.checkpoints.families.family import IGNORED, ONLY, Family, WithImages
from jaxmem.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """The content of a checkpoint's `config.json`."""

    path: Path  # of the file
    raw: Mapping[str, Any]  # the whole object, for saving; of a text part, its own
    model: ModelConfig  # in float32; the caller chooses dtypes
    max_positions: int  # maximum context length in tokens
    dtype: str | None  # of the stored weights, if given
    family: Family  # how weights are named
    images: WithImages | None = None  # the multimodal model that it is the text part of
    coding: str | None = None  # of matrices, "nf4" or "int8"; None: all are plain

    @property
    def text_part(self) -> bool:
        """True if this is the text part of a multimodal model."""
        return self.images is not None


# Keys that both parts of a multimodal model share.
_SHARED = (
    "bos_token_id", "dtype", "eos_token_id", "pad_token_id", quantization.KEY,
    "torch_dtype", "transformers_version",
)  # fmt: skip
_POSITIONS = integers(1, limit=2**31 - 1)  # tokens of a context: positions are int32


def read_config(directory: str | Path) -> CheckpointConfig:
    """Read `config.json` from a checkpoint's directory.

    Raises:
        CheckpointError: the file is missing, maybe because the directory is a run's, or
            asks for something that is not implemented; the message names the key.
    """
    path = Path(os.path.expanduser(directory)) / "config.json"
    name = str(directory)
    hint = hub.hint(name)
    if not path.parent.exists() and (hint or name.startswith("hf://")):
        raise CheckpointError(
            f"{name}: no such directory{hint}; in Python, "
            "jaxmem.checkpoints.local_directory downloads one"
        )
    if not path.exists() and (path.parent / "model" / path.name).exists():
        raise CheckpointError(
            f"{directory} is a run, not a checkpoint; name the model that it has "
            f"saved, {path.parent / 'model'}"
        )
    config = parse_config(path, read_object(path))
    return config if config.coding is None else _with_base(config)


def _with_base(config: CheckpointConfig) -> CheckpointConfig:
    """The config, with the base that the tensors of its directory are coded in."""
    assert config.coding is not None
    model = dataclasses.replace(config.model, base=config.coding)
    if any(config.path.parent.glob("model.safetensors*")):
        tensors = CodedTensors(config.path.parent, config.coding)
        prefixes = names.prefixes_of(tensors, config.family, config.images)
        naming = names.Naming(config.family, config.model, prefixes, tensors)
        fields = coded_files.base_fields(tensors, naming)
        model = dataclasses.replace(model, **fields)
    return dataclasses.replace(config, model=model)


def parse_config(path: Path, raw: Mapping[str, Any]) -> CheckpointConfig:
    """`read_config` of an object that was, or could be, in a file."""
    images = next(
        (m for m in WITH_IMAGES if m.model_type == raw.get("model_type")), None
    )
    if images is not None:
        raw = _text_part(path, raw, images)
    reader = Reader(path, raw, IGNORED)
    family = _find_family(reader)
    coding = quantization.read_coding(reader)
    fields: dict[str, Any] = {
        **family.read(reader),
        "pad_row": _pad_row(family, reader),
    }
    try:
        model = build(ModelConfig, fields)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    positions = reader.take(family.positions_key, int, within=_POSITIONS)
    key = "dtype" if "dtype" in raw else "torch_dtype"  # the newer one has precedence
    dtype = reader.take(key, (str, type(None)), None)
    dtype = dtype and dtype.removeprefix("torch.")
    return CheckpointConfig(path, raw, model, positions, dtype, family, images, coding)


def _pad_row(family: Family, reader: Reader) -> int | None:
    """The row that look-ups do not train; negative ids count from the last one."""
    pad = reader.take("pad_token_id", (int, type(None)), None)
    if pad is None or not family.freezes_pad_row:
        return None
    return pad if pad >= 0 else reader.raw["vocab_size"] + pad


def _text_part(
    path: Path, raw: Mapping[str, Any], images: WithImages
) -> dict[str, Any]:
    """The config of a multimodal model's text part, in the form of one of its own."""
    reader = Reader(path, raw, IGNORED | images.ignored)
    named = reader.strings("architectures") or [images.architecture]
    if named != [images.architecture]:
        raise reader.error(
            f"model_type {images.model_type!r} does not belong to "
            f"{messages.name(named[0])}"
        )
    text = reader.take("text_config", dict)
    quantization.read_coding(reader)
    tied = reader.take("tie_word_embeddings", bool, images.tied)
    reader.finish(ONLY)
    if text.get("tie_word_embeddings", tied) is not tied:
        raise reader.error(
            f"tie_word_embeddings is {tied}, and in text_config "
            f"{messages.short(text['tie_word_embeddings'])}"
        )
    shared = {key: raw[key] for key in _SHARED if key in raw}
    if shared.keys() & {"dtype", "torch_dtype"}:
        text = {k: v for k, v in text.items() if k not in ("dtype", "torch_dtype")}
    config = {"model_type": images.text[0], **images.defaults, **text, **shared}
    by_type = {family.model_type: family for family in FAMILIES}
    kind = config["model_type"]
    alone = by_type[kind if kind in images.text else images.text[0]].architecture
    return config | {"architectures": [alone], "tie_word_embeddings": tied}


def _find_family(reader: Reader) -> Family:
    """The family that a config names."""
    known = [family.architecture for family in FAMILIES]
    known += [images.architecture for images in WITH_IMAGES]
    named = reader.strings("architectures")
    for name in named:
        if name not in known:
            raise reader.error(
                f"architecture {messages.short(name)} is not implemented"
                f"{_say_known(name, known)}"
            )
    kind = reader.take("model_type", str)
    for family in FAMILIES:
        if family.model_type == kind:
            if named and family.architecture not in named:
                raise reader.error(f"model_type {kind!r} does not belong to {named[0]}")
            return family
    types = [each.model_type for each in (*FAMILIES, *WITH_IMAGES)]
    raise reader.error(
        f"model_type {messages.short(kind)} is not implemented{_say_known(kind, types)}"
    )


def _say_known(name: str, known: Sequence[str]) -> str:
    """The end of an error: known names like `name`, and the page that lists all."""
    close = difflib.get_close_matches(name[:100], known, n=5)
    similar = f"; the most similar ones that are: {', '.join(close)}" if close else ""
    return f"{similar}; docs/families.md lists all {len(known)}"
