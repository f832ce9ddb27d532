"""What orbax writes and reads of a checkpoint, with errors that are told once."""

import contextlib
import functools
import logging
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from jaxmem.base import messages

FINITE = "finite"  # key in orbax's own metadata of a checkpoint
_STEP = re.compile("0|[1-9][0-9]{0,17}")  # name of a checkpoint


def steps_in(directory: Path) -> list[int]:
    """Numbers of the checkpoints in a directory, which need not exist."""
    if not directory.is_dir():
        return []
    names = (path.name for path in directory.iterdir())
    return sorted(int(name) for name in names if _STEP.fullmatch(name))


def shapes(path: Path) -> Any:
    """Metadata of each array of a checkpoint, nested by name in dicts and lists."""
    with ocp.StandardCheckpointer() as checkpointer:
        metadata = checkpointer.metadata((path / "state").resolve())
    if metadata.item_metadata is None:
        raise ValueError("no array is found in it")
    return metadata.item_metadata.tree


def settings_of(config: Any) -> dict[str, dict[str, Any]]:
    """The settings, if they are of sections; else raise a ValueError."""
    if isinstance(config, dict) and all(isinstance(x, dict) for x in config.values()):
        return config
    raise ValueError(f"config is not what a run saves: {messages.short(config)}")


def reason(error: Exception) -> str:
    """An error of another library on one line."""
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {messages.cut(first, 200)}"


def as_os_error(error: Exception) -> Exception:
    """Return the operating system's error that a tensorstore error quotes."""
    match = re.search(r"os_error_code='(\d+)'", str(error))
    if match:
        return OSError(int(match[1]), os.strerror(int(match[1])))
    if isinstance(error, OSError):
        return error
    return ValueError(messages.cut(str(error).partition("\n")[0], 200))


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Silence what orbax logs of an error that it raises as well."""
    _expect_leftovers()
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)


@functools.cache
def _expect_leftovers() -> None:
    """Hear nothing of the other tasks of orbax, which end after the first has failed.

    asyncio logs them when they are garbage-collected; threads of tensorstore find that
    the event loop, to which they want to report, is closed.
    """
    logging.getLogger("asyncio").addFilter(lambda x: "orbax" not in x.getMessage())
    before = sys.unraisablehook

    def hook(raised: Any) -> None:
        known = "Event loop is closed"
        if raised.exc_type is not RuntimeError or str(raised.exc_value) != known:
            before(raised)

    sys.unraisablehook = hook
