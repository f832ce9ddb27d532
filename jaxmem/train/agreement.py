"""Settings, versions and files that the processes of a run must have in common."""

import hashlib
import importlib.metadata
import platform
from pathlib import Path

from jaxmem._version import __version__
from jaxmem.base import fields, hub
from jaxmem.train.settings import JobConfig

_PACKAGES = "jax", "jaxlib", "flax", "optax", "grain", "tokenizers", "numpy"
_OF_EACH = {"data.cache_dir"}  # may be another directory on each machine
_SMALL = 2**24  # bytes of a file in a directory whose content is compared


def facts(config: JobConfig) -> dict[str, str]:
    """Settings, versions and digests of files, equal in all processes of a run."""
    shared = {name: importlib.metadata.version(name) for name in _PACKAGES}
    shared |= {"jaxmem": __version__, "python": platform.python_version()}
    for section in config.sections():
        for path, value in fields.values_of(getattr(config, section)).items():
            key = f"{section}.{path}"
            if key in _OF_EACH:
                continue
            is_copy = isinstance(value, str) and hub.model_of(value) is not None
            shared[key] = repr(hub.recorded(value) if is_copy else value)
            for named in value if isinstance(value, tuple) else (value,):
                if is_copy or not isinstance(named, str):
                    continue  # a commit of the Hub has one content
                if content := _digest_of_path(named):
                    shared[f"the content of {key}={named!r}"] = content
    return shared


def _digest_of_path(named: str) -> str | None:
    """A digest of the file or checkpoint that a text names; None for other texts."""
    for text in (named, named.rpartition(":")[0]):  # as in rewards.py:score
        path = Path(text).expanduser()
        if text and path.is_file():
            return _digest_file(path)
        if text and (path / "config.json").is_file():  # of a checkpoint
            return _digest_directory(path)
    return None


def _digest_directory(path: Path) -> str:
    """A digest of names, sizes and small files: weights are too many to read."""
    whole = hashlib.sha256()
    for file in sorted(path.iterdir()):
        if file.is_file():
            size = file.stat().st_size
            whole.update(f"{file.name} {size} ".encode())
            whole.update(_digest_file(file).encode() if size <= _SMALL else b"")
    return whole.hexdigest()[:16]


def _digest_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]
