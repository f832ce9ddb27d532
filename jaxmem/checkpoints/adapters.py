"""LoRA adapters in PEFT's layout: adapter_config.json, adapter_model.safetensors."""

import collections
import dataclasses
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util

from jaxmem.base import messages
from jaxmem.base.ranges import integers
from jaxmem.checkpoints import names
from jaxmem.checkpoints.architectures import read_config
from jaxmem.checkpoints.families import FAMILIES
from jaxmem.checkpoints.families.family import Family
from jaxmem.checkpoints.reader import CheckpointError, Reader, read_object
from jaxmem.checkpoints.tensors import Tensors, new_directory, whole, write_tensors
from jaxmem.models.config import RANGES, ModelConfig
from jaxmem.models.decoder import Decoder
from jaxmem.models.lora import SAVED, TARGETS, is_adapter

_CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"
_RANK = integers(1, limit=2**16)
_PREFIX = "base_model.model."
# PEFT options that change what an adapter computes, with the only values implemented.
_PLAIN = {
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "use_dora": (False,),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layers_to_transform": (None,),
    "lora_bias": (False,),
    **dict.fromkeys(
        (
            "alora_invocation_tokens", "arrow_config", "kasa_config",
            "layer_replication", "monteclora_config", "target_parameters",
            "trainable_token_indices", "use_bdlora", "velora_config",
        ),
        (None, False),
    ),
    "use_qalora": (False, None),
}  # fmt: skip


def unadaptable(family: Family, targets: Iterable[str]) -> list[str]:
    """Those of `lora_targets` whose adapters PEFT's layout cannot say for a family.

    These are parts of joined matrices, matrices of experts, and those stored as
    [in, out].
    """
    modules = [_module(target) for target in targets]
    count = collections.Counter(family.names.values())
    return [
        module.rpartition("/")[2]
        for module in modules
        if count[family.names.get(module, "")] > 1
        or _of_experts(module) & family.names.keys()
        or (family.stored_as_in_out and module.startswith(family.stored_as_in_out))
    ]


def _of_experts(module: str) -> set[str]:
    """The names that a module of experts in the place of this one may have."""
    part, _, name = module.rpartition("/")
    return {f"{part}/experts/{name}", f"{part}/experts/{name}/kernel"}


def _module(target: str) -> str:
    """The decoder's module of one of `lora_targets`."""
    part = "attention" if TARGETS.index(target) < 4 else "feed_forward"
    return f"blocks/{part}/{target}"


def _modules(family: Family) -> dict[str, str]:
    """PEFT's name of each of `lora_targets` that it can adapt."""
    every = [target for target in TARGETS if _module(target) in family.names]
    lost = unadaptable(family, every)
    last = {
        target: family.names[_module(target)].rpartition(".")[2] for target in every
    }
    return {target: name for target, name in last.items() if target not in lost}


def save_adapter(
    directory: str | Path,
    decoder: Decoder,
    *,
    base: str = "",
    overwrite: bool = False,
) -> None:
    """Save only a decoder's adapters, in PEFT's layout.

    Args:
        directory: to create; it appears once it is complete.
        decoder: with `lora_rank` above 0.
        base: name or directory of the adapted model, for those who load the adapter.
            Modules have the names of its family if it is a directory, or else Llama's.
            For a multimodal model PEFT needs only the text part, as `save` writes it.
        overwrite: whether to replace an existing directory.

    Raises:
        CheckpointError: the decoder has no adapters, or of matrices that PEFT cannot
            adapt in this family, or the directory exists.
    """
    target, config = Path(os.path.expanduser(directory)), decoder.config
    if not config.lora_rank:
        raise CheckpointError(f"{target}: the decoder has no adapters to save")
    if target.exists() and not overwrite:
        raise CheckpointError(f"{target}: exists; name another, or give overwrite=True")
    is_here = bool(base) and (Path(base).expanduser() / "config.json").exists()
    family = read_config(base).family if is_here else FAMILIES[0]
    lost = unadaptable(family, config.lora_targets)
    if lost:
        raise CheckpointError(
            f"{target}: checkpoints of {family.model_type} have {', '.join(lost)} "
            "joined, transposed or of experts, so PEFT has no adapters of them; merge "
            "them instead"
        )
    with new_directory(target) as unfinished:
        write_tensors(unfinished, _tensors(decoder, family), one=_TENSORS)
        if unfinished is not None:
            described = json.dumps(_peft_config(config, family, base), indent=2)
            (unfinished / _CONFIG).write_text(described + "\n", "utf-8")


def with_adapter(
    model: ModelConfig, family: Family, directory: str | Path
) -> ModelConfig:
    """The config of a model with the adapters in a directory.

    Args:
        model: config of the adapted model.
        family: of it.
        directory: of the adapter.

    Returns:
        The config.

    Raises:
        CheckpointError: the directory does not hold one of PEFT's plain LoRA adapters.
    """
    path = Path(os.path.expanduser(directory)) / _CONFIG
    reader = Reader(path, read_object(path))
    kind = reader.take("peft_type", str)
    if kind != "LORA":
        raise reader.error(f"peft_type {messages.short(kind)} is not LORA")
    for key, plain in _PLAIN.items():
        value = reader.raw.get(key, plain[0])
        if value not in plain:
            raise reader.error(f"{key}={messages.short(value)} is not implemented")
    rank = reader.take("r", int, within=_RANK)
    alpha = reader.take("lora_alpha", float, within=RANGES["lora_alpha"])
    if reader.raw.get("use_rslora"):  # scaled by alpha / sqrt(r)
        alpha *= rank**0.5
    targets, head = _targets(reader, names.Naming(family, model))
    try:
        return dataclasses.replace(
            model,
            lora_rank=rank,
            lora_alpha=alpha,
            lora_targets=targets,
            lora_head=head,
            lora_saved=_saved(reader, family),
        )
    except ValueError as error:
        raise reader.error(str(error)) from error


def _targets(reader: Reader, naming: names.Naming) -> tuple[tuple[str, ...], bool]:
    """Those of `lora_targets` that PEFT's modules are, and whether the head is one."""
    known = _modules(naming.family)
    every = ", ".join((*known.values(), "lm_head"))
    modules = _module_names(reader, "target_modules")
    excluded = _module_names(reader, "exclude_modules")
    keys = {
        target: [
            name.removesuffix(".weight")
            for name in naming(f"{_module(target)}/kernel").names
        ]
        for target in known
    }
    keys["head"] = ["lm_head"]
    if not isinstance(modules, str):
        flat = [key for some in keys.values() for key in some]
        unknown = sorted({m for m in modules if not any(_is(m, key) for key in flat)})
        if unknown:
            raise reader.error(
                f"target_modules [{messages.listing(unknown)}] are not implemented; "
                f"known are {every}"
            )
    chosen = []
    for target, some in keys.items():
        of_layers = {
            _matches(modules, key) and not _matches(excluded, key) for key in some
        }
        if len(of_layers) > 1:
            raise reader.error(
                f"target_modules {messages.short(modules)} are {known[target]} of some "
                "layers alone, which is not implemented"
            )
        chosen += [target] if of_layers.pop() else []
    if not chosen:
        raise reader.error(f"target_modules must name some of {every}")
    head = "head" in chosen
    return tuple(chosen[:-1] if head else chosen), head


def _module_names(reader: Reader, key: str) -> str | list[str]:
    """PEFT's modules: a regular expression, "all-linear", or ends of names."""
    if not isinstance(value := reader.raw.get(key), str):
        return reader.strings(key)
    try:
        re.compile(value)
    except re.error as error:
        raise reader.error(f"{key} {messages.short(value)}: {error}") from error
    return value


def _matches(modules: str | list[str], key: str) -> bool:
    if modules == "all-linear":  # of PEFT: but for the head
        return key != "lm_head"
    if isinstance(modules, str):
        return re.fullmatch(modules, key) is not None
    return any(_is(module, key) for module in modules)


def _is(module: str, key: str) -> bool:
    return key == module or key.endswith(f".{module}")


def _savable(family: Family) -> dict[str, str]:
    """Names of `lora_saved` by PEFT's names of their modules."""
    found = {}
    for name, path in SAVED.items():
        tensor = family.names.get(path) or family.names.get(path.rpartition("/")[0])
        if tensor is not None:
            found[tensor.removesuffix(".weight").rpartition(".")[2]] = name
    return found


def _saved(reader: Reader, family: Family) -> tuple[str, ...]:
    """The matrices that are in the adapter whole."""
    known = _savable(family)
    modules = reader.strings("modules_to_save")
    unknown = sorted(set(modules) - known.keys())
    if unknown:
        raise reader.error(
            f"modules_to_save [{messages.listing(unknown)}] are not implemented; known "
            f"are {', '.join(known)}"
        )
    return tuple(name for module, name in known.items() if module in modules)


def read_adapter(
    directory: str | Path, naming: names.Naming, wanted: Mapping[str, Any]
) -> dict[str, Any]:
    """Read the weights of adapters.

    Args:
        directory: of the adapter.
        naming: of the adapted model, alone.
        wanted: the decoder's adapters, path to `jax.ShapeDtypeStruct`.

    Returns:
        Arrays by the same paths.

    Raises:
        CheckpointError: a tensor is missing, or has another shape.
    """
    tensors = Tensors(Path(os.path.expanduser(directory)), _TENSORS)
    weights = {}
    for path, like in wanted.items():
        if not is_adapter(path):
            weights[path] = _read_whole(tensors, naming(path), path, like)
            continue
        stored, order = _stored(path, naming)
        shape = like.shape[-2:]
        parts = [
            tensors.read(name, shape[::-1], (slice(None),) * 2).T for name in stored
        ]
        whole = np.stack(parts) if len(like.shape) > 2 else parts[0]
        whole = whole if order is None else whole[..., np.array(order)]
        weights[path] = jnp.asarray(whole, like.dtype)
    return weights


def _read_whole(
    tensors: Tensors, stored: names.Stored, path: str, like: Any
) -> jnp.ndarray:
    """A matrix of `modules_to_save`."""
    (name,) = stored.names
    stored = stored._replace(names=(_PREFIX + name,))
    read = names.reader(tensors, stored, path, like)
    return jnp.asarray(read((slice(None),) * len(like.shape)))


def _stored(
    path: str, naming: names.Naming
) -> tuple[list[str], tuple[int, ...] | None]:
    """Names of the tensors of one adapter matrix, and the order of its outputs."""
    module, _, matrix = path.rpartition("/")
    adapted = naming(f"{module}/kernel")
    kind = {"lora_a": "lora_A", "lora_b": "lora_B"}[matrix]
    stored = [
        f"{_PREFIX}{name.removesuffix('.weight')}.{kind}.weight"
        for name in adapted.names
    ]
    return stored, adapted.order if matrix == "lora_b" else None


def _tensors(decoder: Decoder, family: Family) -> Iterator[tuple[str, np.ndarray]]:
    """Yield names and matrices [out, in]."""
    weights = nnx.to_pure_dict(nnx.split(decoder)[1])
    flat: dict[str, Any] = dict(traverse_util.flatten_dict(weights, sep="/"))
    naming = names.Naming(family, decoder.config)
    whole_ones = {SAVED[name] for name in decoder.config.lora_saved}
    for path, weight in flat.items():
        if path in whole_ones:
            (name,), matrix = naming(path).names, whole(weight, None)
            yield _PREFIX + name, matrix.T if naming(path).transposed else matrix
        if not is_adapter(path):
            continue
        stored, order = _stored(path, naming)
        for i, name in enumerate(stored):
            matrix = whole(weight, i if len(weight.shape) > 2 else None)
            matrix = matrix if order is None else matrix[..., np.argsort(order)]
            yield name, matrix.T


def _peft_config(config: ModelConfig, family: Family, base: str) -> dict[str, Any]:
    known = _modules(family)
    modules = [known[target] for target in config.lora_targets]
    saved = [
        module for module, name in _savable(family).items() if name in config.lora_saved
    ]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.lora_rank,
        "lora_alpha": config.lora_alpha,
        "lora_dropout": 0.0,
        "target_modules": modules + (["lm_head"] if config.lora_head else []),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": saved or None,
        "inference_mode": True,
        "init_lora_weights": True,
    }
