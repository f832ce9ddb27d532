"""A checkpoint's tokenizer, and the tokens around a text."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from jaxmem.checkpoints.architectures import (
    CheckpointConfig,
    CheckpointError,
    read_config,
)


class Vocabulary(NamedTuple):
    """A tokenizer, and ids that it puts before a text or that end one."""

    tokenizer: tokenizers.Tokenizer
    start: tuple[int, ...]  # before every text, as Llama and Gemma have it; or ()
    eos: int | None  # ends a document; None where the checkpoint names none

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Ids of texts; special tokens that are spelled out in them are such."""
        encoded = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [made.ids for made in encoded]


def load_vocabulary(directory: str | Path) -> Vocabulary:
    """Load `tokenizer.json` of a checkpoint's directory.

    Args:
      directory: of the checkpoint.

    Raises:
      CheckpointError: there is none, or it has ids that the model has not.
    """
    config = read_config(directory)
    path = config.path.parent / "tokenizer.json"
    if not path.exists():
        raise CheckpointError(f"{path}: missing; only this form of tokenizer is read")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    _check_ids(path, tokenizer, config)
    start = tuple(tokenizer.encode("", add_special_tokens=True).ids)
    eos = _eos(config, tokenizer)
    # Some templates end texts too; ends are the caller's to add.
    return Vocabulary(tokenizer, start[:-1] if start[-1:] == (eos,) else start, eos)


def _check_ids(
    path: Path, tokenizer: tokenizers.Tokenizer, config: CheckpointConfig
) -> None:
    size = config.model.vocab_size or 0
    token, top = max(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    if top >= size:
        raise CheckpointError(
            f"{path}: token {token!r} has the id {top}, but model.embed_tokens.weight "
            f"has only {size} rows (vocab_size of {config.path})"
        )


def _eos(config: CheckpointConfig, tokenizer: tokenizers.Tokenizer) -> int | None:
    """As the tokenizer's config names it, else the model's first."""
    path = config.path.parent / "tokenizer_config.json"
    if path.exists():
        named = _json(path).get("eos_token")
        named = named.get("content") if isinstance(named, dict) else named
        if named is not None:
            found = tokenizer.token_to_id(named)
            if found is None:
                raise CheckpointError(f"{path}: eos_token {named!r} is no token")
            return found
    listed = config.raw.get("eos_token_id")
    return listed[0] if isinstance(listed, list) else listed


def _json(path: Path) -> dict[str, Any]:
    try:
        made = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(made, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return made
