"""adapter_config.json: the adapters that it describes, and how decoders are described.

A decoder has one rank and one scale, in all layers. Adapters of a lower rank, or of
some layers alone, get rows of zeros, which no update changes; another scale is a factor
of B.
"""

import collections
import contextlib
import dataclasses
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxmem.base import messages
from jaxmem.base.ranges import Range, integers
from jaxmem.checkpoints import adapter_tensors, base_record, names
from jaxmem.checkpoints.adapter_tensors import ModuleAdapter, Site, target_of
from jaxmem.checkpoints.config_reader import Reader, read_object
from jaxmem.checkpoints.families.family import Family
from jaxmem.models.architecture import POSITIVE
from jaxmem.models.config import SAVED, TARGETS, ModelConfig
from jaxmem.models.decoder import Decoder, abstract_decoder
from jaxmem.models.weights import by_path

CONFIG = "adapter_config.json"
MERGE = "merge_and_unload().save_pretrained(NEW)"
_RANK = integers(1, limit=2**16)
# PEFT's keys that change what an adapter computes, with the only values implemented.
_ONLY: dict[str, tuple] = {
    "bias": ("none",),
    "megatron_config": (None,),
    **dict.fromkeys(
        (
            "alora_invocation_tokens", "arrow_config", "kasa_config",
            "layer_replication", "lora_bias", "monteclora_config",
            "trainable_token_indices", "use_bdlora", "use_qalora",
            "velora_config",
        ),
        (None, False),
    ),
}  # fmt: skip
# Keys of training, of what another key has switched off, and notes.
_HARMLESS = frozenset(
    "auto_mapping base_model_name_or_path corda_config eva_config inference_mode "
    "loftq_config lora_dropout lora_ga_config megatron_core "
    "merge_weights peft_version qalora_group_size revision runtime_config "
    "task_type".split()
)
# Values of init_lora_weights that draw A and B, and leave the base as it is.
_DRAWN = "gaussian", "eva", "orthogonal", "mica"
_CONVERT = "save_pretrained(NEW, path_initial_model_for_weight_conversion=INITIAL)"
# Those that subtract from the base's matrices or quantise them, and what PEFT's model
# of base and adapter has to make other files.
_CHANGES_BASE = {
    "pissa_niter": _CONVERT,  # draws at random each time that PEFT loads it
    "pissa": f"{MERGE} or {_CONVERT}",
    "olora": f"{MERGE} or {_CONVERT}",
    "loftq": MERGE,
    "corda": _CONVERT,
    "lora_ga": _CONVERT,
}


@dataclasses.dataclass(frozen=True)
class AdapterConfig:
    """The content of an adapter's adapter_config.json, for the model of its base."""

    directory: Path
    model: ModelConfig  # with the adapters, of the largest rank
    modules: Mapping[str, ModuleAdapter]  # adapted ones, by PEFT's names
    normalised: bool = False  # True: DoRA, which learns the norm of each output


def read_adapter_config(
    model: ModelConfig, family: Family, directory: str | Path
) -> AdapterConfig:
    """Read the description of adapters that a directory has, for the model of a base.

    Raises:
        CheckpointError: the directory does not hold one of PEFT's LoRA adapters, or one
            of a variant that is not implemented.
    """
    path = Path(os.path.expanduser(directory)) / CONFIG
    model = base_record.with_recorded(model, path.parent)
    reader = Reader(path, read_object(path), _HARMLESS)
    kind = reader.take("peft_type", str)
    if kind != "LORA":
        raise reader.error(f"peft_type {messages.short(kind)} is not LORA")
    _check_base_is_kept(reader)
    _refuse_variants(reader)
    folds = reader.take("fan_in_fan_out", (bool, type(None)), None)
    if folds and "blocks/" not in family.stored_as_in_out:  # else PEFT sets it
        raise reader.error("fan_in_fan_out=True is not implemented")
    scaling = _Scaling.read(reader)
    chosen = _read_targets(reader, names.Naming(family, model))
    sites = {name: site for some in chosen.values() for name, site in some.items()}
    head = "head" in chosen
    if reader.take("ensure_weight_tying", (bool, type(None)), None):
        if model.tied and head:
            raise reader.error("ensure_weight_tying=True is not implemented for a head")
    saved = _read_saved(reader, family)
    normalised = bool(reader.take("use_dora", (bool, type(None)), None))
    if normalised and model.base is not None:
        raise reader.error(
            f"use_dora=True is not implemented for a base in {model.base}; name the "
            "model in 16 bits that was coded"
        )
    reader.finish({})
    ranks = {name: scaling.rank(name, len(s.parts)) for name, s in sites.items()}
    scales = {name: scaling.scale(name) for name in sites}
    largest = max(ranks.values())
    common = collections.Counter(scales.values()).most_common(1)[0][0]
    try:
        described = dataclasses.replace(
            model,
            lora_rank=largest,
            lora_alpha=scaling.alpha_of(common, largest),
            lora_targets=tuple(target for target in chosen if target != "head"),
            lora_head=head,
            lora_saved=saved,
        )
    except ValueError as error:
        raise reader.error(str(error)) from error
    modules = {x: ModuleAdapter(ranks[x], scales[x] / common) for x in sites}
    return AdapterConfig(path.parent, described, modules, normalised)


def _refuse_variants(reader: Reader) -> None:
    """Raise for a key of PEFT with a value that the decoder cannot express."""
    for key, implemented in _ONLY.items():
        value = reader.raw.get(key, implemented[0])
        reader.read.add(key)
        if value not in implemented:
            raise reader.error(
                f"{key}={messages.short(value)} is not implemented; only "
                f"{implemented[0]!r} is; load base and adapter with PEFT, call "
                f"{MERGE}, and use NEW"
            )


@dataclasses.dataclass(frozen=True)
class _Scaling:
    """Ranks and scales of PEFT's modules."""

    r: int
    alpha: float
    ranks: Mapping[str, int]  # by regular expressions of modules' names
    alphas: Mapping[str, float]
    root: bool  # True: alpha / sqrt(rank), not alpha / rank

    @classmethod
    def read(cls, reader: Reader) -> "_Scaling":
        """Read the keys of adapter_config.json."""
        return cls(
            reader.take("r", int, within=_RANK),
            reader.take("lora_alpha", float, within=POSITIVE),
            _read_pattern(reader, "rank_pattern", (int,), _RANK),
            _read_pattern(reader, "alpha_pattern", (int, float), POSITIVE),
            bool(reader.take("use_rslora", (bool, type(None)), None)),
        )

    def _stored_rank(self, name: str) -> int:
        return next((v for k, v in self.ranks.items() if _ends_as(k, name)), self.r)

    def rank(self, name: str, parts: int) -> int:
        """The rank of each of the joined matrices of a module.

        Of n matrices whose adapters are joined, PEFT has one of rank n r.
        """
        stored = self._stored_rank(name)
        return self.r if stored == parts * self.r else stored

    def scale(self, name: str) -> float:
        """The factor of B A in a module."""
        rank = self._stored_rank(name)
        own = (v for k, v in self.alphas.items() if _ends_as(k, name))
        return next(own, self.alpha) / (rank**0.5 if self.root else rank)

    def alpha_of(self, scale: float, rank: int) -> float:
        """The `lora_alpha` of a scale."""
        plain = self.alpha / (self.r**0.5 if self.root else self.r)
        if scale == plain and rank == self.r:  # exactly as it is given
            return self.alpha * self.r**0.5 if self.root else self.alpha
        return scale * rank


def _read_pattern(
    reader: Reader, key: str, kinds: tuple[type, ...], within: Range
) -> dict[str, Any]:
    """Numbers by regular expressions of modules' names."""
    pattern = reader.take(key, (dict, type(None)), None) or {}
    for name, value in pattern.items():
        if type(value) not in kinds or within.problem(value):
            raise reader.error(
                f"{key}: {messages.short(name)} must have a number above 0, got "
                f"{messages.short(value)}"
            )
    return pattern


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
    decoder = abstract_decoder(model)
    for site in adapter_tensors.sites(by_path(decoder), naming):
        for target in {target_of(part) for part in site.parts}:
            sites[target].append(site)
    return sites | {"head": [adapter_tensors.site_of("head", naming)]}


def _read_targets(reader: Reader, naming: names.Naming) -> dict[str, dict[str, Site]]:
    """The adapted modules, with their sites, of each of `lora_targets` and "head"."""
    possible = _possible_sites(naming)
    modules = _module_names(reader, "target_modules")
    excluded = _module_names(reader, "exclude_modules")
    parameters = reader.strings("target_parameters")
    layers = _read_layers(reader, modules)
    labels = site_labels([site for some in possible.values() for site in some], naming)
    every = ", ".join(dict.fromkeys(labels.values()))
    named = {"target_modules": modules, "target_parameters": parameters}
    for key, ends in named.items():
        of_experts = key == "target_parameters"
        known = [s for s in _flatten_sites(possible) if bool(s.parameter) == of_experts]
        _refuse_unknown(reader, key, ends, known, every)

    def is_chosen(site: Site, name: str) -> bool:
        if site.parameter:
            return _is_matched(parameters, name)
        is_named = _is_matched(modules, name) and not _is_matched(excluded, name)
        return is_named and layers.has(name)

    chosen = {
        target: {n: site for site in sites for n in site.targets if is_chosen(site, n)}
        for target, sites in possible.items()
    }
    chosen = {target: sites for target, sites in chosen.items() if sites}
    if not chosen:
        raise reader.error(f"target_modules must name some of {every}{layers.note}")
    return chosen


@dataclasses.dataclass(frozen=True)
class _Layers:
    """The layers that PEFT adapts."""

    numbers: tuple[int, ...] | None  # None: all
    patterns: tuple[str, ...] = ()  # of the name before a layer's number; (): any

    def has(self, name: str) -> bool:
        """True if a module is in one of the layers."""
        if self.numbers is None:
            return True
        starts = [rf"(?:^|.*?\.){pattern}" for pattern in self.patterns]
        for start in starts or [r".*?\.[^.]*"]:
            if match := re.match(rf"{start}\.(\d+)\.", name):
                return int(match[1]) in self.numbers
        return False

    @property
    def note(self) -> str:
        """The end of an error about modules of which no layer has any."""
        return "" if self.numbers is None else f" in layers {[*self.numbers]}"


def _read_layers(reader: Reader, modules: str | list[str]) -> _Layers:
    """Read layers_to_transform and layers_pattern, which go with a list of modules."""
    key = "layers_to_transform"
    listed = reader.take(key, (int, list, type(None)), None)
    pattern = reader.take("layers_pattern", (str, list, type(None)), None) or []
    patterns = [pattern] if isinstance(pattern, str) else pattern
    if listed is None or listed == []:
        return _Layers(None)
    numbers = listed if isinstance(listed, list) else [listed]
    if isinstance(modules, str) or not all(type(number) is int for number in numbers):
        raise reader.error(
            f"{key}={messages.short(listed)} must be numbers of layers, together with "
            "a list of target_modules"
        )
    try:
        for text in patterns:
            re.compile(text)
    except (re.error, TypeError) as error:
        raise reader.error(
            f"layers_pattern {messages.short(pattern)}: {error}"
        ) from error
    return _Layers(tuple(numbers), tuple(patterns))


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


def _ends_as(pattern: str, name: str) -> bool:
    """True if a key of PEFT's patterns names a module."""
    try:
        return re.match(rf"(.*\.)?({pattern})$", name) is not None
    except re.error:
        return False


def site_labels(
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


def savable_modules(family: Family) -> dict[str, str]:
    """The entries of `lora_saved`, by PEFT's names of their modules."""
    by_module = {}
    for name, path in SAVED.items():
        tensor = family.names.get(path) or family.names.get(path.rpartition("/")[0])
        if tensor is not None:
            by_module[tensor.removesuffix(".weight").rpartition(".")[2]] = name
    return by_module


def _read_saved(reader: Reader, family: Family) -> tuple[str, ...]:
    """The `lora_saved` that `modules_to_save` names."""
    known = savable_modules(family)
    modules = reader.strings("modules_to_save")
    unknown = sorted(set(modules) - known.keys())
    if unknown:
        raise reader.error(
            f"modules_to_save [{messages.listing(unknown)}] are not implemented; known "
            f"are {', '.join(known)}"
        )
    return tuple(name for module, name in known.items() if module in modules)


def describe_adapter(decoder: Decoder, family: Family) -> dict[str, Any]:
    """The adapter_config.json of a decoder's adapters, without their base."""
    config, naming = decoder.config, names.Naming(family, decoder.config)
    sites = adapter_tensors.sites(by_path(decoder), naming)
    labels = site_labels(sites, naming)
    times = {labels[s.parts]: len(s.parts) for s in sites if len(s.parts) > 1}
    saved = [
        module
        for module, name in savable_modules(family).items()
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
        "rank_pattern": {k: n * (config.lora_rank or 0) for k, n in times.items()},
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
