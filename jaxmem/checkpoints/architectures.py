"""`config.json` of a checkpoint to a `ModelConfig`: all of it understood, or refused.

A key that is not read here and not known to leave the model alone is an error, as is a
value that the decoder does not implement: nothing is guessed.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxmem.models.config import ModelConfig


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names the file and what in it."""


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """What a checkpoint's `config.json` says."""

    path: Path  # of the file
    raw: Mapping[str, Any]  # all of it, to be saved again; of a text part, its own
    model: ModelConfig  # float32; the types are the reader's to choose
    max_positions: int  # tokens of the longest context
    dtype: str | None  # of the stored weights, where it is said
    text_part: bool = False  # of a model that reads images, too


# Keys that change no logit of a forward pass without dropout.
_IRRELEVANT = frozenset(
    "_name_or_path architectures attention_dropout auto_map bos_token_id "
    "cache_implementation dtype eos_token_id id2label initializer_range label2id "
    "max_position_embeddings model_type output_attentions output_hidden_states "
    "pad_token_id pretraining_tp problem_type return_dict torch_dtype "
    "transformers_version unsloth_fixed use_cache "
    "_attn_implementation _attn_implementation_autoset".split()
)
# Likewise, as long as they are so.
_MUST_BE = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_bidirectional_attention": (False, None),
    "quantization_config": (None,),
    "use_mrope": (False, None),
    "partial_rotary_factor": (1.0, None),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
}
# The text part of this one is read. Beside its config stands what is of images alone,
# and what both parts share; sizes that are left out there are these.
_WITH_IMAGES = "Gemma3ForConditionalGeneration"
_OF_IMAGES = frozenset(
    "boi_token_index eoi_token_index image_token_index mm_tokens_per_image "
    "vision_config".split()
)
_SHARED = (
    "bos_token_id", "dtype", "eos_token_id", "pad_token_id", "torch_dtype",
    "transformers_version",
)  # fmt: skip
_GEMMA3_SIZES = {
    "max_position_embeddings": 131_072,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 262_208,
}
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu"}
_KINDS = {"full_attention": "global", "sliding_attention": "local"}
_MISSING = object()


class _Reader:
    """Takes keys out of a JSON object, and knows which were never asked for."""

    def __init__(self, path: Path, raw: Mapping[str, Any]):
        self.path, self.raw = path, raw
        self.read: set[str] = set(_IRRELEVANT)

    def take(self, key: str, kind: type | tuple, default: Any = _MISSING) -> Any:
        """Return the value of a key, of one of these types, or the default."""
        self.read.add(key)
        if key not in self.raw:
            if default is _MISSING:
                raise CheckpointError(f"{self.path}: {key} is missing")
            return default
        value = self.raw[key]
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if float in kinds and type(value) is int:
            value = float(value)
        if type(value) not in kinds:
            names = " or ".join(k.__name__ for k in kinds)
            raise CheckpointError(f"{self.path}: {key} must be {names}, got {value!r}")
        return value

    def choose(self, key: str, value: Any, known: Mapping[str, str]) -> str:
        """Translate a value, or refuse it by name."""
        if value not in known:
            raise CheckpointError(
                f"{self.path}: {key} {value!r} is not implemented; known are "
                f"{', '.join(map(repr, known))}"
            )
        return known[value]

    def finish(self) -> None:
        """Refuse what has not been read."""
        for key, wanted in _MUST_BE.items():
            value = self.raw.get(key)
            self.read.add(key)
            if value not in wanted:
                raise CheckpointError(
                    f"{self.path}: {key}={value!r} is not implemented; only "
                    f"{wanted[0]!r} is"
                )
        unknown = [key for key in self.raw if key not in self.read]
        if unknown:
            raise CheckpointError(
                f"{self.path}: unknown keys {', '.join(map(repr, unknown))}: what they "
                "do to the model is not implemented; delete those that do nothing"
            )


def read_config(directory: str | Path) -> CheckpointConfig:
    """Read `config.json` of a checkpoint's directory.

    Args:
      directory: of the checkpoint.

    Returns:
      A `CheckpointConfig`.

    Raises:
      CheckpointError: there is none, or it says what is not implemented; the key is
        named.
    """
    path = Path(directory).expanduser() / "config.json"
    try:
        raw = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    text_part = raw.get("model_type") == "gemma3"
    if text_part:
        raw = _gemma3_text(path, raw)
    reader = _Reader(path, raw)
    build = _architecture(reader)
    fields = _sizes(reader) | build(reader)
    reader.finish()
    try:
        model = ModelConfig(**fields)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    dtype = raw.get("dtype", raw.get("torch_dtype"))
    positions = reader.take("max_position_embeddings", int)
    return CheckpointConfig(path, raw, model, positions, dtype, text_part)


def _gemma3_text(path: Path, raw: Mapping[str, Any]) -> dict[str, Any]:
    """The text part's config out of Gemma 3's, as a checkpoint of it alone has it."""
    named = raw.get("architectures") or [_WITH_IMAGES]
    if named != [_WITH_IMAGES]:
        raise CheckpointError(f"{path}: model_type 'gemma3' is not that of {named[0]}")
    reader = _Reader(path, raw)
    reader.read.update(_OF_IMAGES)
    text = reader.take("text_config", dict)
    tied = reader.take("tie_word_embeddings", bool, True)
    reader.finish()
    if text.get("tie_word_embeddings", tied) is not tied:
        raise CheckpointError(
            f"{path}: tie_word_embeddings is {tied}, and in text_config "
            f"{text['tie_word_embeddings']!r}"
        )
    shared = {key: raw[key] for key in _SHARED if key in raw}
    if shared.keys() & {"dtype", "torch_dtype"}:
        text = {k: v for k, v in text.items() if k not in ("dtype", "torch_dtype")}
    made = {"model_type": "gemma3_text"} | _GEMMA3_SIZES | text | shared
    return made | {"architectures": ["Gemma3ForCausalLM"], "tie_word_embeddings": tied}


def _architecture(reader: _Reader) -> Callable[[_Reader], dict[str, Any]]:
    """The reader of what is an architecture's own."""
    named = reader.raw.get("architectures") or []
    for name in named:
        if name not in (*_ARCHITECTURES, _WITH_IMAGES):
            known = ", ".join((*_ARCHITECTURES, _WITH_IMAGES))
            raise CheckpointError(
                f"{reader.path}: architecture {name!r} is not implemented; known are "
                f"{known}"
            )
    kind = reader.take("model_type", str)
    by_type = {model_type: name for name, (model_type, _) in _ARCHITECTURES.items()}
    if kind not in by_type:
        raise CheckpointError(
            f"{reader.path}: model_type {kind!r} is not implemented; known are "
            f"{', '.join(by_type)}, 'gemma3'"
        )
    if named and by_type[kind] not in named:
        raise CheckpointError(
            f"{reader.path}: model_type {kind!r} is not that of {named[0]}"
        )
    return _ARCHITECTURES[by_type[kind]][1]


def _sizes(reader: _Reader) -> dict[str, Any]:
    """What all architectures say alike."""
    hidden, heads = (
        reader.take(key, int) for key in ("hidden_size", "num_attention_heads")
    )
    return {
        "layers": reader.take("num_hidden_layers", int),
        "hidden": hidden,
        "ff": reader.take("intermediate_size", int),
        "heads": heads,
        "kv_heads": reader.take("num_key_value_heads", int, heads),
        "vocab_size": reader.take("vocab_size", int),
        "norm_eps": reader.take("rms_norm_eps", float, 1e-6),
    }


def _qwen2(reader: _Reader) -> dict[str, Any]:
    return _plain(reader) | {"qkv_bias": True} | _kinds(reader, _qwen_pattern)


def _qwen3(reader: _Reader) -> dict[str, Any]:
    fields = _plain(reader, head_dim=128) | {"qk_norm": True}
    return fields | _kinds(reader, _qwen_pattern)


def _mistral(reader: _Reader) -> dict[str, Any]:
    return _plain(reader) | _kinds(reader, lambda _: ("local",))


def _gemma2(reader: _Reader) -> dict[str, Any]:
    return _gemma(reader, caps=(50.0, 30.0)) | {
        **_rope(reader),
        **_kinds(reader, lambda _: ("local", "global"), window=4096),
    }


def _gemma3(reader: _Reader) -> dict[str, Any]:
    def pattern(reader: _Reader) -> tuple[str, ...]:
        period = reader.raw.get("_sliding_window_pattern", 6)
        period = reader.take("sliding_window_pattern", int, period)
        return ("local",) * (period - 1) + ("global",)

    reader.read.update(("sliding_window_pattern", "_sliding_window_pattern"))
    return _gemma(reader, caps=(None, None)) | {
        "qk_norm": True,
        **_gemma3_rope(reader),
        **_kinds(reader, pattern, window=4096),
    }


def _plain(reader: _Reader, head_dim: int | None = None) -> dict[str, Any]:
    """Llama, and those that differ from it in little."""
    if head_dim is None:
        head_dim = reader.raw["hidden_size"] // reader.raw["num_attention_heads"]
    activation = reader.take("hidden_act", str, "silu")
    given = reader.take("head_dim", (int, type(None)), None)
    return {
        "head_dim": head_dim if given is None else given,
        "activation": reader.choose("hidden_act", activation, _ACTIVATIONS),
        "tied": reader.take("tie_word_embeddings", bool, False),
        **_rope(reader),
    }


def _gemma(reader: _Reader, caps: tuple[float | None, float | None]) -> dict[str, Any]:
    """What Gemma 2 and 3 share."""
    number = (float, type(None))
    activation = reader.take("hidden_activation", (str, type(None)), None)
    old = reader.take("hidden_act", (str, type(None)), None)
    activation = activation or old or "gelu_pytorch_tanh"
    return {
        "head_dim": reader.take("head_dim", int, 256),
        "activation": reader.choose("hidden_activation", activation, _ACTIVATIONS),
        "tied": reader.take("tie_word_embeddings", bool, True),
        "attention_softcap": reader.take("attn_logit_softcapping", number, caps[0]),
        "softcap": reader.take("final_logit_softcapping", number, caps[1]),
        "attention_scale": reader.take("query_pre_attn_scalar", float, 256.0) ** -0.5,
        "embed_scale": True,
        "post_norms": True,
        "norm_offset": True,
    }


# ------------------------------------------------------------ which tokens are seen


def _kinds(
    reader: _Reader,
    pattern: Callable[[_Reader], tuple[str, ...]],
    window: int | None = None,
) -> dict[str, Any]:
    """`pattern` and `window`; the layers' kinds may be spelled out."""
    optional = (int, type(None))
    window = reader.take("sliding_window", optional, window)
    listed = reader.take("layer_types", (list, type(None)), None)
    if listed is not None:
        kinds = tuple(reader.choose("layer_types", kind, _KINDS) for kind in listed)
        if len(kinds) != reader.raw["num_hidden_layers"]:
            raise CheckpointError(
                f"{reader.path}: layer_types must have one entry a layer, "
                f"{reader.raw['num_hidden_layers']}, got {len(kinds)}"
            )
    else:
        kinds = pattern(reader) if window is not None else ("global",)
    reader.read.update(("use_sliding_window", "max_window_layers"))
    if "local" not in kinds:
        return {"pattern": ("global",), "window": None}
    if window is None:
        raise CheckpointError(
            f"{reader.path}: sliding_window is missing, and layer_types needs it"
        )
    return {"pattern": kinds, "window": window}


def _qwen_pattern(reader: _Reader) -> tuple[str, ...]:
    layers = reader.raw["num_hidden_layers"]
    if not reader.take("use_sliding_window", bool, False):
        return ("global",)
    first = min(reader.take("max_window_layers", int), layers)
    return ("global",) * first + ("local",) * (layers - first)


# ---------------------------------------------------------------- rotary angles

_ROPES = {"default": None, "linear": "linear", "llama3": "llama3"}
_ROPE_FIELDS = {
    "default": {},
    "linear": {"factor": "rope_factor"},
    "llama3": {
        "factor": "rope_factor",
        "low_freq_factor": "rope_low_factor",
        "high_freq_factor": "rope_high_factor",
        "original_max_position_embeddings": "rope_original",
    },
}


def _rope(reader: _Reader, theta: float = 10_000.0) -> dict[str, Any]:
    """Wavelengths: in one object, or in a base and a scaling beside it."""
    optional = (dict, type(None))
    given = reader.take("rope_parameters", optional, None)
    base = reader.take("rope_theta", float, theta)
    scaling = reader.take("rope_scaling", optional, None)
    if given is None:
        return _rope_fields(reader, {"rope_theta": base} | (scaling or {}), theta)
    if scaling is not None:
        raise CheckpointError(
            f"{reader.path}: rope_parameters and rope_scaling cannot both be given"
        )
    return _rope_fields(reader, given, base)


def _rope_fields(
    reader: _Reader, given: Mapping[str, Any], theta: float
) -> dict[str, Any]:
    given = dict(given)
    kind = given.pop("type", "default")
    kind = given.pop("rope_type", kind)
    if kind not in _ROPES:
        raise CheckpointError(
            f"{reader.path}: rope type {kind!r} is not implemented; known are "
            f"{', '.join(map(repr, _ROPES))}"
        )
    made = {"rope_scaling": _ROPES[kind]}
    inner = _Reader(reader.path, given)
    inner.read = {"partial_rotary_factor"}
    made["rope_theta"] = inner.take("rope_theta", float, theta)
    for key, field in _ROPE_FIELDS[kind].items():
        whole = key == "original_max_position_embeddings"
        made[field] = inner.take(key, int if whole else float)
    inner.finish()
    return made


def _gemma3_rope(reader: _Reader) -> dict[str, Any]:
    """Global and local layers have their own."""
    given = reader.take("rope_parameters", (dict, type(None)), None)
    if given is None or "full_attention" not in given:
        local = reader.take("rope_local_base_freq", float, 10_000.0)
        return _rope(reader, 1_000_000.0) | {"local_rope_theta": local}
    reader.read.update(("rope_theta", "rope_scaling", "rope_local_base_freq"))
    if set(given) != set(_KINDS):
        raise CheckpointError(
            f"{reader.path}: rope_parameters must be of {', '.join(_KINDS)}, got "
            f"{', '.join(given)}"
        )
    local = _rope_fields(reader, given["sliding_attention"], 10_000.0)
    if local["rope_scaling"] is not None:
        raise CheckpointError(
            f"{reader.path}: rope type {local['rope_scaling']!r} in sliding_attention "
            "is not implemented; only 'default' is"
        )
    whole = _rope_fields(reader, given["full_attention"], 1_000_000.0)
    return whole | {"local_rope_theta": local["rope_theta"]}


# By the name that `architectures` has: model_type, and what reads the rest.
_ARCHITECTURES: dict[str, tuple[str, Callable[[_Reader], dict[str, Any]]]] = {
    "Qwen2ForCausalLM": ("qwen2", _qwen2),
    "Qwen3ForCausalLM": ("qwen3", _qwen3),
    "LlamaForCausalLM": ("llama", _plain),
    "MistralForCausalLM": ("mistral", _mistral),
    "Gemma2ForCausalLM": ("gemma2", _gemma2),
    "Gemma3ForCausalLM": ("gemma3_text", _gemma3),
}
