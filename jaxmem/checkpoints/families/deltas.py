"""Keys and names of the gated delta rule beside gated attention."""

from typing import Any

from jaxmem.checkpoints.families import standard
from jaxmem.checkpoints.families.family import Key, read, write
from jaxmem.checkpoints.families.ropes import Rope
from jaxmem.checkpoints.reader import Reader
from jaxmem.models.config import RANGES, ModelConfig

_KINDS = {"linear_attention": "delta", "full_attention": "attention"}


class Mixers:
    """Which layers attend: those listed, or each last of so many."""

    def read(self, reader: Reader) -> dict[str, Any]:
        """`mixers`, and their sizes where a layer has the delta rule."""
        count = reader.raw["num_hidden_layers"]
        within = RANGES["layers"]
        period = reader.take("full_attention_interval", int, 4, within=within)
        listed = reader.take("layer_types", (list, type(None)), None)
        if listed is None:
            kinds = ["attention" if (i + 1) % period == 0 else "delta"
                     for i in range(count)]  # fmt: skip
        else:
            kinds = [reader.choose("layer_types", kind, _KINDS) for kind in listed]
        if len(kinds) != count:
            raise reader.error(
                f"layer_types must have one entry a layer, {count}, got {len(kinds)}"
            )
        fields = read(_SIZES, reader)
        if "delta" not in kinds:
            raise reader.error("layer_types has no 'linear_attention'")
        return fields | {"mixers": tuple(kinds)}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The list, and the sizes."""
        names = {kind: name for name, kind in _KINDS.items()}
        kinds = (model.mixers * model.layers)[: model.layers]
        listed = {"layer_types": [names.get(kind) for kind in kinds]}
        return listed | write(_SIZES, model)


_SIZES = (
    Key("linear_num_value_heads", "delta_heads", default=32),
    Key("linear_num_key_heads", "delta_key_heads", default=16),
    Key("linear_key_head_dim", "delta_key_dim", default=128),
    Key("linear_value_head_dim", "delta_value_dim", default=128),
    Key("linear_conv_kernel_dim", "delta_taps", default=4),
)
PARTS = (
    *standard.SIZES,
    standard.head_dim(256),
    standard.ACTIVATION,
    standard.UNTIED,
    standard.ATTENTION_BIAS,
    Rope(fraction=0.25, ignored=("mrope_interleaved", "mrope_section")),
    Mixers(),
)
SWITCHES = {"qk_norm": True, "norm_offset": True, "attention_gate": True}
IGNORED = ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
ONLY = {"attn_output_gate": (True,), "mamba_ssm_dtype": ("float32",)}

_START, _ATTENTION = "blocks/attention/", "model.layers.{}.self_attn."
_LINEAR = "model.layers.{}.linear_attn."
_COMMON = standard.NAMES | {
    _START + "gate": _ATTENTION + "q_proj",
    _START + "delta_taps": _LINEAR + "conv1d.weight",
    _START + "delta_shift": _LINEAR + "dt_bias",
    _START + "delta_log_speed": _LINEAR + "A_log",
    _START + "delta_norm": _LINEAR + "norm",
    _START + "delta_output": _LINEAR + "out_proj",
}


def names(**modules: str) -> dict[str, str]:
    """Names where the delta rule's projections are joined as given.

    Args:
        modules: the end of the name of each of "query", "key" and so on.
    """
    return _COMMON | {
        f"{_START}delta_{part}": _LINEAR + name for part, name in modules.items()
    }
