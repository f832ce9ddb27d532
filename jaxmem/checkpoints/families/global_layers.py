"""How layers of Gemma 4 differ: global ones in sizes, last ones in what they reuse."""

from typing import Any

from jaxmem.base import messages
from jaxmem.base.ranges import integers
from jaxmem.checkpoints.reader import Reader
from jaxmem.models.config import RANGES, ModelConfig

_GLOBAL, _LOCAL = "full_attention", "sliding_attention"
_ROPES = {
    _GLOBAL: {"rope_type": "proportional", "rope_theta": 1e6},
    _LOCAL: {"rope_type": "default", "rope_theta": 1e4},
}


class GlobalLayers:
    """What Gemma 4 says of its global layers, in two forms.

    Either `global_head_dim` and `num_global_key_value_heads`, or `per_layer_config`,
    which has both for each global layer.
    """

    def read(self, reader: Reader) -> dict[str, Any]:
        """The fields whose names start with "global", and those of rotation."""
        shares = reader.take("attention_k_eq_v", bool, False)
        optional = int, type(None)
        given = reader.take("per_layer_config", (dict, type(None)), None)
        keys = "global_head_dim", "num_global_key_value_heads"
        within = RANGES["global_head_dim"]
        width = reader.take(keys[0], optional, 512, within=within)
        heads = reader.take(keys[1], optional, None, within=RANGES["global_kv_heads"])
        heads = heads if shares else None
        if given is not None:
            width, heads = self._of_each(reader, given)
        return {
            "global_head_dim": width,
            "global_kv_heads": heads,
            "keys_are_values": shares,
            **self._ropes(reader),
        }

    def _of_each(self, reader: Reader, given: dict[str, Any]) -> tuple[int, int | None]:
        """The sizes that all global layers have, and no others."""
        kinds = reader.take("layer_types", list)
        wanted = {str(i) for i, kind in enumerate(kinds) if kind == _GLOBAL}
        found = [repr(sorted(given[i].items())) for i in given]
        if given and set(given) != wanted or len(set(found)) > 1:
            raise reader.error(
                "per_layer_config must say the same of every full_attention layer, and "
                f"nothing of others, got {messages.short(given)}"
            )
        if not given:
            return reader.raw["head_dim"], None
        inner = Reader(reader.path, dict(next(iter(given.values()))))
        optional, within = (int, type(None)), RANGES["global_head_dim"]
        width = inner.take("head_dim", int, reader.raw["head_dim"], within=within)
        within = RANGES["global_kv_heads"]
        heads = inner.take("num_key_value_heads", optional, None, within=within)
        inner.finish({})
        return width, heads

    def _ropes(self, reader: Reader) -> dict[str, Any]:
        given = reader.take("rope_parameters", (dict, type(None)), None) or _ROPES
        if set(given) != set(_ROPES):
            raise reader.error(
                f"rope_parameters must be of {_GLOBAL} and {_LOCAL}, got "
                f"{', '.join(map(messages.name, given))}"
            )
        fields = {"rope_proportion": 1.0}
        for kind, field in ((_GLOBAL, "rope_theta"), (_LOCAL, "local_rope_theta")):
            inner = Reader(reader.path, dict(given[kind]))
            known = {"default": False, "proportional": True}
            known = known if kind == _GLOBAL else {"default": False}
            named = inner.take("rope_type", str, "default")
            is_part = reader.choose(f"rope type of {kind}", named, known)
            theta = _ROPES[kind]["rope_theta"]
            fields[field] = inner.take(
                "rope_theta", float, theta, within=RANGES["rope_theta"]
            )
            if is_part:
                fields["rope_proportion"] = inner.take(
                    "partial_rotary_factor", float, 1.0,
                    within=RANGES["rope_proportion"],
                )  # fmt: skip
            inner.finish({"factor": (1.0, 1, None)})
        return fields

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The first form."""
        part = {"partial_rotary_factor": model.rope_proportion or 1.0}
        own = {"rope_type": "proportional", "rope_theta": model.rope_theta} | part
        theta = model.local_rope_theta or model.rope_theta
        return {
            "attention_k_eq_v": model.keys_are_values,
            "global_head_dim": model.global_head_dim,
            "num_global_key_value_heads": model.global_kv_heads,
            "rope_parameters": {
                _GLOBAL: own, _LOCAL: {"rope_type": "default", "rope_theta": theta}
            },
        }  # fmt: skip


class Reused:
    """Last layers that attend to keys and values of earlier ones."""

    def read(self, reader: Reader) -> dict[str, Any]:
        """`mixers` and `reuse_ff`."""
        layers, key = reader.raw["num_hidden_layers"], "num_kv_shared_layers"
        within = integers(0, limit=layers - 1)
        count = reader.take(key, (int, type(None)), 0, within=within) or 0
        wide = reader.take("use_double_wide_mlp", (bool, type(None)), False)
        if not count:
            return {}
        mixers = ("attention",) * (layers - count) + ("reuse",) * count
        double = 2 * reader.raw["intermediate_size"]
        return {"mixers": mixers, "reuse_ff": double if wide else None}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """How many layers, and whether their feed-forward layers are twice as wide."""
        mixers = (model.mixers * model.layers)[: model.layers]
        return {
            "num_kv_shared_layers": mixers.count("reuse"),
            "use_double_wide_mlp": model.reuse_ff == 2 * model.ff,
        }
