"""Describes a decoder that has no checkpoint yet, as one of the known architectures.

`read_config` says what each `config.json` means. A description is therefore found by
trying: the first family whose config.json is read back as the decoder's own settings is
exactly that model.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import processors

from jaxmem.base.fields import values_of
from jaxmem.checkpoints.architectures import parse_config
from jaxmem.checkpoints.config_reader import CheckpointError, write_object
from jaxmem.checkpoints.families import FAMILIES, ropes
from jaxmem.models.config import BASE_FIELDS, ModelConfig

# Fields that do not describe the function that the weights compute.
FREE = (
    "checkpoint", "adapter", "factory", "dtype", "param_dtype", "attention",
    "lora_rank", "lora_alpha", "lora_targets", "lora_head", "lora_saved",
    "router_aux_loss_coef",
    "pad_row", *BASE_FIELDS,
)  # fmt: skip


class Text(NamedTuple):
    """Tokenizer, special tokens and chat template of a model."""

    tokenizer: tokenizers.Tokenizer
    bos: str | None  # name of the token that starts every text, if any
    eos: str | None  # name of the token that ends a text
    pad: str | None
    chat_template: str | None = None  # a Jinja template


def describe(model: ModelConfig, max_positions: int) -> dict[str, Any]:
    """Return the `config.json` of these settings, without ids of special tokens.

    Args:
        model: of the decoder; `vocab_size` must be known.
        max_positions: longest context in tokens, as the model was trained.

    Raises:
        CheckpointError: no known architecture computes the same; the message names the
            settings that the nearest one lacks.
    """
    nearest: list[str] | None = None
    model = model.replaced({"self_attn.scale": model.score_scale})
    for family in FAMILIES:
        raw = family.write(model, max_positions)
        differing = _lost_settings(model, raw)
        if differing is None:
            continue
        if not differing:
            return raw
        if nearest is None or len(differing) < len(nearest) - 1:
            nearest = [family.architecture, *differing]
    assert nearest is not None
    raise CheckpointError(
        f"config.json cannot name an architecture like this decoder: {nearest[0]} "
        f"cannot have {', '.join(nearest[1:])}"
    )


def describe_known(
    model: ModelConfig, max_positions: int
) -> tuple[ModelConfig, dict[str, Any]]:
    """The settings of the known architecture that computes the same, and its config.

    Other architectures than Gemma have no scaled embeddings: the factor then is part of
    the embedding table, and a tied head gets a matrix of its own.

    Raises:
        CheckpointError: no known architecture computes the same.
    """
    try:
        return model, describe(model, max_positions)
    except CheckpointError:
        if not model.embedding.scaled:
            raise
    plain = model.replaced({"embedding.scaled": False, "tied": False})
    return plain, describe(plain, max_positions)


def _lost_settings(model: ModelConfig, raw: Mapping[str, Any]) -> list[str] | None:
    """Settings that are lost when `raw` is read back; None if it cannot be read."""
    try:
        other = parse_config(Path("config.json"), raw).model
    except CheckpointError:
        return None
    ours, theirs = _normal_settings(model), _normal_settings(other)
    return [f"{name}={ours[name]!r}" for name in ours if ours[name] != theirs[name]]


def _normal_settings(model: ModelConfig) -> dict[str, Any]:
    """Every setting that affects results, each in one form."""
    fields = {k: v for k, v in values_of(model).items() if k not in FREE}
    fields["pattern"] = model.by_layer("pattern")
    fields["self_attn.scale"] = f"{model.score_scale:.12g}"
    if "local" not in fields["pattern"] or model.rope.local_theta == model.rope.theta:
        fields["rope.local_theta"] = None
    return fields


def write_text_files(
    directory: Path, config: Mapping[str, Any], text: Text, dtype: str
) -> None:
    """Write config.json, generation_config.json and the tokenizer's files.

    The config is from `describe`, and the dtype that of the stored weights.
    """
    tokens = {"bos_token": text.bos, "eos_token": text.eos, "pad_token": text.pad}
    tokens = {key: token for key, token in tokens.items() if token is not None}
    known = text.tokenizer.token_to_id
    ids = {f"{key}_id": known(token) for key, token in tokens.items()}
    ids = {key: id_ for key, id_ in ids.items() if id_ is not None}
    both = ropes.in_both(config)
    write_object(directory / "config.json", {**both, **ids, "dtype": dtype})
    write_object(directory / "generation_config.json", ids)
    tokenizer = _with_start(text)
    (directory / "tokenizer.json").write_text(tokenizer.to_str(), "utf-8")
    described = tokens | {
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    write_object(directory / "tokenizer_config.json", described)
    if text.chat_template is not None:
        (directory / "chat_template.jinja").write_text(text.chat_template, "utf-8")


def _with_start(text: Text) -> tokenizers.Tokenizer:
    """The tokenizer, whose template starts every text as the training data start."""
    tokenizer = tokenizers.Tokenizer.from_str(text.tokenizer.to_str())
    if text.bos is not None and tokenizer.post_processor is None:
        start = tokenizer.token_to_id(text.bos)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{text.bos} $A", special_tokens=[(text.bos, start)]
        )
    return tokenizer
