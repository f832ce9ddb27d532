"""Loads a checkpoint's weights into a sharded decoder, and saves them."""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx, traverse_util

from jaxmem import remat
from jaxmem.base import messages
from jaxmem.base.fields import value_of, values_of
from jaxmem.checkpoints import merging, names, quantization
from jaxmem.checkpoints.adapter_config import AdapterConfig, read_adapter_config
from jaxmem.checkpoints.adapters import read_adapter
from jaxmem.checkpoints.architectures import CheckpointConfig, read_config
from jaxmem.checkpoints.bitsandbytes import CodedTensors
from jaxmem.checkpoints.coded_files import StoredCodes
from jaxmem.checkpoints.config_reader import CheckpointError, write_object
from jaxmem.checkpoints.config_writer import (
    FREE,
    Text,
    describe_known,
    write_text_files,
)
from jaxmem.checkpoints.directories import (
    TOKENIZER_FILES,
    check_target,
    copy_text_files,
    new_directory,
)
from jaxmem.checkpoints.encoding import EncodedKernels
from jaxmem.checkpoints.families import FAMILIES, ropes
from jaxmem.checkpoints.families.family import Family
from jaxmem.checkpoints.tensors import Tensors, write_tensors
from jaxmem.models import coded_weights, lora
from jaxmem.models.config import BASE_FIELDS, DTYPES, PLAIN, UNTIED, ModelConfig
from jaxmem.models.decoder import Decoder, abstract_decoder
from jaxmem.models.training_head import HeadConfig
from jaxmem.models.weights import by_path, join_weights

# The sharding of a weight, or a function of its path ("blocks/attention/query/kernel")
# and shape.
Placement = (
    jax.sharding.Sharding | Callable[[str, tuple[int, ...]], jax.sharding.Sharding]
)


def load(
    directory: str | Path,
    *,
    dtype: str | None = None,
    param_dtype: str | None = None,
    sharding: Placement | None = None,
    head: HeadConfig | None = None,
    policy: remat.Policy | str | None = "full",
    adapter: str | Path | None = None,
    **options: Any,
) -> Decoder:
    """Load a checkpoint's decoder.

    At most one weight (all layers of it), or one device's shard of it, is on the host.

    Args:
        directory: with `config.json` and safetensors files, sharded or not.
        dtype: dtype of activations and matrix products; None: the checkpoint's.
        param_dtype: dtype of stored weights; None: the checkpoint's.
        sharding: one sharding of all weights, or a function of path and shape. None:
            the default device.
        head: options of the head.
        policy: rematerialisation policy, as in `Decoder`.
        adapter: directory of a LoRA adapter in PEFT's layout, to be added to the base
            that it was trained on. One of DoRA is merged into its matrices, in float32,
            which are rounded once.
        options: other fields of `ModelConfig` that the checkpoint does not decide:
            `attention`, and `base` with `base_targets`, which code matrices. Where
            the checkpoint's are coded, they stay so; `base=None` decodes them.

    Raises:
        CheckpointError: a file is missing, damaged, or asks for something that is not
            implemented; the message names the file, and the key or tensor.

    >>> from jaxmem import checkpoints
    >>> decoder = checkpoints.load("tests/checkpoints/tiny/qwen3", dtype="float32")
    >>> decoder.config.qk_norm.enabled, decoder.embed.embedding.dtype
    (True, dtype(bfloat16))
    """
    config, added = _configured(
        directory, dtype=dtype, param_dtype=param_dtype, adapter=adapter, **options
    )
    shapes = abstract_decoder(config.model, head, policy)
    weights = _read_weights(config, config.model, shapes, sharding)
    if added is None:
        return nnx.merge(nnx.split(shapes)[0], weights)
    return _add_adapter(weights, shapes, added, config.family)


def with_adapter(
    decoder: Decoder, adapter: str | Path, base: CheckpointConfig
) -> Decoder:
    """The decoder with a LoRA adapter added, which shares the decoder's weights.

    Args:
        decoder: without adapters.
        adapter: directory in PEFT's layout, as in `load`.
        base: description of the decoder's checkpoint, which names its matrices.

    Raises:
        CheckpointError: the decoder has adapters, or the directory has none that fits.
    """
    if decoder.config.lora_rank:
        raise CheckpointError(
            f"{adapter}: the model has an adapter already; name a model without one"
        )
    added = read_adapter_config(decoder.config, base.family, adapter)
    coded = {name: getattr(decoder.config, name) for name in BASE_FIELDS}
    added = dataclasses.replace(added, model=dataclasses.replace(added.model, **coded))
    shapes = abstract_decoder(added.model, policy=decoder.policy)
    weights = nnx.to_pure_dict(nnx.split(decoder)[1])
    return _add_adapter(weights, shapes, added, base.family)


def _add_adapter(
    weights: dict[str, Any], shapes: Decoder, added: AdapterConfig, family: Family
) -> Decoder:
    """The decoder of these shapes, from weights nested by name and an adapter."""
    model = shapes.config
    expected = {
        path: like
        for path, like in by_path(shapes).items()
        if lora.is_saved(path, model)
    }
    naming = names.Naming(family, model)
    base: dict[str, Any] = dict(traverse_util.flatten_dict(weights, sep="/"))
    read = read_adapter(added, naming, expected, base.__getitem__)
    norms = {path: read.pop(path) for path in [*read] if path.endswith("lora_norm")}
    adapters = traverse_util.unflatten_dict(read, sep="/")
    decoder = nnx.merge(nnx.split(shapes)[0], join_weights(weights, adapters))
    return merging.merge(decoder, norms) if added.normalised else decoder


def configured(
    directory: str | Path,
    *,
    dtype: str | None = None,
    param_dtype: str | None = None,
    adapter: str | Path | None = None,
    **options: Any,
) -> CheckpointConfig:
    """The config of a checkpoint, with the `ModelConfig` of its decoder.

    No weight is read. Arguments and errors are as in `load`.
    """
    return _configured(
        directory, dtype=dtype, param_dtype=param_dtype, adapter=adapter, **options
    )[0]


def _configured(
    directory: str | Path,
    *,
    dtype: str | None,
    param_dtype: str | None,
    adapter: str | Path | None,
    **options: Any,
) -> tuple[CheckpointConfig, AdapterConfig | None]:
    """Describe the checkpoint as `configured` does, and the adapter."""
    config = read_config(directory)
    stored = config.dtype or "float32"
    if stored not in DTYPES and (dtype is None or param_dtype is None):
        raise CheckpointError(
            f"{config.path}: dtype {messages.short(stored)} is not one of "
            f"{', '.join(DTYPES)}; set dtype= and param_dtype="
        )
    _check_base(config, options.get("base"))
    if options.get("base", "") is None:  # decode what is coded
        options = dict(PLAIN) | options
    model = dataclasses.replace(
        config.model,
        dtype=dtype or stored,
        param_dtype=param_dtype or stored,
        **options,
    )
    added = None
    if adapter is not None:
        added = read_adapter_config(model, config.family, adapter)
        # The options prevail over the adapter's base.
        model = dataclasses.replace(added.model, **options)
    return dataclasses.replace(config, model=model), added


def read_weights(
    directory: str | Path,
    model: ModelConfig,
    *,
    sharding: Placement | None = None,
    like: Any = None,
) -> dict[str, Any]:
    """Read a checkpoint's weights, without adapters, as arrays nested by name.

    Args:
        directory: of the checkpoint.
        model: from `read_config`, with the desired dtypes and options.
        sharding: as in `load`.
        like: `jax.ShapeDtypeStruct`s nested by name, for some weights: only these are
            read, with their dtypes and shardings. None: all.

    Warns:
        UserWarning: only a part of the model is read, without images, say.

    Raises:
        CheckpointError: a tensor is missing, has another shape, or does not belong to
            the decoder; the message names it and its file.
    """
    config = read_config(directory)
    return _read_weights(config, model, abstract_decoder(model), sharding, like)


def _check_base(config: CheckpointConfig, base: str | None) -> None:
    """Raise where matrices are coded in the files, and in another base than asked."""
    if config.coding and base not in (None, config.coding):
        raise CheckpointError(
            f"{config.path}: matrices are coded in {config.coding}, and base={base!r} "
            "differs; leave base out"
        )


def kernels_of(directory: str | Path, dtype: str) -> Callable[[str], jax.Array]:
    """A function that reads one kernel of a checkpoint, by its path in the decoder."""
    model = read_config(directory).model
    model = dataclasses.replace(model, dtype=dtype, param_dtype=dtype)
    every = by_path(abstract_decoder(model))

    def read(path: str) -> jax.Array:
        like = traverse_util.unflatten_dict({path: every[path]}, sep="/")
        weights = read_weights(directory, model, like=like)
        flat: dict[str, Any] = dict(traverse_util.flatten_dict(weights, sep="/"))
        return flat[path]

    return read


def _read_weights(
    config: CheckpointConfig,
    model: ModelConfig,
    shapes: Decoder,
    sharding: Placement | None,
    like: Any = None,
) -> dict[str, Any]:
    directory, coding = config.path.parent, config.coding
    tensors = CodedTensors(directory, coding) if coding else Tensors(directory)
    _check_base(config, model.base)
    images = config.images
    prefixes = names.prefixes_of(tensors, config.family, images)
    naming = names.Naming(config.family, model, prefixes, tensors)
    every = by_path(shapes)
    every = {path: leaf for path, leaf in every.items() if not lora.is_adapter(path)}
    of_images = images.images if images else ()
    plain = dict.fromkeys(map(coded_weights.kernel_path, every))
    names.refuse_others(tensors, plain, of_images, naming)
    names.say_what_is_left_out(tensors, of_images, naming)
    if isinstance(tensors, CodedTensors):
        tensors.refuse_transposed(
            name for path in plain for stored in [naming(path)]
            if path.endswith("/kernel") and not stored.transposed
            for name in stored.names
        )  # fmt: skip
    leaves: Any = every
    if like is not None:
        leaves = traverse_util.flatten_dict(dict(like), sep="/")
    arrays: dict[str, Any] = {}
    if isinstance(tensors, CodedTensors):
        encoded = StoredCodes(tensors, naming, every)
    else:
        encoded = EncodedKernels(tensors, naming, every, model.param_dtype)
    for path, leaf in leaves.items():
        if path not in every:  # an adapter's weight
            continue
        if coded_weights.is_coded(path):
            read = encoded.reader(path)
        else:
            read = names.reader(tensors, naming(path), path, leaf)
        placement = sharding(path, leaf.shape) if callable(sharding) else sharding
        placement = placement or (leaf.sharding if like is not None else None)
        if placement is None:
            arrays[path] = jnp.asarray(read((slice(None),) * len(leaf.shape)))
        else:
            arrays[path] = jax.make_array_from_callback(leaf.shape, placement, read)
    return traverse_util.unflatten_dict(arrays, sep="/")


def save(
    directory: str | Path,
    decoder: Decoder,
    *,
    like: str | Path,
    dtype: str | None = None,
    max_shard_bytes: int = 5 * 10**9,
    chat_template: str | Path | None = None,
    overwrite: bool = False,
) -> None:
    """Save a decoder as a checkpoint of the same architecture as another.

    Config and tokenizer files are copied from the other checkpoint; weights are under
    the names and in the layout that `transformers` expects. If the other one is
    multimodal, only its text part is saved (Gemma3ForCausalLM). The directory appears
    once it is complete. In a run of several processes each of them calls this, and the
    first one writes.

    Args:
        directory: to create.
        decoder: whose weights to save.
        like: directory of a checkpoint of the same sizes, such as the one that the
            decoder was loaded from.
        dtype: dtype of the tensors; None: the dtype of the decoder's weights.
        max_shard_bytes: maximum size of a file.
        chat_template: path of a template that replaces the other checkpoint's.
        overwrite: True if a checkpoint that is there is replaced.

    Raises:
        CheckpointError: the directory exists, or holds files that no checkpoint has,
            or `like` is of another model.
    """
    target, source = (Path(os.path.expanduser(path)) for path in (directory, like))
    _check_target(target, decoder, overwrite)
    config = read_config(source)
    # Merging an adapter of a tied head unties it.
    untied = config.model.tied and not decoder.config.tied
    changed = {"tied": True} if untied else {}
    ours = dataclasses.replace(
        decoder.config, **(_config_choices(config.model) | changed)
    )
    if ours != config.model:
        described = values_of(config.model)
        differing = [
            f"{key}={value!r}, not {described[key]!r}"
            for key, value in values_of(ours).items()
            if value != described[key]
        ]
        raise CheckpointError(
            f"{config.path} describes another model than the decoder, which has "
            f"{', '.join(differing)}"
        )
    dtype = dtype or decoder.config.param_dtype
    raw = dict(config.raw) | ({"tie_word_embeddings": False} if untied else {})
    with new_directory(target, overwrite) as unfinished:
        tensors = _decoder_tensors(decoder, config.family, dtype)
        write_tensors(unfinished, tensors, max_shard_bytes=max_shard_bytes)
        if unfinished is not None:
            _write_config(unfinished, raw, dtype)
            copy_text_files(source, unfinished, chat_template, TOKENIZER_FILES)


def save_new(
    directory: str | Path,
    decoder: Decoder,
    *,
    text: Text,
    max_positions: int,
    dtype: str | None = None,
    max_shard_bytes: int = 5 * 10**9,
    overwrite: bool = False,
) -> None:
    """Save a decoder that came from no checkpoint, as one that transformers loads.

    The architecture is the known one that computes the same; see `describe`. `text` has
    tokenizer, special tokens and chat template, and `max_positions` is the longest
    context in tokens, as it was trained; other arguments are as in `save`.

    Raises:
        CheckpointError: the directory exists, or no known architecture is the
            decoder's.
    """
    target = Path(os.path.expanduser(directory))
    _check_target(target, decoder, overwrite)
    decoder, config = as_known(decoder, max_positions)
    family = next(f for f in FAMILIES if f.model_type == config["model_type"])
    dtype = dtype or decoder.config.param_dtype
    with new_directory(target, overwrite) as unfinished:
        tensors = _decoder_tensors(decoder, family, dtype)
        write_tensors(unfinished, tensors, max_shard_bytes=max_shard_bytes)
        if unfinished is not None:
            write_text_files(unfinished, config, text, dtype)


def as_known(decoder: Decoder, max_positions: int) -> tuple[Decoder, dict[str, Any]]:
    """The decoder as a known architecture, and its `config.json` from `describe`.

    The factor of scaled embeddings, which only Gemma has, becomes part of the
    embedding table otherwise. A tied head then gets a matrix of its own.

    Raises:
        CheckpointError: no known architecture computes the same.
    """
    model = decoder.config
    plain, described = describe_known(model, max_positions)
    if plain is model:
        return decoder, described
    flat = by_path(decoder)
    table = flat["embed/embedding"]
    if model.tied:
        flat["head/kernel"] = table.T
    flat["embed/embedding"] = table * jnp.asarray(model.hidden**0.5, table.dtype)
    definition = nnx.split(abstract_decoder(plain, policy=decoder.policy))[0]
    return nnx.merge(definition, traverse_util.unflatten_dict(flat, sep="/")), described


def _decoder_tensors(decoder: Decoder, family: Family, dtype: str):
    naming = names.Naming(family, decoder.config)
    return names.tensors_of(by_path(decoder), naming, dtype)


def _check_target(target: Path, decoder: Decoder, overwrite: bool) -> None:
    check_target(target, overwrite)
    config = decoder.config
    if config.lora_rank:
        raise CheckpointError(
            f"{target}: the decoder has adapters; save them with save_adapter"
        )
    if config.base is not None:
        raise CheckpointError(
            f"{target}: the decoder has matrices in {config.base}; decode them with "
            "merge"
        )


def with_checkpoint(model: ModelConfig) -> ModelConfig:
    """The config with the sizes of its `checkpoint`; the config may repeat them.

    Raises:
        ValueError: the config has a size that differs from the checkpoint's, or trains
            matrices that are coded there.
    """
    if model.checkpoint is None:
        return model
    config = read_config(model.checkpoint)
    read = config.model
    if config.coding and not model.lora_rank:
        raise ValueError(
            f"model.checkpoint={model.checkpoint!r} has matrices coded in "
            f"{config.coding}, and codes have no gradients; train adapters "
            "(model.lora_rank=16), or name the model in 16 bits"
        )
    if model.lora_saved and read.tied:
        raise ValueError(f"model.lora_saved {UNTIED}")
    if model.codes_embedding and read.tied:
        raise ValueError(
            f"model.base_targets has 'embedding', but the head of {model.checkpoint} "
            "also reads that table (tie_word_embeddings); leave it out"
        )
    choices, default = _config_choices(model), ModelConfig()
    if config.coding:  # the files say what is coded
        choices = {k: v for k, v in choices.items() if k not in BASE_FIELDS}
    if model.pad_row is None:
        choices["pad_row"] = read.pad_row
    if model.router_aux_loss_coef is None:
        choices["router_aux_loss_coef"] = read.router_aux_loss_coef
    elif model.router_aux_loss_coef and read.experts.count is None:
        raise ValueError(
            f"model.router_aux_loss_coef={model.router_aux_loss_coef:g} is for a "
            f"model with experts, but {model.checkpoint} has none; leave it out"
        )
    defaults, of_checkpoint = values_of(default), values_of(read)
    differing = [
        key
        for key, value in values_of(model).items()
        if key not in choices and value not in (of_checkpoint[key], defaults[key])
    ]
    if differing:
        raise ValueError(_describe_differing(model, read, differing))
    return dataclasses.replace(read, **choices)


def _describe_differing(
    model: ModelConfig, read: ModelConfig, names: Sequence[str]
) -> str:
    facts = [
        f"model.{name}={value_of(model, name)!r} differs from the checkpoint's "
        f"{value_of(read, name)!r}"
        for name in names
    ]
    removals = " ".join(f"model.{name}=None" for name in names)
    return (
        f"{', '.join(facts)}; leave sizes to model.checkpoint={model.checkpoint!r}: "
        f"add {removals}"
    )


def _config_choices(model: ModelConfig) -> dict[str, Any]:
    """The fields that the user chooses, independent of the checkpoint."""
    return {name: getattr(model, name) for name in FREE}


def _write_config(directory: Path, raw: Mapping[str, Any], dtype: str) -> None:
    left_out = "torch_dtype", quantization.KEY  # saved weights are plain
    kept = {key: value for key, value in raw.items() if key not in left_out}
    config = ropes.in_both(kept) | {"dtype": dtype}
    write_object(directory / "config.json", config)
    kinds = "bos_token_id", "eos_token_id", "pad_token_id"
    ids = {kind: raw[kind] for kind in kinds if raw.get(kind) is not None}
    # The other checkpoint's file replaces it, if there is one.
    write_object(directory / "generation_config.json", ids)
