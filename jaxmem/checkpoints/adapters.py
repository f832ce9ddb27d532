"""LoRA adapters in PEFT's layout: adapter_config.json, adapter_model.safetensors."""

import contextlib
import dataclasses
import math
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxmem.base import hub, messages
from jaxmem.base.ranges import integers
from jaxmem.checkpoints import adapter_tensors, base_record, names
from jaxmem.checkpoints.adapter_tensors import PREFIX, Site, target_of
from jaxmem.checkpoints.architectures import read_config
from jaxmem.checkpoints.config_reader import (
    CheckpointError,
    Reader,
    read_object,
    write_object,
)
from jaxmem.checkpoints.directories import (
    TOKENIZER_FILES,
    check_target,
    copy_text_files,
    new_directory,
)
from jaxmem.checkpoints.families import FAMILIES
from jaxmem.checkpoints.families.family import Family
from jaxmem.checkpoints.tensors import Tensors, whole, write_tensors
from jaxmem.models.config import RANGES, SAVED, TARGETS, ModelConfig
from jaxmem.models.decoder import Decoder
from jaxmem.models.lora import is_adapter
from jaxmem.models.weights import by_path

CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"
_BASE = "base_model_name_or_path"
_RANK = integers(1, limit=2**16)
# PEFT's keys that change what an adapter computes, with the only values implemented.
_ONLY: dict[str, tuple] = {
    "bias": ("none",),
    **dict.fromkeys(("layers_to_transform", "megatron_config"), (None,)),
    **dict.fromkeys(
        (
            "alora_invocation_tokens", "arrow_config", "kasa_config",
            "layer_replication", "lora_bias", "monteclora_config",
            "trainable_token_indices", "use_bdlora", "use_dora", "use_qalora",
            "velora_config",
        ),
        (None, False),
    ),
}  # fmt: skip
# Keys of training, of what another key has switched off, and notes.
_HARMLESS = frozenset(
    "auto_mapping base_model_name_or_path corda_config eva_config inference_mode "
    "layers_pattern loftq_config lora_dropout lora_ga_config megatron_core "
    "merge_weights peft_version qalora_group_size revision runtime_config "
    "task_type".split()
)
# Values of init_lora_weights that draw A and B, and leave the base as it is.
_DRAWN = "gaussian", "eva", "orthogonal", "mica"
_CONVERT = "save_pretrained(NEW, path_initial_model_for_weight_conversion=INITIAL)"
_MERGE = "merge_and_unload().save_pretrained(NEW)"
# Those that subtract from the base's matrices or quantise them, and what PEFT's model
# of base and adapter has to make other files.
_CHANGES_BASE = {
    "pissa_niter": _CONVERT,  # draws at random each time that PEFT loads it
    "pissa": f"{_MERGE} or {_CONVERT}",
    "olora": f"{_MERGE} or {_CONVERT}",
    "loftq": _MERGE,
    "corda": _CONVERT,
    "lora_ga": _CONVERT,
}


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
        reader = Reader(directory / CONFIG, read_object(directory / CONFIG))
        name = reader.take(_BASE, (str, type(None)), None)
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
        return {_BASE: self.name, "revision": self.revision}


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
            described = _peft_config(decoder, family)
            described |= (named or BaseName.of(base)).keys()
            write_object(unfinished / CONFIG, described)
            base_record.write(unfinished, config)
            if is_here:
                copy_text_files(source, unfinished, chat_template, TOKENIZER_FILES)


def base_of(directory: Path, advice: str) -> Path:
    """The directory of the base that an adapter's directory names.

    Raises:
        CheckpointError: it is no checkpoint here; the message ends with the advice.
    """
    base = BaseName.recorded(directory)
    if not base.name:
        raise CheckpointError(
            f"{directory / CONFIG}: {_BASE} is empty, as for an adapter of random "
            "weights (model.checkpoint=None), which only a run with checkpoints "
            f"(run.checkpoint_every) can draw again: name that run, or {advice}"
        )
    try:
        found = base.directory()
    except hub.HubError as error:
        raise CheckpointError(
            f"{directory / CONFIG}: {_BASE} is {error}; or {advice}"
        ) from error
    if not (found / "config.json").exists():
        raise CheckpointError(
            f"{directory / CONFIG}: {_BASE} {base.name!r} is not the directory of a "
            f"checkpoint here; {advice}"
        )
    return found


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
    labels = _site_labels(
        [site for site in sites if not site.parameter], naming
    ).values()
    confused = "gate_proj", "up_proj", "down_proj"
    others = [label for label in dict.fromkeys(labels) if label.endswith(confused)]
    if others:
        warnings.warn(
            f"{target}: PEFT 0.21 takes the adapters of {messages.listing(others)} for "
            f"those of experts in {family.model_type}; for PEFT and transformers, "
            "`jaxmem export --merge` has them in the weights",
            stacklevel=3,
        )


def with_adapter(
    model: ModelConfig, family: Family, directory: str | Path
) -> ModelConfig:
    """The config of a model with the adapters in a directory, and the base of these.

    Raises:
        CheckpointError: the directory does not hold one of PEFT's plain LoRA adapters.
    """
    path = Path(os.path.expanduser(directory)) / CONFIG
    model = base_record.with_recorded(model, path.parent)
    reader = Reader(path, read_object(path), _HARMLESS)
    kind = reader.take("peft_type", str)
    if kind != "LORA":
        raise reader.error(f"peft_type {messages.short(kind)} is not LORA")
    _check_base_is_kept(reader)
    folds = reader.take("fan_in_fan_out", (bool, type(None)), None)
    if folds and "blocks/" not in family.stored_as_in_out:  # else PEFT sets it
        raise reader.error("fan_in_fan_out=True is not implemented")
    rank = reader.take("r", int, within=_RANK)
    alpha = reader.take("lora_alpha", float, within=RANGES["lora_alpha"])
    targets, head = _read_targets(reader, names.Naming(family, model), rank, alpha)
    if reader.take("use_rslora", (bool, type(None)), None):  # alpha / sqrt(r)
        alpha *= rank**0.5
    if reader.take("ensure_weight_tying", (bool, type(None)), None):
        if model.tied and head:
            raise reader.error("ensure_weight_tying=True is not implemented for a head")
    saved = _read_saved(reader, family)
    reader.finish(_ONLY)
    try:
        return dataclasses.replace(
            model,
            lora_rank=rank,
            lora_alpha=alpha,
            lora_targets=targets,
            lora_head=head,
            lora_saved=saved,
        )
    except ValueError as error:
        raise reader.error(str(error)) from error


def _check_base_is_kept(reader: Reader) -> None:
    """Raise where PEFT changes the base's matrices before it adds an adapter."""
    key = "init_lora_weights"
    value = reader.take(key, (bool, str, type(None)), None)
    if not isinstance(value, str) or value.lower() in _DRAWN:
        return
    begins = (x for x in _CHANGES_BASE if value.lower().startswith(x))
    if (change := next(begins, None)) is None:
        raise reader.error(
            f"{key} {messages.short(value)} is not known; known are true, false, "
            f"{messages.listing(_DRAWN)}"
        )
    raise reader.error(
        f"{key}={messages.short(value)} also changes matrices of the base, which is "
        f"not implemented; load both with PEFT and call {_CHANGES_BASE[change]}, or "
        "set it to true if the base that you name was saved with these changes"
    )


def _possible_sites(naming: names.Naming) -> dict[str, list[Site]]:
    """Sites of each of `lora_targets` that a model has, and of the head."""
    sites: dict[str, list[Site]] = {}
    plain = dataclasses.replace(naming.config, lora_head=False, lora_saved=())
    for target in TARGETS:
        with contextlib.suppress(ValueError):  # the model has no such matrix
            dataclasses.replace(plain, lora_rank=1, lora_targets=(target,))
            sites[target] = []
    model = dataclasses.replace(plain, lora_rank=1, lora_targets=tuple(sites))
    decoder = nnx.eval_shape(lambda: Decoder(model, rngs=nnx.Rngs(0)))
    for site in adapter_tensors.sites(by_path(decoder), naming):
        for target in {target_of(part) for part in site.parts}:
            sites[target].append(site)
    return sites | {"head": [adapter_tensors.site_of("head", naming)]}


def _read_targets(
    reader: Reader, naming: names.Naming, rank: int, alpha: float
) -> tuple[tuple[str, ...], bool]:
    """The `lora_targets` that PEFT's modules name; and True if these name the head."""
    possible = _possible_sites(naming)
    modules = _module_names(reader, "target_modules")
    excluded = _module_names(reader, "exclude_modules")
    parameters = reader.strings("target_parameters")
    labels = _site_labels([site for some in possible.values() for site in some], naming)
    every = ", ".join(dict.fromkeys(labels.values()))
    named = {"target_modules": modules, "target_parameters": parameters}
    for key, ends in named.items():
        of_experts = key == "target_parameters"
        known = [s for s in _flatten_sites(possible) if bool(s.parameter) == of_experts]
        _refuse_unknown(reader, key, ends, known, every)

    def is_chosen(site: Site, name: str) -> bool:
        if site.parameter:
            return _is_matched(parameters, name)
        return _is_matched(modules, name) and not _is_matched(excluded, name)

    chosen = []
    for target, sites in possible.items():
        of_all = {is_chosen(site, name) for site in sites for name in site.targets}
        if len(of_all) > 1:
            raise reader.error(
                f"target_modules {messages.short(modules)} are "
                f"{labels[sites[0].parts]} of some modules alone, which is not "
                "implemented"
            )
        chosen += [target] if True in of_all else []
    if not chosen:
        raise reader.error(f"target_modules must name some of {every}")
    of_chosen = {target: possible[target] for target in chosen}
    _check_ranks(reader, _flatten_sites(of_chosen), rank, alpha)
    head = "head" in chosen
    return tuple(chosen[:-1] if head else chosen), head


def _refuse_unknown(
    reader: Reader, key: str, ends: str | list[str], sites: list[Site], every: str
) -> None:
    """Raise for one of the `ends` of names that no name of the sites has."""
    if isinstance(ends, str):
        return
    names_of_all = [name for site in sites for name in site.targets]
    unknown = {
        end for end in ends if not any(_ends_at_dot(end, n) for n in names_of_all)
    }
    if unknown:
        raise reader.error(
            f"{key} [{messages.listing(sorted(unknown))}] are not implemented; known "
            f"are {every}"
        )


def _flatten_sites(sites: Mapping[str, list[Site]]) -> list[Site]:
    return [site for some in sites.values() for site in some]


def _check_ranks(reader: Reader, sites: list[Site], rank: int, alpha: float) -> None:
    """Raise for a rank or a scale of its own; n joined matrices may have rank n r."""
    ranks, alphas = (
        _read_pattern(reader, x) for x in ("rank_pattern", "alpha_pattern")
    )
    for site in sites:
        for name in site.targets:
            own = next((v for k, v in ranks.items() if _ends_as(k, name)), rank)
            if own not in (rank, len(site.parts) * rank):
                said = messages.short(ranks)
                raise reader.error(f"rank_pattern={said} is not implemented")
            top = next((v for k, v in alphas.items() if _ends_as(k, name)), alpha)
            if not math.isclose(top * rank, own * alpha):
                raise reader.error(
                    f"alpha_pattern={messages.short(alphas)} is not implemented: it "
                    f"scales {name} by {top:g} / {own}, and lora_alpha / r is "
                    f"{alpha:g} / {rank}"
                )


def _read_pattern(reader: Reader, key: str) -> dict[str, float]:
    """Numbers by regular expressions of modules' names."""
    pattern = reader.take(key, (dict, type(None)), None) or {}
    good = all(type(value) in (int, float) for value in pattern.values())
    if not good or (pattern and reader.raw.get("use_rslora")):
        raise reader.error(f"{key}={messages.short(pattern)} is not implemented")
    return pattern


def _ends_as(pattern: str, name: str) -> bool:
    """True if a key of PEFT's patterns names a module."""
    try:
        return re.match(rf"(.*\.)?({pattern})$", name) is not None
    except re.error:
        return False


def _site_labels(
    sites: Iterable[Site], naming: names.Naming
) -> dict[tuple[str, ...], str]:
    """The end of PEFT's names of each site that no other matrix of a family has."""

    def tail(name: str) -> str:
        return re.sub(r".*\.\d+\.", "", name)

    every = {tail(n.replace("{}", "0")) for n in naming.family.names.values()}
    labels = {}
    for site in sites:
        label = tail(site.targets[0])
        last = label.rpartition(".")[2]
        others = [x for x in every if x != label and x.endswith(f".{last}")]
        labels[site.parts] = label if site.parameter or others else last
    return labels


def _module_names(reader: Reader, key: str) -> str | list[str]:
    """PEFT's modules: a regular expression, "all-linear", or ends of names."""
    value = reader.take(key, (str, list, type(None)), None)
    if not isinstance(value, str):
        return reader.strings(key)
    try:
        re.compile(value)
    except re.error as error:
        raise reader.error(f"{key} {messages.short(value)}: {error}") from error
    return value


def _is_matched(modules: str | list[str], key: str) -> bool:
    if modules == "all-linear":  # of PEFT: but for the head
        return key != "lm_head"
    if isinstance(modules, str):
        return re.fullmatch(modules, key) is not None
    return any(_ends_at_dot(module, key) for module in modules)


def _ends_at_dot(module: str, key: str) -> bool:
    return key == module or key.endswith(f".{module}")


def _savable_modules(family: Family) -> dict[str, str]:
    """The entries of `lora_saved`, by PEFT's names of their modules."""
    by_module = {}
    for name, path in SAVED.items():
        tensor = family.names.get(path) or family.names.get(path.rpartition("/")[0])
        if tensor is not None:
            by_module[tensor.removesuffix(".weight").rpartition(".")[2]] = name
    return by_module


def _read_saved(reader: Reader, family: Family) -> tuple[str, ...]:
    """The `lora_saved` that `modules_to_save` names."""
    known = _savable_modules(family)
    modules = reader.strings("modules_to_save")
    unknown = sorted(set(modules) - known.keys())
    if unknown:
        raise reader.error(
            f"modules_to_save [{messages.listing(unknown)}] are not implemented; known "
            f"are {', '.join(known)}"
        )
    return tuple(name for module, name in known.items() if module in modules)


def read_adapter(
    directory: str | Path,
    naming: names.Naming,
    expected: Mapping[str, Any],
    base: Mapping[str, Any],
) -> dict[str, Any]:
    """Read the weights of adapters, arrays by the paths of `expected`.

    Args:
        directory: of the adapter.
        naming: of the decoder with adapters.
        expected: shapes and dtypes of the adapters and of whole matrices, by path.
        base: weights of the base by path, of which the file may have copies.

    Raises:
        CheckpointError: a tensor is missing, has another shape, or is not used.
    """
    tensors = Tensors(Path(os.path.expanduser(directory)), _TENSORS)
    weights, used = {}, set()
    for path, like in expected.items():
        if is_adapter(path):
            read = adapter_tensors.read(tensors, path, like, naming)
            weights[path], names_of_it = read
        else:
            weights[path] = _read_whole(tensors, naming(path), path, like)
            names_of_it = [PREFIX + name for name in naming(path).names]
        used.update(names_of_it)
    _refuse_others(tensors, used, naming, base)
    return weights


def _refuse_others(
    tensors: Tensors, used: set[str], naming: names.Naming, base: Mapping[str, Any]
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
                f"{tensors.file_of(name)}: tensor {messages.name(name)} is of no "
                "matrix that can have an adapter"
            )
        if not _is_copy(tensors, name, copied[name], naming, base):
            raise CheckpointError(
                f"{tensors.file_of(name)}: tensor {name} differs from that of the "
                "base, and PEFT would replace it, which is not implemented; load both "
                f"with PEFT, call {_MERGE}, and use NEW"
            )


def _is_copy(
    tensors: Tensors,
    name: str,
    path: str,
    naming: names.Naming,
    base: Mapping[str, Any],
) -> bool:
    """True if a tensor [V, D] of an adapter has the values of the base's.

    They are compared in the one of both types that has less precision.
    """
    shape = naming.config.vocab_size or 0, naming.config.hidden
    copy = tensors.read(name, shape, (slice(None), slice(None)))
    is_table = path == SAVED["embed"] or naming.config.tied
    weight = whole(base[SAVED["embed"] if is_table else path], None)
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


def _peft_config(decoder: Decoder, family: Family) -> dict[str, Any]:
    config, naming = decoder.config, names.Naming(family, decoder.config)
    sites = adapter_tensors.sites(by_path(decoder), naming)
    labels = _site_labels(sites, naming)
    times = {labels[s.parts]: len(s.parts) for s in sites if len(s.parts) > 1}
    saved = [
        module
        for module, name in _savable_modules(family).items()
        if name in config.lora_saved
    ]

    def labels_of(is_parameter: bool) -> list[str]:
        own = (labels[s.parts] for s in sites if bool(s.parameter) == is_parameter)
        return list(dict.fromkeys(own))

    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": config.lora_rank,
        "lora_alpha": config.lora_alpha,
        "rank_pattern": {k: n * config.lora_rank for k, n in times.items()},
        "alpha_pattern": {k: n * config.lora_alpha for k, n in times.items()},
        "lora_dropout": 0.0,
        "target_modules": labels_of(False),
        "target_parameters": labels_of(True) or None,
        "bias": "none",
        "fan_in_fan_out": "blocks/" in family.stored_as_in_out,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": saved or None,
        "inference_mode": True,
        "init_lora_weights": True,
    }
