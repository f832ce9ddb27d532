"""Layers that attend to a window: listed, or by a pattern that the family knows."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxmem.base import messages
from jaxmem.base.ranges import integers
from jaxmem.checkpoints.config_reader import Reader
from jaxmem.checkpoints.families.family import (
    ConfigPart,
    Key,
    listed_layers,
    read,
    write,
)
from jaxmem.models.config import ModelConfig, range_of

KINDS = {"full_attention": "global", "sliding_attention": "local"}


EVERY_LAYER, ALTERNATING = ("local",), ("local", "global")


def up_to_every_sixth(reader: Reader) -> tuple[str, ...]:
    """Windows in all but each last of `sliding_window_pattern` layers."""
    within = range_of("layers")
    period = reader.take("_sliding_window_pattern", int, 6, within=within)
    period = reader.take("sliding_window_pattern", int, period, within=within)
    return ("local",) * (period - 1) + ("global",)


def by_period(default: int) -> Callable[[Reader], tuple[str, ...]]:
    """Windows by `sliding_window_pattern`: letters, or a number as above."""

    def pattern(reader: Reader) -> tuple[str, ...]:
        key = "sliding_window_pattern"
        period_or_letters = reader.take(key, (int, str, type(None)), default)
        if not isinstance(period_or_letters, str):
            period = reader.take(key, int, default, within=range_of("layers"))
            return ("local",) * (period - 1) + ("global",)
        if not period_or_letters or set(period_or_letters) - {"L", "G"}:
            raise reader.error(
                "sliding_window_pattern must consist of L and G, got "
                f"{period_or_letters!r}"
            )
        return tuple(
            "local" if letter == "L" else "global" for letter in period_or_letters
        )

    return pattern


def after_the_first(reader: Reader) -> tuple[str, ...]:
    """Windows in layers after `max_window_layers`, if `use_sliding_window` is true."""
    layers = reader.raw["num_hidden_layers"]
    if not reader.take("use_sliding_window", bool, False):
        return ("global",)
    whole = integers(0)
    first = min(reader.take("max_window_layers", int, within=whole), layers)
    return ("global",) * first + ("local",) * (layers - first)


def switched(reader: Reader) -> tuple[str, ...]:
    """Windows in all layers, if `use_sliding_window` is true."""
    return ("local" if reader.take("use_sliding_window", bool, False) else "global",)


def alternating_up_to(reader: Reader) -> tuple[str, ...]:
    """Windows in each other layer of `max_window_layers`, if `use_sliding_window`."""
    kinds = after_the_first(reader)
    if "local" not in kinds:
        return ("global",)
    first = kinds.index("local")
    pairs = ("local", "global") * first
    return pairs[:first] + ("global",) * (len(kinds) - first)


@dataclasses.dataclass(frozen=True)
class Windows(ConfigPart):
    """The pattern of layers, and the window of some of them."""

    # which kinds layers have where `layer_types` does not list them, or what reads it
    pattern: tuple[str, ...] | Callable[[Reader], tuple[str, ...]]
    default: int | None = None  # tokens where `sliding_window` is left out
    listed: bool = True  # whether `layer_types` is written; else all have windows
    ignored: tuple[str, ...] = ()  # keys that only `pattern` reads
    switch: bool = False  # whether `use_sliding_window` is written
    full: str = "global"  # the kind of layers without a window, where others have one
    nothing: int | None = None  # a value of `sliding_window` that is as null

    def read(self, reader: Reader) -> dict[str, Any]:
        optional, within = (int, type(None)), range_of("self_attn.window")
        key = "sliding_window"
        if self.nothing is not None and reader.raw.get(key) == self.nothing:
            window = reader.take(key, int) and None
        else:
            window = reader.take(key, optional, self.default, within=within)
        kinds = listed_layers(reader, KINDS)
        if kinds is None:
            kinds = self.pattern(reader) if callable(self.pattern) else self.pattern
            kinds = ("global",) if window is None else kinds
        reader.read.update(("use_sliding_window", "max_window_layers", *self.ignored))
        if "local" not in kinds:
            return {"pattern": ("global",), "self_attn.window": None}
        if window is None:
            raise reader.error("sliding_window is missing, and layer_types needs it")
        kinds = tuple(self.full if kind == "global" else kind for kind in kinds)
        return {"pattern": kinds, "self_attn.window": window}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        raw: dict[str, Any] = {"sliding_window": model.self_attn.window}
        if self.listed:
            # Kinds that these keys cannot name are read back as another.
            names = {True: "sliding_attention", False: "full_attention"}
            kinds = model.by_layer("pattern")
            raw = {"layer_types": [names[kind == "local"] for kind in kinds]} | raw
        if self.default is not None and model.self_attn.window is None:
            raw["sliding_window"] = self.default  # of no layer, but it must be given
        if self.switch:
            raw["use_sliding_window"] = model.self_attn.window is not None
            raw["max_window_layers"] = 0
        return raw


@dataclasses.dataclass(frozen=True)
class Unrotated(ConfigPart):
    """Layers without rotation: listed, or each last of so many."""

    interval: int  # where `no_rope_layer_interval` is left out

    def read(self, reader: Reader) -> dict[str, Any]:
        layers = reader.raw["num_hidden_layers"]
        within = range_of("layers")
        key = "no_rope_layer_interval"
        period = reader.take(key, int, self.interval, within=within)
        listed = reader.take("no_rope_layers", (list, type(None)), None)
        if not listed:
            listed = [int((layer + 1) % period != 0) for layer in range(layers)]
        if len(listed) != layers or set(map(repr, listed)) - {"0", "1"}:
            raise reader.error(
                f"no_rope_layers must be 0 or 1 for each of {layers} layers, got "
                f"{messages.short(listed)}"
            )
        return {"pattern": tuple("global" if on else "unrotated" for on in listed)}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        kinds = model.by_layer("pattern")  # 1 for layers that are rotated
        return {"no_rope_layers": [int(kind == "global") for kind in kinds]}


@dataclasses.dataclass(frozen=True)
class Chunks(ConfigPart):
    """Layers that attend to chunks, which rotated ones do if nothing else is listed."""

    unrotated: Unrotated  # which layers are not rotated; these have no chunks
    default: int  # tokens of a chunk, where `attention_chunk_size` is left out

    def read(self, reader: Reader) -> dict[str, Any]:
        kinds = self.unrotated.read(reader)["pattern"]
        key, within = "attention_chunk_size", range_of("self_attn.window")
        chunk = reader.take(key, (int, type(None)), self.default, within=within)
        rotated = "global" if chunk is None else "chunked"
        names = {"global": rotated, "unrotated": "unrotated"}
        pattern = tuple(names[kind] for kind in kinds)
        listed = reader.take("layer_types", (list, type(None)), None)
        if listed is not None:
            known = {"full_attention": False, "chunked_attention": True}
            chunked = [reader.choose("layer_types", kind, known) for kind in listed]
            if len(chunked) != len(kinds) or any(
                is_chunked and (kind == "unrotated" or chunk is None)
                for is_chunked, kind in zip(chunked, kinds, strict=True)
            ):
                raise reader.error(
                    "layer_types must have one entry for each layer, and "
                    "'chunked_attention' only in layers for which no_rope_layers has "
                    f"1, with {key}; got {messages.short(listed)}"
                )
            both = zip(chunked, kinds, strict=True)
            pattern = tuple("chunked" if is_chunked else k for is_chunked, k in both)
        window = chunk if "chunked" in pattern else None
        return {"pattern": pattern, "self_attn.window": window}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        kinds = model.by_layer("pattern")
        names = {True: "chunked_attention", False: "full_attention"}
        return {
            "no_rope_layers": [int(kind in ("global", "chunked")) for kind in kinds],
            "layer_types": [names[kind == "chunked"] for kind in kinds],
            "attention_chunk_size": model.self_attn.window,
        }


class Growth(ConfigPart):
    """Growth of queries of unrotated layers, if `attn_temperature_tuning` is true."""

    keys = (
        Key("attn_scale", "self_attn.unrotated_growth", float, 0.1),
        Key("floor_scale", "self_attn.unrotated_growth_length", default=8192),
    )

    def read(self, reader: Reader) -> dict[str, Any]:
        tuned = reader.take("attn_temperature_tuning", (bool, int), True)
        fields = read(self.keys, reader)
        return fields if tuned else fields | {"self_attn.unrotated_growth": None}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        if model.self_attn.unrotated_growth is not None:
            return {"attn_temperature_tuning": True} | write(self.keys, model)
        return {"attn_temperature_tuning": False}
