"""Reads a checkpoint's tokenizer, and its special tokens around a text."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from jaxmem.base import json_files, messages
from jaxmem.base.ranges import integers
from jaxmem.checkpoints.architectures import CheckpointConfig, read_config
from jaxmem.checkpoints.config_reader import (
    CheckpointError,
    Reader,
    read_object,
    write_object,
)

_MOST_GROWTH = 10_000  # times that a normalizer may make a text longer


class Vocabulary(NamedTuple):
    """A tokenizer, the ids that start every text, and the id that ends a document."""

    tokenizer: tokenizers.Tokenizer
    start: tuple[int, ...]  # ids before every text, for Llama and Gemma; or ()
    eos: int | None  # id that ends a document; None if the checkpoint names none
    absent: tuple[str, ...] = ()  # special tokens that the model has no embedding of

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Ids of texts; the names of special tokens in a text become special tokens.

        Raises:
            CheckpointError: a text has a token that the model has no embedding of.
        """
        for token in self.absent:
            if any(token in text for text in texts):
                raise CheckpointError(
                    f"the text has the token {messages.short(token)}, for which the "
                    "model has no embedding"
                )
        encoded = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encoded]


def load_vocabulary(directory: str | Path, beside: Path | None = None) -> Vocabulary:
    """Load `tokenizer.json` from a checkpoint's directory, or from another `beside`.

    Raises:
        CheckpointError: the file is missing, or has ids that the model lacks.
    """
    config = read_config(directory)
    path = (beside or config.path.parent) / "tokenizer.json"
    if not path.exists():
        raise CheckpointError(f"{path}: missing; {_how_to_convert(path.parent)}")
    try:
        text = json_files.read_text(path)
    except (OSError, json_files.JsonError) as error:
        reason = messages.reason(error)
        raise CheckpointError(f"{path}: cannot be read: {reason}") from error
    _check_growth(path, text)
    text, absent = _without_absent(text, config.model.vocab_size or 0)
    tokenizer, start = _read_tokenizer(path, text)
    _check_ids(path, tokenizer, config)
    eos = _find_eos(config, tokenizer)
    # Some templates also add eos; the caller adds it where it belongs.
    start = start[:-1] if start[-1:] == (eos,) else start
    return Vocabulary(tokenizer, start, eos, absent)


def check_tokens(adapter: Path, base: Path) -> None:
    """Raise if the tokenizer beside an adapter has other tokens than its base's.

    Raises:
        CheckpointError: texts are read by the base's tokenizer, which lacks them.
    """
    path, known = adapter / "tokenizer.json", base / "tokenizer.json"
    if not (path.exists() and known.exists()):
        return
    if path.read_bytes() == known.read_bytes():
        return
    ours, theirs = (load_vocabulary(base, x.parent).tokenizer for x in (path, known))
    differing = {
        token for token, _ in ours.get_vocab().items() ^ theirs.get_vocab().items()
    }
    if differing:
        token = min(differing)
        raise CheckpointError(
            f"{path}: token {messages.short(token)} has the id "
            f"{ours.token_to_id(token)}, and {theirs.token_to_id(token)} in {known}; "
            "merge adapter and base with PEFT, and use what it saves"
        )


def _without_absent(text: str, rows: int) -> tuple[str, tuple[str, ...]]:
    """The tokenizer without added tokens of ids that the embedding lacks; their names.

    Such are those of a part of the model that is elsewhere, as images are.
    """
    try:
        described = json.loads(text)
        added = described["added_tokens"]
        absent = [token for token in added if token["id"] >= rows]
    except (ValueError, KeyError, TypeError, RecursionError):
        return text, ()  # the library says what is wrong
    if not absent:
        return text, ()
    described["added_tokens"] = [token for token in added if token["id"] < rows]
    return json.dumps(described), tuple(token["content"] for token in absent)


def _check_growth(path: Path, text: str) -> None:
    """Raise a CheckpointError where a normalizer makes a text too many times longer."""
    try:
        steps = [json.loads(text)["normalizer"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        return  # the library says what is wrong
    times = 1.0
    while steps:
        step = steps.pop()
        if not isinstance(step, dict):
            continue
        inner = step.get("normalizers")
        steps += inner if isinstance(inner, list) else []
        pattern, content = step.get("pattern"), step.get("content")
        if step.get("type") == "Replace" and isinstance(content, str):
            old = pattern.get("String") if isinstance(pattern, dict) else None
            times *= max(len(content) / (len(old) if old else 1), 1)
    if times > _MOST_GROWTH:
        raise CheckpointError(
            f"{path}: its normalizer may make a text {times:,.0f} times longer; use a "
            "tokenizer without such replacements"
        )


def _how_to_convert(directory: Path) -> str:
    """The line that makes tokenizer.json of another form of tokenizer."""
    forms = "tekken.json", "tokenizer.model", "vocab.json", "spiece.model"
    form = next((name for name in forms if (directory / name).exists()), None)
    if form is None:
        return "only this form of tokenizer is read"
    convert = f"AutoTokenizer.from_pretrained('{directory}').save_pretrained"
    return (
        f"convert {form} to this form, the only one that jaxmem reads: python -c "
        f"\"from transformers import AutoTokenizer; {convert}('{directory}')\""
    )


def _read_tokenizer(
    path: Path, text: str
) -> tuple[tokenizers.Tokenizer, tuple[int, ...]]:
    """The tokenizer, and the ids of an empty text."""
    try:
        tokenizer = tokenizers.Tokenizer.from_str(text)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return tokenizer, tuple(tokenizer.encode("", add_special_tokens=True).ids)
    # The library raises no narrower type, and Rust's panics are no `Exception`.
    except BaseException as error:
        if not isinstance(error, Exception) and "Panic" not in type(error).__name__:
            raise
        reason = messages.reason(error)
        raise CheckpointError(f"{path}: cannot be read: {reason}") from error


def _check_ids(
    path: Path, tokenizer: tokenizers.Tokenizer, config: CheckpointConfig
) -> None:
    size = config.model.vocab_size or 0
    entries = tokenizer.get_vocab().items()
    if not entries:
        raise CheckpointError(f"{path}: the vocabulary is empty")
    token, top = max(entries, key=lambda entry: entry[1])
    if top >= size:
        raise CheckpointError(
            f"{path}: token {messages.short(token)} has the id {top}, but "
            f"model.embed_tokens.weight has only {size} rows (vocab_size of "
            f"{config.path})"
        )


def _find_eos(config: CheckpointConfig, tokenizer: tokenizers.Tokenizer) -> int | None:
    """The id that the tokenizer's config names, else the first one of the model's."""
    path = config.path.parent / "tokenizer_config.json"
    if path.exists():
        reader = Reader(path, read_object(path))
        named = reader.take("eos_token", (str, dict, type(None)), None)
        if isinstance(named, dict):  # a serialised AddedToken
            named = Reader(path, named).take("content", str)
        if named is not None:
            token_id = tokenizer.token_to_id(named)
            if token_id is None:
                raise reader.error(f"eos_token {messages.short(named)} is not a token")
            return token_id
    return _first_eos(config, tokenizer)


def _first_eos(config: CheckpointConfig, tokenizer: tokenizers.Tokenizer) -> int | None:
    """The first id in `eos_token_id`, which is null, an id, or a list of ids."""
    listed = config.raw.get("eos_token_id")
    if listed is None:
        return None
    ids, within = (
        _list_eos_ids(config.raw),
        integers(0, (config.model.vocab_size or 0) - 1),
    )
    possible = ids and not any(map(within.problem, ids))
    if not possible or tokenizer.id_to_token(ids[0]) is None:
        raise CheckpointError(
            f"{config.path}: eos_token_id must be an id of tokenizer.json, a list of "
            f"them, or null, got {messages.short(listed)}"
        )
    return ids[0]


def end_ids(directory: str | Path) -> tuple[int, ...]:
    """Every id that ends a completion: of a document, and of an assistant's turn.

    The ids that the tokenizer's config, `config.json` and `generation_config.json` of a
    checkpoint name, sorted; () if they name none.
    """
    vocabulary, config = load_vocabulary(directory), read_config(directory)
    path = config.path.parent / "generation_config.json"
    raws = [config.raw] + ([read_object(path)] if path.exists() else [])
    ids = set() if vocabulary.eos is None else {vocabulary.eos}
    within = integers(0, (config.model.vocab_size or 0) - 1)
    for raw in raws:
        ids.update(
            i for i in _list_eos_ids(raw) if i is not None and not within.problem(i)
        )
    return tuple(sorted(ids))


def _list_eos_ids(raw: Mapping[str, Any]) -> list[Any]:
    """`eos_token_id`, an id or null, as the list that it may be."""
    listed = raw.get("eos_token_id")
    return listed if isinstance(listed, list) else [listed]


def add_end(directory: Path, token: str, like: Path | None = None) -> None:
    """Name a token that ends a completion in a checkpoint's generation_config.json.

    Conversations teach a base model to end its turns with a token of their template. An
    adapter's directory gets a copy of the file of the checkpoint it is of, `like`.
    """
    vocabulary, name = load_vocabulary(like or directory), "generation_config.json"
    id_ = vocabulary.tokenizer.token_to_id(token)
    path, source = directory / name, (like or directory) / name
    described = read_object(source) if source.exists() else {}
    ids = [*(i for i in _list_eos_ids(described) if i is not None), id_]
    if ids[:-1] == [] and vocabulary.eos is not None:
        ids = [vocabulary.eos, id_]
    ids = list(dict.fromkeys(ids))
    described["eos_token_id"] = ids[0] if len(ids) == 1 else ids
    write_object(path, described)


def vocabulary_digest(tokenizer: tokenizers.Tokenizer) -> str:
    """Digest of a tokenizer's tokens and ids, regardless of its other settings."""
    entries = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()[:24]
