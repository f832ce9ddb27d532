"""The directory of what is kept between runs, on machines of every kind.

It is `$XDG_CACHE_HOME/jaxmem`, or `~/.cache/jaxmem`; where neither can be written, as
in a container without a home directory, a directory among the temporary files.
"""

import contextlib
import functools
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from jaxmem.base import messages


class CacheError(ValueError):
    """A directory for what is kept cannot be written; the message names its key."""


def directory(configured: str | None = None) -> Path:
    """The directory that a user has configured, or the default one, which exists.

    Raises:
        OSError: it cannot be made or written.
    """
    if configured is None:
        return _default_directory()
    try:
        path = Path(configured).expanduser()
    except RuntimeError as error:  # there is no home directory
        raise OSError(messages.reason(error)) from error
    path.mkdir(parents=True, exist_ok=True)
    return path


@contextlib.contextmanager
def errors(configured: str | None) -> Iterator[None]:
    """A context whose OSErrors become a `CacheError` that names `data.cache_dir`."""
    try:
        yield
    except OSError as error:
        raise CacheError(
            f"data.cache_dir={configured!r}: vocabularies cannot be kept there: "
            f"{messages.reason(error)}; name a directory that can be written"
        ) from error


def candidates() -> list[Path]:
    """The directories that are tried first, in order."""
    paths = []
    if (chosen := os.environ.get("XDG_CACHE_HOME")) and os.path.isabs(chosen):
        paths.append(Path(chosen) / "jaxmem")
    with contextlib.suppress(RuntimeError):  # there is no home directory
        paths.append(Path.home() / ".cache" / "jaxmem")
    return paths


def _default_directory() -> Path:
    reason = "there is no home directory"
    for path in candidates():
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = f"{path}: {messages.reason(error)}"
            continue
        if os.access(path, os.W_OK | os.X_OK):
            return path
        reason = f"{path} cannot be written"
    return _temporary_directory(reason)


@functools.cache
def _temporary_directory(reason: str) -> Path:
    """A directory of this process among the temporary files, which is said once."""
    path = Path(tempfile.mkdtemp(prefix="jaxmem-"))
    print(
        f"jaxmem: vocabularies and copies of remote data are kept in {path} "
        f"({reason}); set XDG_CACHE_HOME or data.cache_dir to keep them for other runs",
        file=sys.stderr,
    )
    return path
