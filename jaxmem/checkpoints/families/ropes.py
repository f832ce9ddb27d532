"""Rotary parameters of `config.json`, in the forms of several years."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxmem.base import messages
from jaxmem.base.ranges import reals
from jaxmem.checkpoints.config_reader import Reader
from jaxmem.checkpoints.families.family import ONLY, ConfigPart, Key, read, write
from jaxmem.models.config import ModelConfig, range_of

_FACTOR = Key("factor", "rope.factor", float)
_ORIGINAL = Key("original_max_position_embeddings", "rope.original_length")
_KINDS = {
    "default": (),
    "linear": (_FACTOR,),
    "llama3": (
        _FACTOR,
        Key("low_freq_factor", "rope.low_factor", float),
        Key("high_freq_factor", "rope.high_factor", float),
        _ORIGINAL,
    ),
    "yarn": (
        _FACTOR,
        Key("beta_slow", "rope.low_factor", float, 1.0),
        Key("beta_fast", "rope.high_factor", float, 32.0),
        _ORIGINAL,
    ),
    "longrope": (),
    "su": (),
    "dynamic": (_FACTOR,),
}
_SCALINGS = {"default": None, "longrope": "listed", "su": "listed"}  # others: the same
_LAYERS = "full_attention", "sliding_attention"
_WITH_NULL = (float, type(None))
_ANY, _POSITIVE = reals(), reals(above=0)


@dataclasses.dataclass(frozen=True)
class RopePart(ConfigPart):
    """Rotary parameters: one object, or a base and a separate scaling object."""

    theta: float = 10_000.0  # base that transformers takes where none is given
    # of each head that is rotated where none is given; None: all of it, always
    fraction: float | None = None
    theta_key: str = "rope_theta"  # of the base in the older form
    fraction_key: str = "partial_rotary_factor"  # of the fraction in the older form
    growth: str | None = (
        None  # the key of `self_attn.query_growth`, if the family has it
    )
    # the key a of a fixed factor a^(d / (d - 2)) of the base with the type "dynamic"
    stretch: str | None = None
    ignored: tuple[str, ...] = ()  # keys of the object that do not change logits

    def read(self, reader: Reader) -> dict[str, Any]:
        optional = (dict, type(None))
        newer = reader.take("rope_parameters", optional, None)
        within = range_of("rope.theta")
        base = reader.take(self.theta_key, float, self.theta, within=within)
        scaling = reader.take("rope_scaling", optional, None)
        old = {"rope_theta": base} | (scaling or {})
        if self.fraction is not None:
            within = range_of("rope.fraction")
            part = reader.take(self.fraction_key, float, self.fraction, within=within)
            old = {"partial_rotary_factor": part} | old
        if newer is None:
            return self.fields(reader, old)
        reader.read.add("rope_theta")  # of the older form, which others write beside
        new = {"rope_theta": base} | newer
        if self.fraction is not None:
            new = {"partial_rotary_factor": old["partial_rotary_factor"]} | new
        fields = self.fields(reader, new)
        if not reader.raw.get(self.theta_key):
            old["rope_theta"] = new["rope_theta"]
        if self.fraction is not None and self.fraction_key not in reader.raw:
            old["partial_rotary_factor"] = new["partial_rotary_factor"]
        if not scaling:  # the old form says no more than the base
            old = newer | old
        if self.fields(reader, old) != fields:
            raise reader.error(
                "rope_parameters disagrees with rope_theta and rope_scaling; delete "
                "the form that the model was not trained with"
            )
        return fields

    def fields(self, reader: Reader, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """The fields that one object of rotary parameters sets."""
        parameters = dict(parameters)
        kind = parameters.pop("type", "default")
        kind = parameters.pop("rope_type", kind)
        stretch = parameters.pop(self.stretch, None) if self.stretch else None
        if stretch is not None and kind == "dynamic":
            return self._stretch_base(reader, parameters, stretch)
        keys = [Key("rope_theta", "rope.theta", float, self.theta)]
        keys += reader.choose("rope type", kind, _KINDS)
        inner = Reader(reader.path, parameters)
        if self.growth is not None:
            keys.append(Key(self.growth, "self_attn.query_growth", float | None, None))
            inner.read.add("max_position_embeddings")
        if self.fraction is not None:
            keys.append(Key("partial_rotary_factor", "rope.fraction", float, 1.0))
        fields = {"rope.scaling": _SCALINGS.get(kind, kind)} | read(keys, inner)
        if kind == "dynamic":  # stretches nothing up to so many tokens
            for each in (reader, inner):  # it does not read the original number
                each.read.add("original_max_position_embeddings")
            key, within = "max_position_embeddings", range_of("rope.limit")
            fields["rope.limit"] = reader.take(key, int, within=within)
        if fields["rope.scaling"] == "listed":
            fields |= _listed_factors(reader, inner)
        if kind == "yarn":
            fields |= _yarn_magnitude(inner, fields["rope.factor"])
        inner.read.update(self.ignored)
        inner.finish({k: v for k, v in ONLY.items() if k not in inner.read})
        return fields

    def _stretch_base(
        self, reader: Reader, parameters: dict[str, Any], stretch: Any
    ) -> dict[str, Any]:
        """Fields of a base that a fixed factor stretches, whatever the length is."""
        for key in ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
            parameters.pop(key, None)
        fields = self.fields(reader, parameters)
        name = str(self.stretch)
        factor = Reader(reader.path, {name: stretch}).take(
            name, float, within=_POSITIVE
        )
        heads = reader.raw["num_attention_heads"]
        width = reader.raw.get("head_dim") or reader.raw["hidden_size"] // heads
        theta = fields["rope.theta"] * factor ** (width / (width - 2))
        return fields | {"rope.theta": theta}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        # The older form, which every version of transformers reads.
        scaling: Any = None
        if model.rope.scaling == "listed":
            scaling = _write_listed(model)
        elif model.rope.scaling is not None:
            kind = model.rope.scaling
            scaling = {"rope_type": kind} | write(_KINDS[kind], model)
        if scaling is not None and model.rope.scaling == "yarn":
            scaling |= {
                "attention_factor": model.rope.attention_factor,
                "truncate": model.rope.truncate,
            }
            if self.growth is not None:
                scaling[self.growth] = model.self_attn.query_growth
        raw = {self.theta_key: model.rope.theta, "rope_scaling": scaling}
        if self.fraction is not None:
            raw[self.fraction_key] = model.rope.fraction
        return raw


@dataclasses.dataclass(frozen=True)
class TwoRopes(ConfigPart):
    """Rotary parameters that are separate for global and local layers."""

    theta: float = 1_000_000.0
    local_theta: float = 10_000.0
    local_key: str | None = "rope_local_base_freq"  # of the older form, if it has one

    def read(self, reader: Reader) -> dict[str, Any]:
        ropes = reader.take("rope_parameters", (dict, type(None)), None)
        keys = () if self.local_key is None else (self.local_key,)
        if ropes is None or "full_attention" not in ropes:
            local, within = self.local_theta, range_of("rope.local_theta")
            for key in keys:
                local = reader.take(key, float, local, within=within)
            return RopePart(self.theta).read(reader) | {"rope.local_theta": local}
        reader.read.update(("rope_theta", "rope_scaling", "rope_local_base_freq"))
        if set(ropes) != set(_LAYERS):
            raise reader.error(
                f"rope_parameters must be for {', '.join(_LAYERS)}, got "
                f"{', '.join(map(messages.name, ropes))}"
            )
        kinds = Reader(reader.path, ropes)
        part = kinds.take("sliding_attention", dict)
        local = RopePart(self.local_theta).fields(reader, part)
        if local["rope.scaling"] is not None:
            raise reader.error(
                f"rope type {local['rope.scaling']!r} in sliding_attention is not "
                "implemented; only 'default' is"
            )
        whole = RopePart(self.theta).fields(reader, kinds.take("full_attention", dict))
        return whole | {"rope.local_theta": local["rope.theta"]}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        # The older form, where it can say the base of local layers.
        local = model.rope.local_theta or model.rope.theta
        raw = RopePart(self.theta).write(model)
        if self.local_key is not None:
            return raw | {self.local_key: local}
        whole = {"rope_type": "default"} | (raw["rope_scaling"] or {})
        both = (
            whole | {"rope_theta": model.rope.theta},
            {"rope_type": "default", "rope_theta": local},
        )
        return {"rope_parameters": dict(zip(_LAYERS, both, strict=True))}


def _yarn_magnitude(inner: Reader, factor: float) -> dict[str, Any]:
    """The factor of cosines and sines: `attention_factor`, or by ln(factor)."""

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    attention_factor = inner.take(
        "attention_factor", _WITH_NULL, None, within=_POSITIVE
    )
    both = [
        inner.take(key, _WITH_NULL, None, within=_ANY)
        for key in ("mscale", "mscale_all_dim")
    ]
    if attention_factor is None:
        above, below = both
        ratio = above and below
        attention_factor = (
            magnitude(above) / magnitude(below) if ratio else magnitude(1.0)
        )
    truncate = inner.take("truncate", bool, True)
    return {"rope.attention_factor": attention_factor, "rope.truncate": truncate}


def _listed_factors(reader: Reader, inner: Reader) -> dict[str, Any]:
    """The factors of documents up to the limit, and of longer ones."""
    key, within = "original_max_position_embeddings", range_of("rope.limit")
    limit = inner.take(key, int, reader.take(key, int, 0, within=within), within=within)
    limit = limit or reader.take("max_position_embeddings", int)
    factors = []
    for key in ("short_factor", "long_factor"):
        listed = inner.take(key, list)
        if not all(type(x) in (int, float) and x > 0 for x in listed):
            raise reader.error(f"{key} must be a list of numbers above 0")
        factors.append(tuple(map(float, listed)))
    attention_factor = inner.take(
        "attention_factor", _WITH_NULL, None, within=_POSITIVE
    )
    times = reader.take("max_position_embeddings", int) / limit
    times = inner.take("factor", _WITH_NULL, times, within=_POSITIVE) or times
    if attention_factor is None:
        growth = math.log(max(times, 1)) / math.log(limit)
        attention_factor = math.sqrt(1 + growth)
    short, long = (
        inner.take(key, _WITH_NULL, None, within=_POSITIVE) or attention_factor
        for key in ("short_mscale", "long_mscale")
    )
    return {
        "rope.short_factors": factors[0],
        "rope.long_factors": factors[1],
        "rope.limit": limit,
        "rope.attention_factor": short,
        "rope.long_attention_factor": None if long == short else long,
    }


def _write_listed(model: ModelConfig) -> dict[str, Any]:
    magnitudes = {}
    if model.rope.long_attention_factor is not None:
        magnitudes = {
            "short_mscale": model.rope.attention_factor,
            "long_mscale": model.rope.long_attention_factor,
        }
    return magnitudes | {
        "rope_type": "longrope",
        "short_factor": list(model.rope.short_factors or ()),
        "long_factor": list(model.rope.long_factors or ()),
        "attention_factor": model.rope.attention_factor,
        "original_max_position_embeddings": model.rope.limit,
    }


_NEW = "rope_parameters"
_GLOBAL, _LOCAL = "full_attention", "sliding_attention"


def in_both(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The config with `rope_parameters`, and `rope_theta` and `rope_scaling` beside it.

    Kinds of layers with bases of their own (Gemma 3) have `rope_local_base_freq` in the
    older form.
    """
    kinds = [raw.get(_NEW), (raw.get(_NEW) or {}).get(_GLOBAL)]
    if any((kind or {}).get("rope_type") == "proportional" for kind in kinds):
        return dict(raw)  # older readers do not know it
    if raw.get(_NEW):
        older = _older_form(raw[_NEW])  # behind the keys that are there, in their order
        return dict(raw) | {k: v for k, v in older.items() if k not in raw}
    if raw.get("rope_theta") is None:
        return dict(raw)
    scaling = dict(raw.get("rope_scaling") or {})
    kind = scaling.pop("type", "default")
    new = {"rope_theta": raw["rope_theta"], "rope_type": kind} | scaling
    if (local := raw.get("rope_local_base_freq")) is not None:
        new = {_GLOBAL: new, _LOCAL: {"rope_theta": local, "rope_type": "default"}}
    return dict(raw) | {_NEW: new}


def _older_form(new: Mapping[str, Any]) -> dict[str, Any]:
    local = {}
    if _GLOBAL in new:
        local = {"rope_local_base_freq": new[_LOCAL].get("rope_theta", 10_000.0)}
        new = new[_GLOBAL]
    scaling: dict[str, Any] | None = {k: v for k, v in new.items() if k != "rope_theta"}
    if new.get("rope_type", "default") == "default":
        scaling = None
    older = {"rope_theta": new.get("rope_theta"), "rope_scaling": scaling} | local
    return {k: v for k, v in older.items() if v is not None or k == "rope_scaling"}
