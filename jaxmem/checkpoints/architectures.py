"""Reads `config.json` of a checkpoint into a `ModelConfig`, strictly.

It is an error if a key is neither read here nor known to be irrelevant to the model, or
if the decoder does not implement a value: nothing is guessed.
"""

import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxmem.checkpoints.reader import MISSING, CheckpointError, Reader, read_object
from jaxmem.core import messages
from jaxmem.core.ranges import integers, reals
from jaxmem.models.config import RANGES, ModelConfig


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """The content of a checkpoint's `config.json`."""

    path: Path  # of the file
    raw: Mapping[str, Any]  # the whole object, for saving; of a text part, its own
    model: ModelConfig  # in float32; the caller chooses dtypes
    max_positions: int  # maximum context length in tokens
    dtype: str | None  # of the stored weights, if given
    text_part: bool = False  # whether it is the text part of a multimodal model


# Keys that do not change the logits of a forward pass without dropout.
_IRRELEVANT = frozenset(
    "_name_or_path architectures attention_dropout auto_map bos_token_id "
    "cache_implementation dtype eos_token_id id2label initializer_range label2id "
    "max_position_embeddings model_type output_attentions output_hidden_states "
    "pad_token_id pretraining_tp problem_type return_dict torch_dtype "
    "transformers_version unsloth_fixed use_cache "
    "_attn_implementation _attn_implementation_autoset".split()
)
# Keys of which only these values are implemented; the first one is the default.
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
# A multimodal architecture whose text part is read. Its config also has keys that only
# concern images, and keys that both parts share; omitted text sizes are those below.
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
_HUB_NAME = r"[\w-][\w.-]*/[\w.-]+"  # OWNER/MODEL
_POSITIVE = reals(above=0)
_POSITIONS = integers(1, limit=2**31 - 1)  # tokens of a context: positions are int32


def read_config(directory: str | Path) -> CheckpointConfig:
    """Read `config.json` from a checkpoint's directory.

    Args:
        directory: of the checkpoint.

    Returns:
        A `CheckpointConfig`.

    Raises:
        CheckpointError: the file is missing, maybe because the directory is a run's, or
            asks for something that is not implemented; the message names the key.
    """
    path = Path(os.path.expanduser(directory)) / "config.json"
    if not path.parent.exists() and re.fullmatch(_HUB_NAME, str(directory)):
        raise CheckpointError(
            f"{directory}: no such directory; download a model of the Hugging Face "
            f"Hub by: hf download {directory} --local-dir {directory}"
        )
    if not path.exists() and (path.parent / "model" / path.name).exists():
        raise CheckpointError(
            f"{directory}: a run, not a checkpoint; name the model that it has saved, "
            f"{path.parent / 'model'}"
        )
    raw = read_object(path)
    text_part = raw.get("model_type") == "gemma3"
    if text_part:
        raw = _gemma3_text(path, raw)
    reader = Reader(path, raw, _IRRELEVANT)
    build = _architecture(reader)
    fields = _sizes(reader) | build(reader)
    reader.finish(_MUST_BE)
    try:
        model = ModelConfig(**fields)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    positions = reader.take("max_position_embeddings", int, within=_POSITIONS)
    return CheckpointConfig(path, raw, model, positions, _dtype(reader), text_part)


def _dtype(reader: Reader) -> str | None:
    """The dtype of the stored weights; the newer key has precedence."""
    key = "dtype" if "dtype" in reader.raw else "torch_dtype"
    named = reader.take(key, (str, type(None)), None)
    return None if named is None else named.removeprefix("torch.")


def _gemma3_text(path: Path, raw: Mapping[str, Any]) -> dict[str, Any]:
    """The config of Gemma 3's text part, in the form of a text-only checkpoint."""
    reader = Reader(path, raw, _IRRELEVANT | _OF_IMAGES)
    named = reader.strings("architectures") or [_WITH_IMAGES]
    if named != [_WITH_IMAGES]:
        raise reader.error(
            f"model_type 'gemma3' is not that of {messages.name(named[0])}"
        )
    text = reader.take("text_config", dict)
    tied = reader.take("tie_word_embeddings", bool, True)
    reader.finish(_MUST_BE)
    if text.get("tie_word_embeddings", tied) is not tied:
        raise reader.error(
            f"tie_word_embeddings is {tied}, and in text_config "
            f"{messages.short(text['tie_word_embeddings'])}"
        )
    shared = {key: raw[key] for key in _SHARED if key in raw}
    if shared.keys() & {"dtype", "torch_dtype"}:
        text = {k: v for k, v in text.items() if k not in ("dtype", "torch_dtype")}
    config = {"model_type": "gemma3_text"} | _GEMMA3_SIZES | text | shared
    return config | {
        "architectures": ["Gemma3ForCausalLM"],
        "tie_word_embeddings": tied,
    }


def _architecture(reader: Reader) -> Callable[[Reader], dict[str, Any]]:
    """The function that reads the keys specific to the architecture."""
    named = reader.strings("architectures")
    for name in named:
        if name not in (*_ARCHITECTURES, _WITH_IMAGES):
            known = ", ".join((*_ARCHITECTURES, _WITH_IMAGES))
            raise reader.error(
                f"architecture {messages.short(name)} is not implemented; known are "
                f"{known}"
            )
    kind = reader.take("model_type", str)
    by_type = {model_type: name for name, (model_type, _) in _ARCHITECTURES.items()}
    if kind not in by_type:
        raise reader.error(
            f"model_type {messages.short(kind)} is not implemented; known are "
            f"{', '.join(by_type)}, 'gemma3'"
        )
    if named and by_type[kind] not in named:
        raise reader.error(f"model_type {kind!r} is not that of {named[0]}")
    return _ARCHITECTURES[by_type[kind]][1]


def _sizes(reader: Reader) -> dict[str, Any]:
    """The fields that all architectures name alike."""

    def size(key: str, field: str, *default: int) -> int:
        return reader.take(key, int, *default, within=RANGES[field])

    heads = size("num_attention_heads", "heads")
    return {
        "layers": size("num_hidden_layers", "layers"),
        "hidden": size("hidden_size", "hidden"),
        "ff": size("intermediate_size", "ff"),
        "heads": heads,
        "kv_heads": size("num_key_value_heads", "kv_heads", heads),
        "vocab_size": size("vocab_size", "vocab_size"),
        "norm_eps": reader.take("rms_norm_eps", float, 1e-6, within=RANGES["norm_eps"]),
    }


def _qwen2(reader: Reader) -> dict[str, Any]:
    return _plain(reader) | {"qkv_bias": True} | _kinds(reader, _qwen_pattern)


def _qwen3(reader: Reader) -> dict[str, Any]:
    fields = _plain(reader, head_dim=128) | {"qk_norm": True}
    return fields | _kinds(reader, _qwen_pattern)


def _mistral(reader: Reader) -> dict[str, Any]:
    return _plain(reader) | _kinds(reader, lambda _: ("local",))


def _gemma2(reader: Reader) -> dict[str, Any]:
    return _gemma(reader, caps=(50.0, 30.0)) | {
        **_rope(reader),
        **_kinds(reader, lambda _: ("local", "global"), window=4096),
    }


def _gemma3(reader: Reader) -> dict[str, Any]:
    def pattern(reader: Reader) -> tuple[str, ...]:
        within = RANGES["layers"]
        period = reader.take("_sliding_window_pattern", int, 6, within=within)
        period = reader.take("sliding_window_pattern", int, period, within=within)
        return ("local",) * (period - 1) + ("global",)

    reader.read.update(("sliding_window_pattern", "_sliding_window_pattern"))
    return _gemma(reader, caps=(None, None)) | {
        "qk_norm": True,
        **_gemma3_rope(reader),
        **_kinds(reader, pattern, window=4096),
    }


def _plain(reader: Reader, head_dim: int | None = None) -> dict[str, Any]:
    """The fields of Llama and of architectures that differ little from it."""
    if head_dim is None:
        head_dim = reader.raw["hidden_size"] // reader.raw["num_attention_heads"]
    activation = reader.take("hidden_act", str, "silu")
    optional, within = (int, type(None)), RANGES["head_dim"]
    given = reader.take("head_dim", optional, None, within=within)
    return {
        "head_dim": head_dim if given is None else given,
        "activation": reader.choose("hidden_act", activation, _ACTIVATIONS),
        "tied": reader.take("tie_word_embeddings", bool, False),
        **_rope(reader),
    }


def _gemma(reader: Reader, caps: tuple[float | None, float | None]) -> dict[str, Any]:
    """The fields that Gemma 2 and 3 share."""
    scalar = "query_pre_attn_scalar"
    activation = reader.take("hidden_activation", (str, type(None)), None)
    old = reader.take("hidden_act", (str, type(None)), None)
    activation = activation or old or "gelu_pytorch_tanh"
    return {
        "head_dim": reader.take("head_dim", int, 256, within=RANGES["head_dim"]),
        "activation": reader.choose("hidden_activation", activation, _ACTIVATIONS),
        "tied": reader.take("tie_word_embeddings", bool, True),
        "attention_softcap": _cap(reader, "attn_logit_softcapping", caps[0]),
        "softcap": _cap(reader, "final_logit_softcapping", caps[1]),
        "attention_scale": reader.take(scalar, float, 256.0, within=_POSITIVE) ** -0.5,
        "embed_scale": True,
        "post_norms": True,
        "norm_offset": True,
    }


def _cap(reader: Reader, key: str, default: float | None) -> float | None:
    return reader.take(key, (float, type(None)), default, within=RANGES["softcap"])


# ------------------------------------------------------------- attention windows


def _kinds(
    reader: Reader,
    pattern: Callable[[Reader], tuple[str, ...]],
    window: int | None = None,
) -> dict[str, Any]:
    """`pattern` and `window`; the config may list the kind of every layer."""
    optional, within = (int, type(None)), RANGES["window"]
    window = reader.take("sliding_window", optional, window, within=within)
    listed = reader.take("layer_types", (list, type(None)), None)
    if listed is not None:
        kinds = tuple(reader.choose("layer_types", kind, _KINDS) for kind in listed)
        if len(kinds) != reader.raw["num_hidden_layers"]:
            raise reader.error(
                "layer_types must have one entry a layer, "
                f"{reader.raw['num_hidden_layers']}, got {len(kinds)}"
            )
    else:
        kinds = pattern(reader) if window is not None else ("global",)
    reader.read.update(("use_sliding_window", "max_window_layers"))
    if "local" not in kinds:
        return {"pattern": ("global",), "window": None}
    if window is None:
        raise reader.error("sliding_window is missing, and layer_types needs it")
    return {"pattern": kinds, "window": window}


def _qwen_pattern(reader: Reader) -> tuple[str, ...]:
    layers = reader.raw["num_hidden_layers"]
    if not reader.take("use_sliding_window", bool, False):
        return ("global",)
    whole = integers(0)
    first = min(reader.take("max_window_layers", int, within=whole), layers)
    return ("global",) * first + ("local",) * (layers - first)


# ------------------------------------------------------------- rotary embeddings

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


def _rope(reader: Reader, theta: float = 10_000.0) -> dict[str, Any]:
    """Rotary parameters: one object, or a base and a separate scaling object."""
    optional = (dict, type(None))
    given = reader.take("rope_parameters", optional, None)
    base = reader.take("rope_theta", float, theta, within=RANGES["rope_theta"])
    scaling = reader.take("rope_scaling", optional, None)
    if given is None:
        return _rope_fields(reader, {"rope_theta": base} | (scaling or {}), theta)
    if scaling is not None:
        raise reader.error("rope_parameters and rope_scaling cannot both be given")
    return _rope_fields(reader, given, base)


def _rope_fields(
    reader: Reader, given: Mapping[str, Any], theta: float
) -> dict[str, Any]:
    given = dict(given)
    kind = given.pop("type", "default")
    kind = given.pop("rope_type", kind)
    fields = {"rope_scaling": reader.choose("rope type", kind, _ROPES)}
    inner = Reader(reader.path, given, frozenset({"partial_rotary_factor"}))
    for key, field in {"rope_theta": "rope_theta", **_ROPE_FIELDS[kind]}.items():
        default = {"rope_theta": theta}.get(key, MISSING)
        whole = int if RANGES[field].whole else float
        fields[field] = inner.take(key, whole, default, within=RANGES[field])
    inner.finish(_MUST_BE)
    return fields


def _gemma3_rope(reader: Reader) -> dict[str, Any]:
    """Rotary parameters of Gemma 3, separate for global and local layers."""
    given = reader.take("rope_parameters", (dict, type(None)), None)
    if given is None or "full_attention" not in given:
        within = RANGES["local_rope_theta"]
        local = reader.take("rope_local_base_freq", float, 10_000.0, within=within)
        return _rope(reader, 1_000_000.0) | {"local_rope_theta": local}
    reader.read.update(("rope_theta", "rope_scaling", "rope_local_base_freq"))
    if set(given) != set(_KINDS):
        raise reader.error(
            f"rope_parameters must be of {', '.join(_KINDS)}, got "
            f"{', '.join(map(messages.name, given))}"
        )
    kinds = Reader(reader.path, given)
    local = _rope_fields(reader, kinds.take("sliding_attention", dict), 10_000.0)
    if local["rope_scaling"] is not None:
        raise reader.error(
            f"rope type {local['rope_scaling']!r} in sliding_attention is not "
            "implemented; only 'default' is"
        )
    whole = _rope_fields(reader, kinds.take("full_attention", dict), 1_000_000.0)
    return whole | {"local_rope_theta": local["rope_theta"]}


# Names in `architectures`: model_type, and the function that reads the other keys.
_ARCHITECTURES: dict[str, tuple[str, Callable[[Reader], dict[str, Any]]]] = {
    "Qwen2ForCausalLM": ("qwen2", _qwen2),
    "Qwen3ForCausalLM": ("qwen3", _qwen3),
    "LlamaForCausalLM": ("llama", _plain),
    "MistralForCausalLM": ("mistral", _mistral),
    "Gemma2ForCausalLM": ("gemma2", _gemma2),
    "Gemma3ForCausalLM": ("gemma3_text", _gemma3),
}
