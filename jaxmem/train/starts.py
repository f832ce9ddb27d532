"""The adapter that a run starts from, and the copy of it in the run's directory.

A run that has saved a step reads the copy: by then the adapter may be gone, or trained
further by the run that has left it.
"""

import hashlib
import os
from pathlib import Path
from typing import Any

from jaxmem.base import json_files, processes
from jaxmem.checkpoints import start_adapter
from jaxmem.checkpoints.adapter_config import CONFIG
from jaxmem.data.chat import template_text
from jaxmem.train.settings import JobConfig, RunConfig
from jaxmem.train.state import checkpoint

NAME = "start"  # of the copy's directory
_TEMPLATE = "chat_template.jinja"


def kept(run: RunConfig) -> Path | None:
    """The copy that a run reads; None before it has saved a step, or without one."""
    out_dir = Path(run.out_dir).expanduser()
    copy = out_dir / NAME
    if not os.path.exists(copy / CONFIG):  # also if the name is too long
        return None
    has_saved = checkpoint.newest(out_dir / "checkpoints") is not None
    return copy if has_saved else None


def directory(config: Any) -> Path | None:
    """The directory of the adapter that a job starts from; None without one."""
    if config.model.adapter is None:
        return None
    return kept(config.run) or start_adapter.adapter_directory(config.model.adapter)


def keep(config: JobConfig) -> None:
    """Copy the adapter that a new run starts from; all processes of it call this."""
    source, base = directory(config), config.model.checkpoint
    if source is not None and base is not None:
        target = Path(config.run.out_dir).expanduser() / NAME
        processes.by_first(lambda: start_adapter.copy_adapter(source, target, base))


def digest(config: JobConfig) -> str | None:
    """A digest of the weights that a job starts from, beside those of its base."""
    source = directory(config)
    if source is None:
        return None
    whole = hashlib.sha256()
    for path in sorted(source.glob("adapter_model*.safetensors")):
        with open(path, "rb") as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()


def check_template(config: JobConfig, chosen: str | None) -> None:
    """Raise if an adapter has learned another chat template than the job reads.

    `chosen` is the path of a template in place of the base's; None: the base's is read.
    """
    source, base = directory(config), config.model.checkpoint
    if chosen is not None or source is None or base is None:
        return
    own = source / _TEMPLATE
    if own.exists() and json_files.read_text(own) != template_text(base):
        section = "data" if "data" in config.sections() else "task"
        raise ValueError(
            f"{config.model.adapter}: its {_TEMPLATE} is not the chat template of "
            f"{base}; choose one of them: {section}.chat_template={own}, or the base's"
        )
