"""Keys and names that families with experts share, and layers that have experts."""

import dataclasses
from typing import Any

from jaxmem.base import messages
from jaxmem.base.ranges import integers
from jaxmem.checkpoints.config_reader import Reader
from jaxmem.checkpoints.families.family import ConfigPart, Key, read, write
from jaxmem.models.config import ModelConfig, range_of

# Of families that have no loss of their routers.
IGNORED = ("output_router_logits", "router_aux_loss_coef")
SHARED_WIDTH = Key("shared_expert_intermediate_size", "experts.shared_ff")
RENORMALISED = Key("norm_topk_prob", "router.renormalised", bool, False)
# Of routers as that of DeepSeek V3.
GROUPS = (
    Key("n_group", "router.groups", default=1, null_is_default=True),
    Key("topk_group", "router.groups_kept", default=1, null_is_default=True),
    Key("routed_scaling_factor", "router.scale", float, 1.0),
)


def sizes(
    count: str, width: str | None = "moe_intermediate_size", older: str | None = None
) -> tuple[Key, ...]:
    """Keys of the number of experts, of those chosen, and of their width.

    `older` is another name of `count`. Without a key of its own, the width is that of
    dense layers.
    """
    own = "intermediate_size" if width is None else width
    return (
        Key(count, "experts.count", older=older),
        Key("num_experts_per_tok", "experts.per_token"),
        Key(own, "experts.ff", also=("ff",) if width is None else ()),
    )


def names(block: str, matrices: tuple[str, str, str]) -> dict[str, str]:
    """Names of a router and of the matrices (gate, up, down) of each expert."""
    start = "model.layers.{}." + block
    by_path = {"blocks/feed_forward/router": start + "gate"}
    for part, name in zip(("gate", "up", "down"), matrices, strict=True):
        by_path[f"blocks/feed_forward/experts/{part}"] = start + "experts.{}." + name
    return by_path


def shared(name: str, block: str = "model.layers.{}.mlp.") -> dict[str, str]:
    """Names of the matrices of an expert that every token uses."""
    return {
        f"blocks/feed_forward/shared/{part}": f"{block}{name}.{part}_proj"
        for part in ("gate", "up", "down")
    }


def joined_experts(start: str, kind: str = "kernel", end: str = "") -> dict[str, str]:
    """Names where one tensor has the matrices, or biases, of all experts."""
    names = {"gate": "gate_up_proj", "up": "gate_up_proj", "down": "down_proj"}
    return {
        f"blocks/feed_forward/experts/{part}/{kind}": start + name + end
        for part, name in names.items()
    }


@dataclasses.dataclass(frozen=True)
class Balance(ConfigPart):
    """The loss of routers, where `output_router_logits` asks for it."""

    default: float = 0.001  # its factor, where `router_aux_loss_coef` is left out

    def read(self, reader: Reader) -> dict[str, Any]:
        key = "router_aux_loss_coef"
        asked = reader.take("output_router_logits", (bool, type(None)), False)
        factor = reader.take(key, float, self.default, within=range_of(key))
        return {key: factor if asked else None}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        factor = model.router_aux_loss_coef
        if not factor:
            return {"output_router_logits": False}
        return {"output_router_logits": True, "router_aux_loss_coef": factor}


EVERYWHERE = (*sizes("num_local_experts", None, older="num_experts"), Balance())
OF_QWEN = (*sizes("num_experts", older="num_local_experts"), Balance())


class LimitedGroups(ConfigPart):
    """Groups of experts, where `topk_method` says that the choice heeds them."""

    def read(self, reader: Reader) -> dict[str, Any]:
        known = {"greedy": False, "group_limited_greedy": True}
        method = reader.take("topk_method", str, "greedy")
        fields = read(GROUPS[:2], reader)
        if reader.choose("topk_method", method, known):
            return fields
        return dict.fromkeys(fields, 1)

    def write(self, model: ModelConfig) -> dict[str, Any]:
        limited = model.router.groups > 1
        method = "group_limited_greedy" if limited else "greedy"
        return {"topk_method": method} | write(GROUPS[:2], model)


@dataclasses.dataclass(frozen=True)
class Shared(ConfigPart):
    """A shared expert as wide as several experts, whose number a key has."""

    key: str
    default: int

    def read(self, reader: Reader) -> dict[str, Any]:
        optional = int, type(None)
        count = reader.take(self.key, optional, self.default, within=integers(0))
        width = reader.raw["moe_intermediate_size"]
        return {"experts.shared_ff": count * width if count else None}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        if model.experts.shared_ff is None or model.experts.ff is None:
            return {self.key: None}
        return {self.key: model.experts.shared_ff // model.experts.ff}


class Beside(ConfigPart):
    """Experts beside the dense layer, where `enable_moe_block` says so."""

    keys = (
        Key("num_experts", "experts.count", int | None, None),
        Key("top_k_experts", "experts.per_token", int | None, None),
        Key("moe_intermediate_size", "experts.ff", int | None, None),
    )

    def read(self, reader: Reader) -> dict[str, Any]:
        fields = read(self.keys, reader)
        if not reader.take("enable_moe_block", bool, False):
            return {}
        if None in fields.values():
            raise reader.error(
                "enable_moe_block needs num_experts, top_k_experts and "
                "moe_intermediate_size"
            )
        return fields | {"feed_forwards": ("dense_and_experts",)}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        is_there = {"enable_moe_block": model.experts.count is not None}
        return is_there | write(self.keys, model)


_PART, _LAYER = "blocks/feed_forward/", "model.layers.{}."
BESIDE = {
    _PART + "router": _LAYER + "router.proj",
    _PART + "router_scale": _LAYER + "router.scale",
    _PART + "expert_scale": _LAYER + "router.per_expert_scale",
    **joined_experts(_LAYER + "experts."),
    _PART + "dense_norm": _LAYER + "post_feedforward_layernorm_1",
    _PART + "mixed_norm": _LAYER + "post_feedforward_layernorm_2",
    _PART + "stream_norm": _LAYER + "pre_feedforward_layernorm_2",
}
SHARED_WITH_GATE = shared("shared_expert") | {
    "blocks/feed_forward/shared_gate": "model.layers.{}.mlp.shared_expert_gate"
}
NAMES = names("mlp.", ("gate_proj", "up_proj", "down_proj"))
BLOCK_SPARSE = names("block_sparse_moe.", ("w1", "w3", "w2"))
CORRECTION = {
    "blocks/feed_forward/correction": "model.layers.{}.mlp.gate.e_score_correction_bias"
}
CORRECTED = {
    "router.scores": "sigmoid",
    "router.correction": True,
    "router.group_best": 2,
}


class EveryFew(ConfigPart):
    """Each last of `decoder_sparse_step` layers has experts, but those listed."""

    def read(self, reader: Reader) -> dict[str, Any]:
        count, whole = reader.raw["num_hidden_layers"], range_of("layers")
        step = reader.take("decoder_sparse_step", int, 1, within=whole)
        dense = reader.take("mlp_only_layers", (list, type(None)), None) or []
        known = set(range(count))
        if not all(type(layer) is int and layer in known for layer in dense):
            raise reader.error(
                f"mlp_only_layers must be numbers of the {count} layers, got "
                f"{messages.short(dense)}"
            )
        return _of_layers(
            reader, [(i + 1) % step == 0 and i not in dense for i in range(count)]
        )

    def write(self, model: ModelConfig) -> dict[str, Any]:
        kinds = model.by_layer("feed_forwards")
        dense = [layer for layer, kind in enumerate(kinds) if kind == "dense"]
        return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


class EveryLast(ConfigPart):
    """Layers with experts: listed, or each last of `interleave_moe_layer_step`."""

    def read(self, reader: Reader) -> dict[str, Any]:
        count, whole = reader.raw["num_hidden_layers"], range_of("layers")
        step = reader.take("interleave_moe_layer_step", int, 1, within=whole)
        listed = reader.take("moe_layers", (list, type(None)), None)
        if listed is None:
            listed = list(range(step - 1, count, step))
        if not all(type(layer) is int for layer in listed):
            raise reader.error(
                f"moe_layers must be numbers of layers, got {messages.short(listed)}"
            )
        return _of_layers(reader, [layer in listed for layer in range(count)])

    def write(self, model: ModelConfig) -> dict[str, Any]:
        kinds = model.by_layer("feed_forwards")
        return {"moe_layers": [i for i, kind in enumerate(kinds) if kind != "dense"]}


@dataclasses.dataclass(frozen=True)
class AfterTheFirst(ConfigPart):
    """All layers after the first ones have experts."""

    default: int  # how many those are, where `first_k_dense_replace` is left out

    def read(self, reader: Reader) -> dict[str, Any]:
        count, key = reader.raw["num_hidden_layers"], "first_k_dense_replace"
        first = reader.take(key, int, self.default, within=integers(0))
        return _of_layers(reader, [layer >= first for layer in range(count)])

    def write(self, model: ModelConfig) -> dict[str, Any]:
        kinds = model.by_layer("feed_forwards")
        return {"first_k_dense_replace": kinds.count("dense")}


def _of_layers(reader: Reader, sparse: list[bool]) -> dict[str, Any]:
    if not any(sparse):
        raise reader.error("no layer has experts; this is not implemented")
    if all(sparse):
        return {"feed_forwards": ("experts",)}
    return {"feed_forwards": tuple("experts" if x else "dense" for x in sparse)}
