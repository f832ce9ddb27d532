"""LoRA adapters in PEFT's layout: adapter_config.json, adapter_model.safetensors."""

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxmem.base import messages
from jaxmem.checkpoints import adapter_tensors, base_record, names
from jaxmem.checkpoints.adapter_config import (
    CONFIG,
    MERGE,
    AdapterConfig,
    describe_adapter,
    site_labels,
)
from jaxmem.checkpoints.adapter_tensors import PREFIX
from jaxmem.checkpoints.architectures import read_config
from jaxmem.checkpoints.base_record import BaseName
from jaxmem.checkpoints.config_reader import CheckpointError, write_object
from jaxmem.checkpoints.directories import (
    TOKENIZER_FILES,
    check_target,
    copy_text_files,
    new_directory,
)
from jaxmem.checkpoints.families import FAMILIES
from jaxmem.checkpoints.families.family import Family
from jaxmem.checkpoints.tensors import Tensors, whole, write_tensors
from jaxmem.models.config import SAVED
from jaxmem.models.decoder import Decoder
from jaxmem.models.lora import is_adapter
from jaxmem.models.weights import by_path

_TENSORS = "adapter_model.safetensors"


def save_adapter(
    directory: str | Path,
    decoder: Decoder,
    *,
    base: str = "",
    named: BaseName | None = None,
    chat_template: str | Path | None = None,
    overwrite: bool = False,
) -> None:
    """Save a decoder's adapters in PEFT's layout, with the tokenizer of their base.

    Args:
        directory: to create; it appears once it is complete.
        decoder: with `lora_rank` above 0.
        base: name or directory of the adapted model, for those who load the adapter. Of
            a directory, the absolute path is recorded, tokenizer and chat template are
            copied, and modules have the names of its family; or else those of the first
            family that has all adapted matrices, Llama's if possible. For a multimodal
            model PEFT needs only the text part, as `save` writes it.
        named: how the base is recorded, for those who have no such directory.
        chat_template: path of a template that replaces the base's.
        overwrite: True if an adapter that is there is replaced.

    Raises:
        CheckpointError: the decoder has no adapters, or the directory exists.
    """
    target, config = Path(os.path.expanduser(directory)), decoder.config
    if not config.lora_rank:
        raise CheckpointError(f"{target}: the decoder has no adapters to save")
    check_target(target, overwrite)
    source = Path(base).expanduser()
    is_here = bool(base) and (source / "config.json").exists()
    family = read_config(source).family if is_here else _family_of_adapters(decoder)
    _warn_of_confusion(target, decoder, family)
    with new_directory(target, overwrite) as unfinished:
        write_tensors(unfinished, _adapter_tensors(decoder, family), single=_TENSORS)
        if unfinished is not None:
            described = describe_adapter(decoder, family)
            described |= (named or BaseName.of(base)).keys()
            write_object(unfinished / CONFIG, described)
            base_record.write(unfinished, config)
            if is_here:
                copy_text_files(source, unfinished, chat_template, TOKENIZER_FILES)


def _family_of_adapters(decoder: Decoder) -> Family:
    """The first family, Llama's if possible, that has all adapted matrices.

    Qwen3-Next's has those of all `lora_targets`.
    """
    paths = [path for path in by_path(decoder) if path.endswith("/lora_a")]
    kernels = [path.removesuffix("lora_a") + "kernel" for path in paths]
    namings = (names.Naming(family, decoder.config) for family in FAMILIES)
    return next(x.family for x in namings if all(map(x.has, kernels)))


def _warn_of_confusion(target: Path, decoder: Decoder, family: Family) -> None:
    """Warn of adapters that PEFT would put elsewhere; they are read here as saved.

    Where files have a tensor for each expert, but for Qwen2-MoE's, PEFT 0.21 takes
    every matrix named as an expert's for experts.
    """
    naming = names.Naming(family, decoder.config)
    of_each = any(name.count("{}") == 2 for name in family.names.values())
    if not of_each or family.model_type == "qwen2_moe":
        return
    sites = adapter_tensors.sites(by_path(decoder), naming)
    labels = site_labels(
        [site for site in sites if not site.parameter], naming
    ).values()
    confused = "gate_proj", "up_proj", "down_proj"
    others = [label for label in dict.fromkeys(labels) if label.endswith(confused)]
    if others:
        warnings.warn(
            f"{target}: PEFT 0.21 reads the adapters of {messages.listing(others)} in "
            f"{family.model_type} as adapters of experts; for PEFT and transformers, "
            "merge the adapters into the weights with `jaxmem export --merge`",
            stacklevel=3,
        )


def read_adapter(
    adapter: AdapterConfig,
    naming: names.Naming,
    expected: Mapping[str, Any],
    base: Callable[[str], Any],
) -> dict[str, Any]:
    """Read the weights of adapters, arrays by the paths of `expected`.

    Norms that DoRA has learned are at the path of the matrix that they are of, with
    "lora_norm" in place of "kernel".

    Args:
        adapter: its description.
        naming: of the decoder with adapters.
        expected: shapes and dtypes of the adapters and of whole matrices, by path.
        base: returns a weight of the base by its path, of which the file may have a
            copy.

    Raises:
        CheckpointError: a tensor is missing, has another shape, or is not used.
    """
    tensors, weights = Tensors(adapter.directory, _TENSORS), {}
    read = adapter_tensors.AdapterReader(tensors, naming, adapter.modules)
    for path, like in expected.items():
        if not is_adapter(path):
            weights[path] = _read_whole(tensors, naming(path), path, like)
            read.used.update(PREFIX + name for name in naming(path).names)
            continue
        weights[path] = read.weight(path, like)
        if adapter.normalised and path.endswith("lora_b"):
            weights[path.removesuffix("b") + "norm"] = read.norms(path, like)
    _refuse_others(tensors, read.used, naming, base)
    return weights


def _refuse_others(
    tensors: Tensors, used: set[str], naming: names.Naming, base: Callable[[str], Any]
) -> None:
    """Raise for a tensor that is not used and no copy of one of the base.

    PEFT copies embedding and head beside an adapter of either of them.
    """
    copied: dict[str, str] = {}
    for path in SAVED.values():
        (name,) = naming(path).names
        module = PREFIX + name.removesuffix(".weight")
        copied |= dict.fromkeys(
            (f"{module}.weight", f"{module}.base_layer.weight"), path
        )
    for name in tensors:
        if name in used:
            continue
        if name not in copied:
            raise CheckpointError(
                f"{tensors.file_of(name)}: tensor {messages.name(name)} belongs to no "
                "matrix that can have an adapter"
            )
        if not _is_copy(tensors, name, copied[name], naming, base):
            raise CheckpointError(
                f"{tensors.file_of(name)}: tensor {name} differs from the base's "
                "tensor, and PEFT would replace it, which is not implemented; load "
                f"both with PEFT, call {MERGE}, and use NEW"
            )


def _is_copy(
    tensors: Tensors,
    name: str,
    path: str,
    naming: names.Naming,
    base: Callable[[str], Any],
) -> bool:
    """True if a tensor [V, D] of an adapter has the values of the base's.

    They are compared in the one of both types that has less precision.
    """
    shape = naming.config.vocab_size or 0, naming.config.hidden
    copy = tensors.read(name, shape, (slice(None), slice(None)))
    is_table = path == SAVED["embed"] or naming.config.tied
    weight = whole(base(SAVED["embed"] if is_table else path), None)
    weight = weight if is_table else weight.T
    dtype = min(copy.dtype, weight.dtype, key=lambda dtype: dtype.itemsize)
    return np.array_equal(copy.astype(dtype), weight.astype(dtype))


def _read_whole(
    tensors: Tensors, stored: names.Stored, path: str, like: Any
) -> jnp.ndarray:
    """A matrix of `modules_to_save`."""
    (name,) = stored.names
    stored = stored._replace(names=(PREFIX + name,))
    read = names.reader(tensors, stored, path, like)
    return jnp.asarray(read((slice(None),) * len(like.shape)))


def _adapter_tensors(
    decoder: Decoder, family: Family
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield names and matrices [out, in]."""
    flat = by_path(decoder)
    naming = names.Naming(family, decoder.config)
    for path in sorted(SAVED[name] for name in decoder.config.lora_saved):
        (name,), matrix = naming(path).names, whole(flat[path], None)
        yield PREFIX + name, matrix.T if naming(path).transposed else matrix
    yield from adapter_tensors.written(flat, naming)
