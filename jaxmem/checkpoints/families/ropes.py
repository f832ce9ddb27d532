"""Rotary parameters of `config.json`, in the forms of several years."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxmem.checkpoints.families.family import ONLY
from jaxmem.checkpoints.reader import MISSING, Reader
from jaxmem.core import messages
from jaxmem.models.config import RANGES, ModelConfig

_KINDS = {"default": None, "linear": "linear", "llama3": "llama3"}
_FIELDS = {
    "default": {},
    "linear": {"factor": "rope_factor"},
    "llama3": {
        "factor": "rope_factor",
        "low_freq_factor": "rope_low_factor",
        "high_freq_factor": "rope_high_factor",
        "original_max_position_embeddings": "rope_original",
    },
}
_LAYERS = "full_attention", "sliding_attention"


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary parameters: one object, or a base and a separate scaling object.

    Attributes:
        theta: base that transformers takes where none is given.
    """

    theta: float = 10_000.0

    def read(self, reader: Reader) -> dict[str, Any]:
        """The fields whose names start with "rope"."""
        optional = (dict, type(None))
        given = reader.take("rope_parameters", optional, None)
        within = RANGES["rope_theta"]
        base = reader.take("rope_theta", float, self.theta, within=within)
        scaling = reader.take("rope_scaling", optional, None)
        old = {"rope_theta": base} | (scaling or {})
        if given is None:
            return _fields(reader, old, self.theta)
        fields = _fields(reader, {"rope_theta": base} | given, self.theta)
        if not reader.raw.get("rope_theta"):
            old["rope_theta"] = fields["rope_theta"]
        if not scaling:  # the old form says no more than the base
            old = given | old
        if _fields(reader, old, self.theta) != fields:
            raise reader.error(
                "rope_parameters is not what rope_theta and rope_scaling say; delete "
                "the form that the model was not trained with"
            )
        return fields

    def write(self, model: ModelConfig, max_positions: int) -> dict[str, Any]:
        """The older form, which every version of transformers reads."""
        del max_positions
        scaling = None
        if model.rope_scaling is not None:
            keys = _FIELDS[model.rope_scaling]
            scaling = {"rope_type": model.rope_scaling}
            scaling |= {key: getattr(model, field) for key, field in keys.items()}
        return {"rope_theta": model.rope_theta, "rope_scaling": scaling}


@dataclasses.dataclass(frozen=True)
class TwoRopes:
    """Rotary parameters that are separate for global and local layers."""

    theta: float = 1_000_000.0
    local_theta: float = 10_000.0

    def read(self, reader: Reader) -> dict[str, Any]:
        """As `Rope.read`, and the base of local layers."""
        given = reader.take("rope_parameters", (dict, type(None)), None)
        if given is None or "full_attention" not in given:
            within = RANGES["local_rope_theta"]
            key = "rope_local_base_freq"
            local = reader.take(key, float, self.local_theta, within=within)
            return Rope(self.theta).read(reader) | {"local_rope_theta": local}
        reader.read.update(("rope_theta", "rope_scaling", "rope_local_base_freq"))
        if set(given) != set(_LAYERS):
            raise reader.error(
                f"rope_parameters must be of {', '.join(_LAYERS)}, got "
                f"{', '.join(map(messages.name, given))}"
            )
        kinds = Reader(reader.path, given)
        part = kinds.take("sliding_attention", dict)
        local = _fields(reader, part, self.local_theta)
        if local["rope_scaling"] is not None:
            raise reader.error(
                f"rope type {local['rope_scaling']!r} in sliding_attention is not "
                "implemented; only 'default' is"
            )
        whole = _fields(reader, kinds.take("full_attention", dict), self.theta)
        return whole | {"local_rope_theta": local["rope_theta"]}

    def write(self, model: ModelConfig, max_positions: int) -> dict[str, Any]:
        """The older form, too."""
        local = model.local_rope_theta or model.rope_theta
        raw = Rope(self.theta).write(model, max_positions)
        return raw | {"rope_local_base_freq": local}


def _fields(reader: Reader, given: Mapping[str, Any], theta: float) -> dict[str, Any]:
    given = dict(given)
    kind = given.pop("type", "default")
    kind = given.pop("rope_type", kind)
    fields = {"rope_scaling": reader.choose("rope type", kind, _KINDS)}
    inner = Reader(reader.path, given)
    for key, field in {"rope_theta": "rope_theta", **_FIELDS[kind]}.items():
        default = {"rope_theta": theta}.get(key, MISSING)
        whole = int if RANGES[field].whole else float
        fields[field] = inner.take(key, whole, default, within=RANGES[field])
    inner.finish(ONLY)
    return fields
