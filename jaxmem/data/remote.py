"""Local copies of remote data: gs://, s3://, hf:// and others.

A copy is kept under its address and version, so that a resumed run reads the same data,
and every reader of local files reads it.
"""

import contextlib
import functools
import glob
import hashlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxmem.base import caches, files, imports, messages
from jaxmem.data import python_records

# hf://OWNER/NAME, with @REVISION, /CONFIG and :SPLIT or without.
_HUB = re.compile(
    r"hf://(?!datasets/)(?P<name>[\w.-]+/[\w.-]+)(@(?P<revision>[\w.-]+))?"
    r"(/(?P<config>[\w.-]+))?(:(?P<split>[\w.\[\]%:+-]+))?"
)
_ADVICE = (
    "; a private or gated data set needs `hf auth login` or HF_TOKEN; without a "
    "network, HF_HUB_OFFLINE=1 reads a data set that this machine has read before"
)
_INSTALL = f"run: {imports.how_to_install('remote')}"


class RemoteError(ValueError):
    """Remote data cannot be copied; the message says why."""


def copies(address: str) -> list[Path]:
    """Copies of an address's files on this machine, in the order of their addresses.

    Args:
        address: of a file, or a glob of files, that fsspec reads (gs://, s3://,
            hf://datasets/OWNER/NAME/FILE); or of a data set, hf://OWNER/NAME; or of
            records of Python, as `python_records.store` returns it.

    Raises:
        RemoteError: a library is missing, or the data cannot be read.
    """
    with _errors(address):
        if address.startswith(python_records.SCHEME):
            return [python_records.stored(address)]
        match = _HUB.fullmatch(address)
        return [_copy_data_set(address, match)] if match else _copy_files(address)


@contextlib.contextmanager
def _errors(address: str) -> Iterator[None]:
    """A context in which every error is a RemoteError of one line."""
    try:
        yield
    except ImportError as error:
        name = getattr(error, "name", None) or messages.cut(str(error))
        raise RemoteError(
            f"{messages.name(address)} needs {name}, which is not installed; {_INSTALL}"
        ) from error
    except RemoteError:
        raise
    except Exception as error:  # of a file system, a hub or a network
        said = messages.cut(str(error).strip().rstrip(".")) or type(error).__name__
        advice = _ADVICE if _HUB.fullmatch(address) else ""
        raise RemoteError(
            f"cannot read {messages.name(address)}: {said}{advice}"
        ) from error


def _copy_files(address: str) -> list[Path]:
    import fsspec

    system, path = fsspec.core.url_to_fs(address)
    names = sorted(system.glob(path)) if glob.has_magic(path) else [path]
    if not names:
        raise RemoteError(f"{messages.name(address)} matches no file")
    copies = []
    for name in names:
        info = system.info(name)
        described = {k: v for k, v in info.items() if k in _VERSION}
        target = _copy_path(address, str(name), str(described), Path(name).name)
        if not target.exists():
            size = f" ({info['size']:,} bytes)" if info.get("size") else ""
            _tell(f"copying {messages.name(str(name))}{size} to {target}")
            with files.unfinished(target) as unfinished:
                system.get_file(name, str(unfinished))
        copies.append(target)
    return copies


@functools.cache
def _tell(line: str) -> None:
    """Print a line on stderr, once in a process: a run lists its files repeatedly."""
    print(f"jaxmem: {line}", file=sys.stderr, flush=True)


# Facts that differ when a file has changed, in one file system or another.
_VERSION = ("size", "etag", "ETag", "mtime", "md5Hash", "created", "blob_id", "oid")


def _copy_data_set(address: str, match: re.Match) -> Path:
    import datasets

    _tell(f"datasets reads {address}, and downloads the files that its cache lacks")
    part: Any = datasets.load_dataset(
        match["name"],
        match["config"],
        split=match["split"] or "train",
        revision=match["revision"],
    )
    name = f"{match['name'].replace('/', '-')}.parquet"
    target = _copy_path(address, match["name"], str(part._fingerprint), name)
    if not target.exists():
        _tell(f"writing {len(part):,} records to {target}")
        with files.unfinished(target) as unfinished:
            part.to_parquet(str(unfinished))
    return target


def _copy_path(address: str, name: str, version: str, last: str) -> Path:
    """The path of a copy; `last` is its file name."""
    scheme = address.partition("://")[0]
    content = "\n".join((scheme, name, version))
    key = hashlib.sha256(content.encode()).hexdigest()[:24]
    return caches.directory() / "remote" / key / last
