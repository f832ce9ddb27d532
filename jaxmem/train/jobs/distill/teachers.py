"""The teacher of a student: its directory and sizes, and checks of its vocabulary."""

import dataclasses
from pathlib import Path
from typing import Any

from jaxmem import checkpoints
from jaxmem.base import json_files, messages
from jaxmem.checkpoints.start_adapter import adapter_directory
from jaxmem.models.decoder import ModelConfig
from jaxmem.train.jobs.config import DistillJobConfig


class TeacherError(ValueError):
    """A teacher that cannot be used; the message says why."""


def directory(config: DistillJobConfig) -> Path:
    """The directory of the teacher's checkpoint: `distill.teacher`, or its `model`."""
    named = config.distill.teacher
    assert named is not None, "DistillJobConfig says so"
    path = Path(named).expanduser()
    for candidate in (path, path / "model"):
        if (candidate / "config.json").exists():
            return candidate
    if adapter_directory(named) is not None:
        raise TeacherError(
            f"distill.teacher={named!r}: an adapter; merge it and name NEW: jaxmem "
            f"export {named} --merge --out NEW"
        )
    raise TeacherError(
        f"distill.teacher={named!r} must be a checkpoint (with config.json) or a run "
        "that saved a whole model (model/config.json)"
    )


def model_of(config: DistillJobConfig) -> ModelConfig:
    """The teacher's sizes, types, checkpoint and base."""
    path = directory(config)
    described = checkpoints.read_config(path)
    dtype = config.distill.teacher_dtype or described.dtype or "float32"
    base, coding = config.distill.teacher_base, described.coding
    if coding and base not in (None, coding):
        raise TeacherError(
            f"distill.teacher_base={base!r} differs from "
            f"distill.teacher={config.distill.teacher!r}, which has matrices in "
            f"{coding}; leave distill.teacher_base out"
        )
    return dataclasses.replace(
        described.model,
        checkpoint=str(path),
        dtype=dtype,
        param_dtype=dtype,
        base=base or coding,
        attention=config.model.attention,
    )


def of_same_vocabulary(config: DistillJobConfig, student: ModelConfig) -> ModelConfig:
    """The student's sizes, with the teacher's vocabulary where it has none of its own.

    The vocabularies of two checkpoints may be padded to different sizes.
    """
    if config.distill.teacher is None:
        return student  # a file is read, which names its vocabulary
    size = model_of(config).vocab_size
    if student.checkpoint is not None:
        _check_tokens(config, student.checkpoint)
        ours, theirs = student.vocab_size or 0, size or 0
        # Divergences are over the smaller one, but a sample could be of any row.
        if config.is_on_policy and ours > theirs:
            raise TeacherError(
                f"distill.mode='on_policy': model.checkpoint={student.checkpoint!r} "
                f"has a vocabulary of {ours} entries and may sample ids beyond the "
                f"{theirs} entries of distill.teacher={config.distill.teacher!r}; use "
                "distill.mode='text'"
            )
        return student
    if student.vocab_size is None:
        return dataclasses.replace(student, vocab_size=size)
    if student.vocab_size != size:
        raise TeacherError(
            f"distill.teacher={config.distill.teacher!r} has a vocabulary of {size} "
            f"entries, and model.vocab_size is {student.vocab_size}: both must be "
            "equal; leave model.vocab_size out"
        )
    return student


def _check_tokens(config: DistillJobConfig, student: str) -> None:
    """Raise unless both tokenizers have the same tokens at the same ids."""
    ours, theirs = (
        checkpoints.load_vocabulary(path).tokenizer.get_vocab()
        for path in (student, directory(config))
    )
    differing = {token for token, _ in ours.items() ^ theirs.items()}
    if differing:
        token = min(differing)
        raise TeacherError(
            f"the tokenizer of distill.teacher={config.distill.teacher!r} differs "
            f"from the tokenizer of model.checkpoint={student!r}: token "
            f"{messages.short(token)} has the id {theirs.get(token)}, not "
            f"{ours.get(token)}; choose a teacher with the same tokenizer"
        )


def reading(config: DistillJobConfig) -> ModelConfig:
    """The student's config, with the checkpoint whose tokenizer reads the text."""
    if config.model.checkpoint is not None:
        return config.model
    return dataclasses.replace(config.model, checkpoint=str(directory(config)))


def text(config: DistillJobConfig, chosen: str | None) -> checkpoints.Text:
    """The text files of a student without a checkpoint, which are its teacher's.

    A template that is `chosen`, by its path, replaces the teacher's.
    """
    path = directory(config)
    tokenizer, start, eos, _ = checkpoints.load_vocabulary(path)
    described = path / "tokenizer_config.json"
    named = json_files.read_object(described) if described.exists() else {}
    template = named.get("chat_template")
    own = path / "chat_template.jinja"
    if chosen is not None or own.exists():
        template = json_files.read_text(Path(chosen).expanduser() if chosen else own)
    return checkpoints.Text(
        tokenizer,
        tokenizer.id_to_token(start[0]) if start else None,
        None if eos is None else tokenizer.id_to_token(eos),
        _token_text(named.get("pad_token")),
        template if isinstance(template, str) else None,
    )


def _token_text(token: Any) -> str | None:
    """The text of a token, which may be a serialised AddedToken."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None
