"""What a family of models is: data.

A family says which switches of `ModelConfig` its models share, which keys of
`config.json` set the others, and how the decoder's weights are named in a checkpoint.
Each part of it reads its keys, and writes them for a decoder without a checkpoint.
"""

import dataclasses
import types
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from jaxmem.checkpoints.reader import MISSING, Reader
from jaxmem.models.config import RANGES, ModelConfig


class Part(Protocol):
    """Keys of `config.json` that belong together."""

    def read(self, reader: Reader) -> dict[str, Any]:
        """The fields of `ModelConfig` that the keys set."""
        ...

    def write(self, model: ModelConfig, max_positions: int) -> dict[str, Any]:
        """The keys that are read back as the fields of a model."""
        ...


def _same(value: Any) -> Any:
    return value


@dataclasses.dataclass(frozen=True)
class Key:
    """One key that sets one field.

    Attributes:
        key: of `config.json`.
        field: of `ModelConfig`.
        kind: type of the value; None where it may be null, which the field then is.
        default: value that transformers takes where the key is left out, or a function
            from the object to it.
        values: the names that the value may be, and what the field is for each.
        null_is_default: whether null means the default.
        older: name of the key in older files, read where `key` is left out or null.
        read: from the value to the field's.
        write: the inverse of `read`.
    """

    key: str
    field: str
    kind: type | types.UnionType = int
    default: Any = MISSING
    values: Mapping[str, Any] | None = None
    null_is_default: bool = False
    older: str | None = None
    read_value: Callable[[Any], Any] = _same
    write_value: Callable[[Any], Any] = _same

    def read(self, reader: Reader) -> dict[str, Any]:
        """The field."""
        value = self._given(reader)
        if self.values is not None:
            value = reader.choose(self.key, value, self.values)
        return {self.field: self.read_value(value)}

    def _given(self, reader: Reader) -> Any:
        kinds = getattr(self.kind, "__args__", (self.kind,))
        if self.null_is_default:
            kinds = (*kinds, type(None))
        default = self.default
        if callable(default):
            default = default(reader.raw)
        within = RANGES.get(self.field) if self.values is None else None
        keys = (self.key,) if self.older is None else (self.key, self.older)
        absent = MISSING if default is MISSING else None
        given = [reader.take(key, kinds, absent, within=within) for key in keys]
        found = [v for v, k in zip(given, keys, strict=True) if k in reader.raw]
        if self.null_is_default:
            found = [value for value in found if value is not None]
        return found[0] if found else default

    def write(self, model: ModelConfig, max_positions: int) -> dict[str, Any]:
        """The key."""
        value = self.write_value(getattr(model, self.field))
        if self.values is not None:
            value = next((k for k, v in self.values.items() if v == value), None)
        return {self.key: value}


@dataclasses.dataclass(frozen=True)
class Family:
    """One architecture of `config.json`.

    Attributes:
        architecture: its name in "architectures".
        model_type: its "model_type".
        parts: what reads its keys.
        names: names of modules in a checkpoint, by the decoder's: of
            "blocks/attention/query" the name of layer "{}".
        switches: the fields of `ModelConfig` that are the same in all its models.
        only: keys of which only some values are implemented, the first of them the
            default, in addition to `ONLY`.
        ignored: keys that do not change logits, in addition to `IGNORED`.
    """

    architecture: str
    model_type: str
    parts: tuple[Part, ...]
    names: Mapping[str, str]
    switches: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    only: Mapping[str, tuple] = dataclasses.field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    def read(self, reader: Reader) -> dict[str, Any]:
        """The fields of `ModelConfig` that a config sets; all its keys are checked."""
        reader.read.update(self.ignored)
        fields = dict(self.switches)
        for part in self.parts:
            fields |= part.read(reader)
        reader.finish({**ONLY, **self.only})
        return fields

    def write(self, model: ModelConfig, max_positions: int) -> dict[str, Any]:
        """A config of this family, which has those fields that its keys can say."""
        raw = {"architectures": [self.architecture], "model_type": self.model_type}
        for part in self.parts:
            raw |= part.write(model, max_positions)
        return raw | {"max_position_embeddings": max_positions}


@dataclasses.dataclass(frozen=True)
class WithImages:
    """A multimodal architecture, whose text part is read as a model of its own.

    Attributes:
        architecture: its name in "architectures".
        model_type: its "model_type".
        defaults: keys of the text part that may be left out, and what they are then.
        ignored: keys that concern images only.
        prefixes: what replaces "model." in the names of the text part's tensors, and
            what precedes "lm_head", in each published form.
        images: how the names of the other tensors start.
    """

    architecture: str
    model_type: str
    text: tuple[str, ...]
    defaults: Mapping[str, Any]
    ignored: frozenset[str]
    prefixes: tuple[tuple[str, str], ...] = (
        ("language_model.model.", "language_model."),
        ("model.language_model.", ""),
    )
    images: tuple[str, ...] = (
        "vision_tower.",
        "multi_modal_projector.",
        "model.vision_tower.",
        "model.multi_modal_projector.",
    )


# Keys that do not change the logits of a forward pass without dropout.
IGNORED = frozenset(
    "_name_or_path architectures attention_dropout auto_map bos_token_id "
    "cache_implementation dtype eos_token_id id2label initializer_range label2id "
    "max_position_embeddings model_type output_attentions output_hidden_states "
    "pad_token_id pretraining_tp problem_type return_dict torch_dtype "
    "transformers_version unsloth_fixed use_cache "
    "_attn_implementation _attn_implementation_autoset".split()
)
# Keys of which only these values are implemented; the first one is the default.
ONLY = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_bidirectional_attention": (False, None),
    "quantization_config": (None,),
    "use_mrope": (False, None),
    "partial_rotary_factor": (1.0, None),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
}
