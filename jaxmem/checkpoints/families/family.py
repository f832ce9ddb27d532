"""A family of models, as data.

A family says which switches of `ModelConfig` its models share, which keys of
`config.json` set the others, and how the decoder's weights are named in a checkpoint.
Each part of it reads its keys, and writes them for a decoder without a checkpoint.
"""

import dataclasses
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Protocol

from jaxmem.base.fields import value_of
from jaxmem.checkpoints.config_reader import MISSING, Reader
from jaxmem.models.config import ModelConfig, range_of


class ConfigPart(Protocol):
    """Keys of `config.json` that belong together."""

    def read(self, reader: Reader) -> dict[str, Any]:
        """The settings of `ModelConfig`, by path, that the keys determine."""
        ...

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The keys that are read back as the fields of a model."""
        ...


def read(parts: Iterable[ConfigPart], reader: Reader) -> dict[str, Any]:
    """The fields that parts set; if two set one field, the later part does."""
    return {k: v for part in parts for k, v in part.read(reader).items()}


def write(parts: Iterable[ConfigPart], model: ModelConfig) -> dict[str, Any]:
    """The keys that parts write."""
    return {k: v for part in parts for k, v in part.write(model).items()}


def listed_layers(reader: Reader, known: Mapping[str, Any]) -> tuple | None:
    """The kind of each layer, as `layer_types` lists it; None if it is left out."""
    listed = reader.take("layer_types", (list, type(None)), None)
    if listed is None:
        return None
    kinds = tuple(reader.choose("layer_types", kind, known) for kind in listed)
    if len(kinds) != (count := reader.raw["num_hidden_layers"]):
        raise reader.error(
            f"layer_types must have one entry for each layer, {count}, got {len(kinds)}"
        )
    return kinds


def _identity(value: Any) -> Any:
    """The value itself."""
    return value


@dataclasses.dataclass(frozen=True)
class Key(ConfigPart):
    """One key of `config.json` that determines one setting of `ModelConfig`."""

    key: str
    field: str  # path of the setting, as in "rope.theta"
    kind: type | types.UnionType = int  # None where it may be null, as the field then
    # value in transformers if the key is left out, or a function of the raw config
    default: Any = MISSING
    values: Mapping[str, Any] | None = None  # allowed values, and the field's for each
    null_is_default: bool = False  # True: null means the default
    older: str | None = None  # its name in older files, read where it is absent or null
    read_value: Callable[[Any], Any] = _identity  # from the value to the field's
    write_value: Callable[[Any], Any] = _identity  # the inverse
    also: tuple[str, ...] = ()  # other fields that it sets to the same
    may_be_zero: bool = False  # True: 0 is a value, which `read_value` changes

    def read(self, reader: Reader) -> dict[str, Any]:
        value = self._take_value(reader)
        if self.values is not None:
            value = reader.choose(self.key, value, self.values)
        return dict.fromkeys((self.field, *self.also), self.read_value(value))

    def _take_value(self, reader: Reader) -> Any:
        """The value of the key or of its older name, or the default."""
        kinds = getattr(self.kind, "__args__", (self.kind,))
        if self.null_is_default:
            kinds = (*kinds, type(None))
        default = self.default
        if callable(default):
            default = default(reader.raw)
        within = range_of(self.field) if self.values is None else None
        if self.may_be_zero and reader.raw.get(self.key) == 0:
            within = None
        keys = (self.key,) if self.older is None else (self.key, self.older)
        empty = (MISSING,) if type(None) in kinds else (MISSING, None)
        is_there = any(reader.raw.get(key, MISSING) not in empty for key in keys)
        absent = MISSING if default is MISSING and not is_there else None
        taken = [reader.take(key, kinds, absent, within=within) for key in keys]
        present = [v for v, k in zip(taken, keys, strict=True) if k in reader.raw]
        if self.null_is_default or type(None) not in kinds:
            present = [value for value in present if value is not None]
        return present[0] if present else default

    def write(self, model: ModelConfig) -> dict[str, Any]:
        value = self.write_value(value_of(model, self.field))
        if self.values is not None:
            value = next((k for k, v in self.values.items() if v == value), None)
        return {self.key: value}


_LAYER = "model.layers.{}."
NAMES = {
    "embed": "model.embed_tokens",
    "blocks/attention_norm": _LAYER + "input_layernorm",
    "blocks/attention/query": _LAYER + "self_attn.q_proj",
    "blocks/attention/key": _LAYER + "self_attn.k_proj",
    "blocks/attention/value": _LAYER + "self_attn.v_proj",
    "blocks/attention/output": _LAYER + "self_attn.o_proj",
    "blocks/attention/query_norm": _LAYER + "self_attn.q_norm",
    "blocks/attention/key_norm": _LAYER + "self_attn.k_norm",
    "blocks/feed_forward_norm": _LAYER + "post_attention_layernorm",
    "blocks/feed_forward/gate": _LAYER + "mlp.gate_proj",
    "blocks/feed_forward/up": _LAYER + "mlp.up_proj",
    "blocks/feed_forward/down": _LAYER + "mlp.down_proj",
    "norm": "model.norm",
    "head": "lm_head",
}


@dataclasses.dataclass(frozen=True)
class Family:
    """One architecture of `config.json`, with the names that it has there."""

    architecture: str
    model_type: str
    parts: tuple[ConfigPart, ...]  # what reads its keys
    # names of modules in a checkpoint, by the decoder's: of "blocks/attention/query"
    # the name of layer "{}"; of a module of experts, that of layer "{}" and expert
    # "{}", or one for all experts
    names: Mapping[str, str] = dataclasses.field(default_factory=lambda: NAMES)
    # settings of `ModelConfig`, by path, that are the same in all its models
    switches: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # keys of which only some values are implemented, the default first, beside `ONLY`
    only: Mapping[str, tuple] = dataclasses.field(default_factory=dict)
    ignored: tuple[str, ...] = ()  # keys that do not change logits, beside `IGNORED`
    positions_key: str = "max_position_embeddings"  # of the longest context
    # True if look-ups of `pad_token_id` have no gradient in transformers (padding_idx)
    freezes_pad_row: bool = True
    prefix: str = "model."  # of names of tensors but the head's; files may lack it
    # how the numbers of a head that are rotated together are stored: in halves, as the
    # decoder has them, as neighbours, as such in the last numbers, or in swapped halves
    pairs: Literal["halves", "neighbours", "last", "swapped"] = "halves"
    # of the first of modules that share a name, how their outputs alternate there, also
    # by heads of keys in mixers named "delta"; else one follows the other
    joined_by: Mapping[str, Literal["head", "key_head", "number"]] = dataclasses.field(
        default_factory=dict
    )
    stored_as_in_out: tuple[str, ...] = ()  # starts of paths of matrices [in, out]
    # names that files may have in the place of others
    other_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    derived: tuple[str, ...] = ()  # ends of names of tensors that the config determines
    # tensors that must have these values, of layer "{}"
    constants: Mapping[str, float] = dataclasses.field(default_factory=dict)
    # the key of a number of further layers, which predict tokens beyond the next one:
    # their tensors are left out
    more_layers_key: str | None = None
    further: tuple[str, ...] = ()  # starts of names of such tensors elsewhere
    # paths and names that take the place of others where a file has them
    fused: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # paths of weights that are stored in float32, whatever others are
    in_float32: tuple[str, ...] = ("blocks/feed_forward/correction",)

    def read(self, reader: Reader) -> dict[str, Any]:
        """Settings of `ModelConfig`, by path; all keys of the config are checked."""
        reader.read.update(self.ignored)
        if self.more_layers_key is not None:
            reader.read.add(self.more_layers_key)
        fields = {**self.switches, **read(self.parts, reader)}
        only = {**ONLY, **self.only}
        reader.finish({k: v for k, v in only.items() if k not in reader.read})
        return fields

    def write(self, model: ModelConfig, max_positions: int) -> dict[str, Any]:
        """A config of this family, which has those fields that its keys can say."""
        raw = {"architectures": [self.architecture], "model_type": self.model_type}
        written = write(self.parts, model)
        # A table of learnt positions has a size of its own.
        return raw | {self.positions_key: max_positions} | written


@dataclasses.dataclass(frozen=True)
class WithImages:
    """A multimodal architecture, whose text part is read as a model of its own."""

    architecture: str
    model_type: str
    text: tuple[str, ...]  # "model_type" of text parts, the default first
    defaults: Mapping[str, Any]  # of keys of the text part that may be left out
    ignored: frozenset[str]  # keys that concern images only
    # what replaces "model." in the names of the text part's tensors, and what precedes
    # "lm_head", in each published form
    prefixes: tuple[tuple[str, str], ...] = (
        ("language_model.model.", "language_model."),
        ("model.language_model.", ""),
    )
    images: tuple[str, ...] = (  # starts of the names of the other tensors
        "vision_tower.",
        "multi_modal_projector.",
        "model.vision_tower.",
        "model.multi_modal_projector.",
    )
    tied: bool = True  # whether the head is, where `tie_word_embeddings` is left out


# Keys that do not change the logits of a forward pass without dropout: names and
# versions, ids of special tokens, training, how to run, and old generation settings.
IGNORED = frozenset(
    "_name_or_path architectures auto_map finetuning_task id2label is_llama_config "
    "label2id model_type name_or_path problem_type task_specific_params "
    "tokenizer_class tokenizer_name transformers.js_config transformers_version "
    "unsloth_fixed unsloth_version "
    "bos_token_id decoder_start_token_id eos_token_id pad_token_id sep_token_id "
    "attention_dropout attention_probs_dropout_prob attn_pdrop embd_pdrop "
    "embedding_dropout hidden_dropout hidden_dropout_prob resid_pdrop "
    "gradient_checkpointing ignore_index initializer_range loss_type "
    "neftune_noise_alpha "
    "_attn_implementation _attn_implementation_autoset _attn_implementation_internal "
    "_flash_attn_2_enabled attn_implementation cache_implementation "
    "chunk_size_feed_forward dtype logits_to_keep max_position_embeddings "
    "model_max_length num_logits_to_keep output_attentions output_hidden_states "
    "output_scores pretraining_tp return_dict return_dict_in_generate tf_legacy_loss "
    "torch_dtype torchscript use_bfloat16 use_cache use_flash_attention "
    "use_flash_attention_2 use_flash_attn "
    "bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping "
    "encoder_no_repeat_ngram_size exponential_decay_length_penalty "
    "forced_bos_token_id forced_eos_token_id length_penalty max_length max_new_tokens "
    "min_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences "
    "prefix remove_invalid_values repetition_penalty suppress_tokens temperature "
    "top_k top_p typical_p".split()
)
# Keys of which only these values are implemented; the first one is the default.
ONLY = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_bidirectional_attention": (False, None),
    "use_mrope": (False, None),
    "partial_rotary_factor": (1.0, None),
    "rope_interleaved": (False, None),
    "use_sliding_window": (False, None),
    "clip_qkv": (None,),
    "qk_layernorm": (False, None),
    "use_qk_norm": (False, None),
    "is_decoder": (False, True, None),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "cross_attention_hidden_size": (None,),
    "pruned_heads": ({}, None),
    "tie_encoder_decoder": (False, None),
}
