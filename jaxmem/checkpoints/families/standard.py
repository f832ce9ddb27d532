"""Keys that most families share, as Llama has them."""

from collections.abc import Mapping
from typing import Any

from jaxmem.checkpoints.config_reader import Reader
from jaxmem.checkpoints.families.family import ConfigPart, Key
from jaxmem.checkpoints.families.ropes import RopePart
from jaxmem.models.config import ModelConfig

ACTIVATIONS = {
    "silu": "silu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_new": "gelu",
    "gelu": "exact_gelu",
    "relu": "relu",
    "relu2": "squared_relu",
    "xielu": "xielu",
}


def activation(default: str, key: str = "hidden_act") -> Key:
    """The activation of the feed-forward layer."""
    known = {default: ACTIVATIONS[default], **ACTIVATIONS}  # the default is written
    return Key(key, "mlp.activation", str, default, known)


def sizes(eps: float = 1e-6, key: str = "rms_norm_eps") -> tuple[Key, ...]:
    """Sizes, and what norms add, whose key and default differ."""
    return (
        Key("num_hidden_layers", "layers"),
        Key("hidden_size", "hidden"),
        Key("intermediate_size", "ff"),
        Key("num_attention_heads", "heads"),
        Key(
            "num_key_value_heads",
            "kv_heads",
            default=lambda raw: raw["num_attention_heads"],
            null_is_default=True,
        ),
        Key("vocab_size", "vocab_size"),
        Key(key, "norm.eps", float, eps),
    )


def without(parts: tuple[Any, ...], field: str) -> tuple[Any, ...]:
    """Parts but the key of a field."""
    return tuple(part for part in parts if getattr(part, "field", None) != field)


def but(names: Mapping[str, str], *modules: str) -> dict[str, str]:
    """Names but those of some modules."""
    return {module: name for module, name in names.items() if module not in modules}


def head_dim(default: int | None = None) -> Key:
    """The width of a head; None: heads share the width of the residual stream."""

    def derive(raw: Any) -> int:
        return default or raw["hidden_size"] // raw["num_attention_heads"]

    return Key("head_dim", "head_dim", default=derive, null_is_default=True)


def qkv_bias(default: bool) -> Key:
    """Biases of queries, keys and values."""
    return Key(
        "attention_bias", "self_attn.qkv_bias", bool, default, null_is_default=True
    )


def all_biases(default: bool, null_is_default: bool = False) -> Key:
    """Biases of queries, keys, values and attention's output."""
    return Key(
        "attention_bias", "self_attn.qkv_bias", bool, default,
        null_is_default=null_is_default, also=("self_attn.output_bias",),
    )  # fmt: skip


def parallel(kind: str, default: bool) -> Key:
    """The norms, `kind`, of sublayers that both read a layer's input, if they do."""
    return Key(
        "use_parallel_residual", "residual.parallel", bool, default,
        read_value=lambda is_parallel: kind if is_parallel else None,
        write_value=lambda value: value is not None,
    )  # fmt: skip


class Derived(ConfigPart):
    """Fields that other keys determine: another key's value, or a ratio of two."""

    def __init__(self, **fields: str | tuple[str, str]):
        self.fields = fields

    def read(self, reader: Reader) -> dict[str, Any]:
        raw = reader.raw
        return {
            field: raw[keys] if isinstance(keys, str) else raw[keys[0]] // raw[keys[1]]
            for field, keys in self.fields.items()
        }

    def write(self, model: ModelConfig) -> dict[str, Any]:
        del model
        return {}


HEAD_DIM = head_dim()
ACTIVATION = activation("silu")
TIED = Key("tie_word_embeddings", "tied", bool, True)
UNTIED = Key("tie_word_embeddings", "tied", bool, False)
SHARED_WIDTH = Derived(head_dim=("hidden_size", "num_attention_heads"))
QKV_BIAS = qkv_bias(True)
ATTENTION_BIAS = all_biases(False, null_is_default=True)
FF_BIAS = Key("mlp_bias", "mlp.bias", bool, False, null_is_default=True)


def parts(
    *more: ConfigPart,
    eps: float = 1e-6,
    eps_key: str = "rms_norm_eps",
    head: ConfigPart = HEAD_DIM,
    activation: Key = ACTIVATION,
    tied: Key = UNTIED,
    rope: ConfigPart = RopePart(),  # noqa: B008
) -> tuple[ConfigPart, ...]:
    """The parts of Llama, where others do not take their place, and more."""
    return (*sizes(eps, eps_key), head, activation, tied, rope, *more)


LAYER_NORM = {"norm.kind": "layer", "norm.bias": True}

_LAYER = "model.layers.{}."
# Of families that also normalise what a sublayer adds.
POST_NORMS = {
    "blocks/post_attention_norm": _LAYER + "post_attention_layernorm",
    "blocks/feed_forward_norm": _LAYER + "pre_feedforward_layernorm",
    "blocks/post_feed_forward_norm": _LAYER + "post_feedforward_layernorm",
}
# Of families that store some matrices joined.
JOINED_QKV = dict.fromkeys(
    ("blocks/attention/query", "blocks/attention/key", "blocks/attention/value"),
    _LAYER + "self_attn.qkv_proj",
)
JOINED_GATE = dict.fromkeys(
    ("blocks/feed_forward/gate", "blocks/feed_forward/up"), _LAYER + "mlp.gate_up_proj"
)
