"""Records of a Python program as a file of the cache, under the digest of its content.

    store([{"text": "Once"}], "data.source") -> "records://3f2a…"

`remote.copies` finds the file of such an address, so that records of Python are read as
those of any .jsonl file, and a run that is resumed with other records is refused.
"""

import hashlib
import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxmem.base import caches, messages

SCHEME = "records://"
_DIGITS = 24  # hexadecimal ones of the digest


class RecordsError(ValueError):
    """Records cannot be stored; the message names the key and the record."""


def store(records: Iterable[Any], key: str) -> str:
    """Write records as lines of JSON, unless they are there, and return their address.

    Args:
        records: a dict each, as in a list or a `datasets.Dataset`.
        key: the key of the configuration that names them, for errors.

    Raises:
        RecordsError: there are none, or one is no dict, or not JSON.
        OSError: the cache cannot be written.
    """
    directory = caches.directory() / "records"
    directory.mkdir(parents=True, exist_ok=True)
    digest, count = hashlib.sha256(), 0
    with tempfile.TemporaryDirectory(".unfinished", dir=directory) as folder:
        unfinished = Path(folder) / "records.jsonl"
        with unfinished.open("wb") as lines:
            for count, record in enumerate(records, start=1):
                line = _line(record, f"{key}: record {count - 1}")
                digest.update(line)
                lines.write(line)
        if not count:
            raise RecordsError(f"{key} has no records")
        address = SCHEME + digest.hexdigest()[:_DIGITS]
        unfinished.replace(_path_of(address))
    return address


def _line(record: Any, where: str) -> bytes:
    if not isinstance(record, Mapping):
        raise RecordsError(messages.must_be(where, "a dict", record))
    try:
        text = json.dumps(record, ensure_ascii=False, allow_nan=False)
        return (text + "\n").encode()
    except (TypeError, ValueError, RecursionError) as error:
        reason = messages.cut(str(error))
        raise RecordsError(f"{where} cannot be written as JSON: {reason}") from error


def stored(address: str) -> Path:
    """The file of an address.

    Raises:
        FileNotFoundError: the cache does not have it.
    """
    path = _path_of(address)
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is missing; call jaxmem.train.make with the same records again"
        )
    return path


def _path_of(address: str) -> Path:
    return caches.directory() / "records" / f"{address.removeprefix(SCHEME)}.jsonl"
