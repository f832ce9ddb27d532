"""Files that a full disk or a kill leaves whole, or as they were."""

import collections
import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

_CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP)
_MOST_WAITING = 100_000  # records of an `Appender`; about 50 MB of them


class WriteError(OSError):
    """A file cannot be written; the message names it and the bytes that are free."""


def why_not(path: Path, error: Exception) -> str:
    """One line about a file that could not be written.

    Args:
      path: of the file.
      error: what writing it raised.
    """
    reason = (isinstance(error, OSError) and error.strerror) or str(error)
    return f"{path}: cannot be written: {reason} ({free_bytes(path):,} bytes free)"


def free_bytes(path: Path) -> int:
    """What the file system of a path, which need not exist, has left for us."""
    for place in (path, *path.absolute().parents):
        with contextlib.suppress(OSError):
            return shutil.disk_usage(place).free
    return 0


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Raise a `WriteError` about the path for any OSError raised inside."""
    try:
        yield
    except WriteError:
        raise
    except OSError as error:
        raise WriteError(why_not(path, error)) from error


def write_whole(path: Path, text: str) -> None:
    """Replace a file's content in one step, which survives a loss of power.

    A file that holds the text already is left alone: a full disk does not matter then.

    Raises:
      WriteError: the old content, if any, is still there.
    """
    content = text.encode()
    with contextlib.suppress(OSError):
        if path.read_bytes() == content:
            return
    unfinished = path.with_name(path.name + ".unfinished")
    with naming(path):
        try:
            with open(unfinished, "wb") as file:
                file.write(content)
                sync(file.fileno())
            os.replace(unfinished, path)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise


def sync(descriptor: int) -> None:
    """Wait until a file is on the disk, where the file system can tell."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise


def sync_directory(directory: Path) -> None:
    """Wait until the names in a directory are on the disk."""
    if os.name == "nt":  # cannot open directories
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


class Appender:
    """A file that grows by whole records; those it cannot write yet wait in memory.

    Args:
      path: of the file, which is opened by the first `flush` of a record.
      mode: "a" to continue a file, "x" for a new one.

    Attributes:
      waiting: records that are not in the file yet.
      lost: how many records there was no room for in memory either.
    """

    def __init__(self, path: Path, mode: str = "a"):
        self.path, self._mode = path, mode
        self.waiting: collections.deque[bytes] = collections.deque()
        self.lost = 0
        self._descriptor: int | None = None
        self._end = 0  # of the last whole record
        self._torn = False  # something may be behind it

    def add(self, record: bytes) -> None:
        """Append a record to those that wait."""
        if len(self.waiting) == _MOST_WAITING:
            self.waiting.popleft()
            self.lost += 1
        self.waiting.append(record)

    def flush(self) -> None:
        """Write what waits; it is in the operating system's hands on return.

        Raises:
          OSError: the file ends after a whole record, and the others still wait.
        """
        while self.waiting:
            if self._descriptor is None:
                self._open()
            try:
                self._write(self.waiting[0])
            except OSError:
                with contextlib.suppress(OSError):  # the next attempt tries again
                    self._cut()
                raise
            self.waiting.popleft()

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
        flags |= os.O_EXCL if self._mode == "x" else 0
        self._descriptor = os.open(self.path, flags, 0o666)
        self._end = os.fstat(self._descriptor).st_size

    def _write(self, record: bytes) -> None:
        assert self._descriptor is not None
        self._cut()
        self._torn, left = True, memoryview(record)
        while left:
            left = left[os.write(self._descriptor, left) :]
        self._end, self._torn = self._end + len(record), False

    def _cut(self) -> None:
        if not self._torn or self._descriptor is None:
            return
        if os.fstat(self._descriptor).st_size > self._end:
            os.ftruncate(self._descriptor, self._end)
        self._torn = False

    def sync(self) -> None:
        """Wait until all that was written is on the disk."""
        if self._descriptor is not None:
            sync(self._descriptor)

    def close(self) -> None:
        """Close the file; what waits is not written."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
