"""Both forms of the rotary parameters in a `config.json`.

Where transformers 5 writes its own form alone, older readers take a base of 10,000 in
silence.
"""

from collections.abc import Mapping
from typing import Any

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
        older = _older(raw[_NEW])  # behind the keys that are there, in their order
        return dict(raw) | {k: v for k, v in older.items() if k not in raw}
    if raw.get("rope_theta") is None:
        return dict(raw)
    scaling = dict(raw.get("rope_scaling") or {})
    kind = scaling.pop("type", "default")
    new = {"rope_theta": raw["rope_theta"], "rope_type": kind} | scaling
    if (local := raw.get("rope_local_base_freq")) is not None:
        new = {_GLOBAL: new, _LOCAL: {"rope_theta": local, "rope_type": "default"}}
    return dict(raw) | {_NEW: new}


def _older(new: Mapping[str, Any]) -> dict[str, Any]:
    local = {}
    if _GLOBAL in new:
        local = {"rope_local_base_freq": new[_LOCAL].get("rope_theta", 10_000.0)}
        new = new[_GLOBAL]
    scaling: dict[str, Any] | None = {k: v for k, v in new.items() if k != "rope_theta"}
    if new.get("rope_type", "default") == "default":
        scaling = None
    older = {"rope_theta": new.get("rope_theta"), "rope_scaling": scaling} | local
    return {k: v for k, v in older.items() if v is not None or k == "rope_scaling"}
