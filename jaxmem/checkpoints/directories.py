"""Directories that are saved whole, and replaced only where we have saved them."""

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxmem.base import processes
from jaxmem.checkpoints import model_card
from jaxmem.checkpoints.config_reader import CheckpointError

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json",
    "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "chat_template.json", "generation_config.json",
)  # fmt: skip
TEMPLATES = "additional_chat_templates"  # folder of those that have names
_CONFIGS = "config.json", "adapter_config.json", "base.json"
_TENSORS = re.compile(
    r"(adapter_)?model\.safetensors(\.index\.json)?|model-\d{5,}-of-\d{5,}\.safetensors"
)


@contextlib.contextmanager
def new_directory(target: Path, replace: bool = False) -> Iterator[Path | None]:
    """A directory that appears under its name once it is complete, or not at all.

    Yields the unfinished directory; None in all processes of a run but the first.

    Args:
        target: to create.
        replace: True if one that was saved before is replaced.

    Raises:
        CheckpointError: the target exists, and is not one that may be replaced.
    """
    if not processes.is_first():
        yield None
        return
    check_target(target, replace)
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    try:
        yield unfinished
        unfinished.chmod(0o755)  # mkdtemp makes it private; use mkdir's default mode
        check_target(target, replace)  # it may be there by now
        if target.exists():
            shutil.rmtree(target)
        os.replace(unfinished, target)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def check_target(target: Path, replace: bool) -> None:
    """Raise a CheckpointError if `new_directory` must not create a target."""
    if not os.path.lexists(target):
        return
    if not replace:
        raise CheckpointError(
            f"{target} exists already; name another directory, or give overwrite=True"
        )
    if target.is_symlink():
        raise CheckpointError(
            f"{target} is a symbolic link, which jaxmem does not replace; remove it"
        )
    if (foreign := foreign_in(target)) is not None:
        raise CheckpointError(
            f"{target} is not replaced, because {foreign} is not a file of a "
            "checkpoint; move it"
        )


def foreign_in(target: Path) -> Path | None:
    """The first path in a directory that no saved checkpoint or adapter has, if any.

    It is the target itself if that is no directory.
    """
    if not target.is_dir():
        return target
    known = {*TOKENIZER_FILES, *_CONFIGS}
    for path in sorted(target.iterdir()):
        if path.name == TEMPLATES and path.is_dir():
            if others := {*path.iterdir()} - {*named_templates(target)}:
                return min(others)
            continue
        named = path.name in known or _TENSORS.fullmatch(path.name)
        named = named or (path.name == model_card.NAME and model_card.is_own(path))
        if not named or path.is_dir():
            return path
    return None


def named_templates(directory: Path) -> list[Path]:
    """Files of a checkpoint's chat templates that have names, sorted."""
    return sorted((directory / TEMPLATES).glob("*.jinja"))


def copy_text_files(
    source: Path, directory: Path, chat_template: str | Path | None = None,
    names: Sequence[str] = ("config.json", *TOKENIZER_FILES),
) -> None:  # fmt: skip
    """Copy the files by which a checkpoint's model reads text: config and tokenizer.

    The path of a chat template replaces all templates of the source.
    """
    for name in names:
        if (source / name).exists():
            shutil.copyfile(source / name, directory / name)
    if chat_template is not None:
        template = Path(os.path.expanduser(chat_template))
        shutil.copyfile(template, directory / "chat_template.jinja")
        return
    for template in named_templates(source):
        (directory / TEMPLATES).mkdir(exist_ok=True)
        shutil.copyfile(template, directory / TEMPLATES / template.name)
