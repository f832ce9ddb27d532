"""LoRA adapters in PEFT's layout: adapter_config.json, adapter_model.safetensors."""

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util

from jaxmem.checkpoints.families import standard
from jaxmem.checkpoints.reader import CheckpointError, Reader, read_object
from jaxmem.checkpoints.tensors import Tensors, new_directory, whole, write_tensors
from jaxmem.core import messages
from jaxmem.core.ranges import integers
from jaxmem.models.config import RANGES, ModelConfig
from jaxmem.models.decoder import Decoder
from jaxmem.models.lora import TARGETS, is_adapter

_CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"
_RANK = integers(1, limit=2**16)
_PREFIX = "base_model.model."
_MODULES = {
    target: standard.NAMES[
        f"blocks/{'attention' if i < 4 else 'feed_forward'}/{target}"
    ].rpartition(".")[2]
    for i, target in enumerate(TARGETS)
}
# PEFT options that change what an adapter computes, with the only values implemented.
_PLAIN = {
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "use_rslora": (False,),
    "use_dora": (False,),
    "modules_to_save": (None, []),
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


def save_adapter(
    directory: str | Path, decoder: Decoder, *, base: str = "", overwrite: bool = False
) -> None:
    """Save only a decoder's adapters, in PEFT's layout.

    Args:
        directory: to create; it appears once it is complete.
        decoder: with `lora_rank` above 0.
        base: name or directory of the adapted model, for those who load the adapter.
            For a multimodal model PEFT needs only the text part, as `save` writes it.
        overwrite: whether to replace an existing directory.

    Raises:
        CheckpointError: the decoder has no adapters, or the directory exists.
    """
    target, config = Path(os.path.expanduser(directory)), decoder.config
    if not config.lora_rank:
        raise CheckpointError(f"{target}: the decoder has no adapters to save")
    if target.exists() and not overwrite:
        raise CheckpointError(f"{target}: exists; name another, or give overwrite=True")
    with new_directory(target) as unfinished:
        write_tensors(unfinished, _tensors(decoder), one=_TENSORS)
        if unfinished is not None:
            described = json.dumps(_peft_config(config, base), indent=2)
            (unfinished / _CONFIG).write_text(described + "\n", "utf-8")


def with_adapter(model: ModelConfig, directory: str | Path) -> ModelConfig:
    """The config of a model with the adapters in a directory.

    Args:
        model: config of the adapted model.
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
    modules = _target_modules(reader)
    return dataclasses.replace(
        model,
        lora_rank=reader.take("r", int, within=_RANK),
        lora_alpha=reader.take("lora_alpha", float, within=RANGES["lora_alpha"]),
        lora_targets=tuple(t for t in TARGETS if _MODULES[t] in modules),
        lora_head="lm_head" in modules,
    )


def _target_modules(reader: Reader) -> list[str]:
    """Names of the target modules; a string would be a pattern."""
    known = (*_MODULES.values(), "lm_head")
    if isinstance(reader.raw.get("target_modules"), str):
        raise reader.error(
            f"target_modules [{messages.short(reader.raw['target_modules'])}] are not "
            "implemented as a pattern; list the modules' names"
        )
    modules = reader.strings("target_modules")
    unknown = sorted(set(modules) - set(known))
    if unknown:
        raise reader.error(
            f"target_modules [{messages.listing(unknown)}] are not implemented; known "
            f"are {', '.join(known)}"
        )
    if not modules:
        raise reader.error(f"target_modules must name some of {', '.join(known)}")
    return modules


def read_adapter(directory: str | Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Read the weights of adapters.

    Args:
        directory: of the adapter.
        wanted: the decoder's adapters, path to `jax.ShapeDtypeStruct`.

    Returns:
        Arrays by the same paths.

    Raises:
        CheckpointError: a tensor is missing, or has another shape.
    """
    tensors = Tensors(Path(os.path.expanduser(directory)), _TENSORS)
    weights = {}
    for path, like in wanted.items():
        stored = _stored(path, like.shape[0] if path.startswith("blocks/") else None)
        shape = like.shape[-2:]
        parts = [
            tensors.read(name, shape[::-1], (slice(None),) * 2).T for name in stored
        ]
        whole = np.stack(parts) if path.startswith("blocks/") else parts[0]
        weights[path] = jnp.asarray(whole, like.dtype)
    return weights


def _stored(path: str, layers: int | None) -> list[str]:
    """Names of the tensors of one adapter matrix, one per layer."""
    module, _, matrix = path.rpartition("/")
    name = standard.NAMES[module]
    kind = {"lora_a": "lora_A", "lora_b": "lora_B"}[matrix]
    name = f"{_PREFIX}{name}.{kind}.weight"
    return [name] if layers is None else [name.format(i) for i in range(layers)]


def _tensors(decoder: Decoder) -> Iterator[tuple[str, np.ndarray]]:
    """Yield names and matrices [out, in]."""
    weights = nnx.to_pure_dict(nnx.split(decoder)[1])
    flat: dict[str, Any] = dict(traverse_util.flatten_dict(weights, sep="/"))
    for path, weight in flat.items():
        if not is_adapter(path):
            continue
        stacked = path.startswith("blocks/")
        for i, name in enumerate(_stored(path, len(weight) if stacked else None)):
            yield name, whole(weight, i if stacked else None).T


def _peft_config(config: ModelConfig, base: str) -> dict[str, Any]:
    modules = [_MODULES[target] for target in config.lora_targets]
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
        "modules_to_save": None,
        "inference_mode": True,
        "init_lora_weights": True,
    }
