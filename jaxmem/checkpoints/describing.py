"""Describes a decoder that has no checkpoint yet, as one of the known architectures.

`read_config` says what each `config.json` means. A description is therefore found by
trying: the first architecture whose config.json is read back as the decoder's own
settings is exactly that model.
"""

import dataclasses
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import processors

from jaxmem.checkpoints.architectures import read_config
from jaxmem.checkpoints.reader import CheckpointError
from jaxmem.models.config import ModelConfig

_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen2ForCausalLM": "qwen2",
    "MistralForCausalLM": "mistral",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
}
_ACTIVATIONS = {"silu": "silu", "gelu": "gelu_pytorch_tanh"}
_KINDS = {"global": "full_attention", "local": "sliding_attention"}
# Fields that do not describe the function that the weights compute.
_FREE = (
    "checkpoint", "dtype", "param_dtype", "attention", "lora_rank", "lora_alpha",
    "lora_targets", "lora_head",
)  # fmt: skip


class Text(NamedTuple):
    """How a model reads and writes text."""

    tokenizer: tokenizers.Tokenizer
    bos: str | None  # name of the token that starts every text, if any
    eos: str | None  # name of the token that ends a text
    pad: str | None
    chat_template: str | None = None  # a Jinja template


def describe(model: ModelConfig, max_positions: int) -> dict[str, Any]:
    """Return a `config.json` that is read back as these settings.

    Args:
        model: of the decoder; `vocab_size` must be known.
        max_positions: longest context in tokens, as the model was trained.

    Returns:
        The object, without ids of special tokens.

    Raises:
        CheckpointError: no known architecture computes the same; the message names the
            settings that the nearest one lacks.
    """
    nearest: list[str] | None = None
    for architecture in _ARCHITECTURES:
        raw = _raw(model, architecture, max_positions)
        differing = _differing(model, raw)
        if not differing:
            return raw
        if nearest is None or len(differing) < len(nearest) - 1:
            nearest = [architecture, *differing]
    assert nearest is not None
    raise CheckpointError(
        "the decoder is none of the architectures that config.json can name: "
        f"{nearest[0]} cannot have {', '.join(nearest[1:])}"
    )


def _differing(model: ModelConfig, raw: Mapping[str, Any]) -> list[str]:
    """Settings that the config would be read back without."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(raw), "utf-8")
        try:
            other = read_config(directory).model
        except CheckpointError as error:
            return [str(error).partition(": ")[2]]
    ours, theirs = _comparable(model), _comparable(other)
    return [f"{name}={ours[name]!r}" for name in ours if ours[name] != theirs[name]]


def _comparable(model: ModelConfig) -> dict[str, Any]:
    """Every setting that affects results, each in one form."""
    fields = {k: v for k, v in dataclasses.asdict(model).items() if k not in _FREE}
    fields["pattern"] = _kinds(model)
    fields["attention_scale"] = f"{model.score_scale:.12g}"
    if model.rope_scaling is None:
        fields["rope_factor"] = 1.0
    if model.rope_scaling != "llama3":
        fields |= dict.fromkeys(
            ("rope_low_factor", "rope_high_factor", "rope_original")
        )
    if "local" not in fields["pattern"] or model.local_rope_theta == model.rope_theta:
        fields["local_rope_theta"] = None
    return fields


def _kinds(model: ModelConfig) -> list[str]:
    return [model.pattern[i % len(model.pattern)] for i in range(model.layers)]


def _raw(model: ModelConfig, architecture: str, max_positions: int) -> dict[str, Any]:
    activation = "hidden_activation" if "Gemma" in architecture else "hidden_act"
    raw: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": _ARCHITECTURES[architecture],
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden,
        "intermediate_size": model.ff,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        activation: _ACTIVATIONS[model.activation],
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tied,
        "max_position_embeddings": max_positions,
        "rope_theta": model.rope_theta,
        "rope_scaling": _rope_scaling(model),
    }
    windows = _windows(model, architecture, max_positions)
    return raw | windows | _gemma(model, architecture)


def _rope_scaling(model: ModelConfig) -> dict[str, Any] | None:
    if model.rope_scaling is None:
        return None
    settings = {"rope_type": model.rope_scaling, "factor": model.rope_factor}
    if model.rope_scaling == "linear":
        return settings
    return settings | {
        "low_freq_factor": model.rope_low_factor,
        "high_freq_factor": model.rope_high_factor,
        "original_max_position_embeddings": model.rope_original,
    }


def _windows(
    model: ModelConfig, architecture: str, max_positions: int
) -> dict[str, Any]:
    if architecture == "LlamaForCausalLM":
        return {}
    if architecture == "MistralForCausalLM":  # every layer has the window
        return {"sliding_window": model.window}
    settings: dict[str, Any] = {
        "layer_types": [_KINDS[kind] for kind in _kinds(model)],
        "sliding_window": model.window,
    }
    if "Gemma" in architecture and model.window is None:
        settings["sliding_window"] = max_positions  # of no layer, but it must be given
    if "Qwen" in architecture:
        settings["use_sliding_window"] = model.window is not None
        settings["max_window_layers"] = 0
    return settings


def _gemma(model: ModelConfig, architecture: str) -> dict[str, Any]:
    if "Gemma" not in architecture:
        return {}
    settings: dict[str, Any] = {
        "query_pre_attn_scalar": round(model.score_scale**-2),  # must be an integer
        "attn_logit_softcapping": model.attention_softcap,
        "final_logit_softcapping": model.softcap,
    }
    if architecture == "Gemma3ForCausalLM":
        settings["rope_local_base_freq"] = model.local_rope_theta or model.rope_theta
    return settings


def write_text_files(
    directory: Path, config: Mapping[str, Any], text: Text, dtype: str
) -> None:
    """Write config.json, generation_config.json and the tokenizer's files.

    Args:
        directory: an existing directory.
        config: from `describe`.
        text: tokenizer and special tokens.
        dtype: of the stored weights.
    """
    ids = _ids(text)
    _write(directory / "config.json", {**config, **ids, "dtype": dtype})
    _write(directory / "generation_config.json", ids)
    tokenizer = _with_start(text)
    (directory / "tokenizer.json").write_text(tokenizer.to_str(), "utf-8")
    names = {"bos_token": text.bos, "eos_token": text.eos, "pad_token": text.pad}
    described = {k: v for k, v in names.items() if v is not None} | {
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    _write(directory / "tokenizer_config.json", described)
    if text.chat_template is not None:
        (directory / "chat_template.jinja").write_text(text.chat_template, "utf-8")


def _ids(text: Text) -> dict[str, int]:
    names = {"bos": text.bos, "eos": text.eos, "pad": text.pad}
    ids = {
        f"{kind}_token_id": text.tokenizer.token_to_id(name)
        for kind, name in names.items()
        if name is not None
    }
    return {key: id_ for key, id_ in ids.items() if id_ is not None}


def _with_start(text: Text) -> tokenizers.Tokenizer:
    """The tokenizer, whose template starts every text as the training data start."""
    tokenizer = tokenizers.Tokenizer.from_str(text.tokenizer.to_str())
    if text.bos is not None and tokenizer.post_processor is None:
        start = tokenizer.token_to_id(text.bos)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{text.bos} $A", special_tokens=[(text.bos, start)]
        )
    return tokenizer


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", "utf-8")
