"""Atomic file writes, and appends that survive a full disk."""

import collections
import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP)
_MAX_PENDING = 100_000  # records of an `Appender`; about 50 MB


class WriteError(OSError):
    """A file cannot be written; the message names it and the free bytes."""


def shown(path: Path) -> Path:
    """A path as a message has it: from the current directory, if it is below that."""
    current = Path.cwd()
    return path.relative_to(current) if path.is_relative_to(current) else path


def describe_failure(path: Path, error: Exception) -> str:
    """Return one line about a failed write: the path, the reason, the free bytes."""
    reason = (isinstance(error, OSError) and error.strerror) or str(error)
    return f"{path}: cannot be written: {reason} ({free_bytes(path):,} bytes free)"


def free_bytes(path: Path) -> int:
    """Return the free bytes of the file system of a path, which need not exist."""
    for ancestor in (path, *path.absolute().parents):
        with contextlib.suppress(OSError):
            return shutil.disk_usage(ancestor).free
    return 0


@contextlib.contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Convert an OSError raised inside to a `WriteError` that names the path."""
    try:
        yield
    except WriteError:
        raise
    except OSError as error:
        raise WriteError(describe_failure(path, error)) from error


def open_own(path: Path, flags: int) -> int:
    """Open or create a file to write to it; what a link names may be anybody's.

    Raises:
        OSError: it cannot be opened; ELOOP says that it is a symbolic link.
    """
    flags |= os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    try:
        return os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        reason = "it is a symbolic link, which is not followed; remove it"
        raise OSError(errno.ELOOP, reason, str(path)) from error


def truncate(path: Path, size: int) -> None:
    """Cut a file, unless its name is a symbolic link."""
    descriptor = open_own(path, os.O_WRONLY)
    try:
        os.ftruncate(descriptor, size)
    finally:
        os.close(descriptor)


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace the content of a file atomically, and sync it to the disk.

    A file that holds the content already is not written, so that a full disk does not
    matter.

    Raises:
        WriteError: the file still has its old content.
    """
    content = content.encode() if isinstance(content, str) else content
    with contextlib.suppress(OSError):
        if path.read_bytes() == content:
            return
    unfinished = path.with_name(path.name + ".unfinished")
    with write_errors(path):
        try:
            with open(open_own(unfinished, os.O_WRONLY | os.O_TRUNC), "wb") as file:
                file.write(content)
                file.flush()
                sync(file.fileno())
            os.replace(unfinished, path)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def unfinished(path: Path) -> Iterator[Path]:
    """A path to write, which becomes the given one; several processes may do so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(".unfinished", dir=path.parent) as directory:
        temporary = Path(directory) / path.name
        yield temporary
        os.replace(temporary, path)


def sync(descriptor: int) -> None:
    """Wait until a file is on the disk, where its file system supports that."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise


def sync_directory(directory: Path) -> None:
    """Wait until the entries of a directory are on the disk."""
    if os.name == "nt":  # directories cannot be opened
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


class Appender:
    """A file that grows by whole records; records that cannot be written are kept.

    The file is opened when the first record is written; mode "x" is for a new one.

    Attributes:
        pending: records that are not in the file yet.
        dropped: number of records that were discarded because too many were pending.
    """

    def __init__(self, path: Path, mode: str = "a"):
        self.path, self._mode = path, mode
        self.pending: collections.deque[bytes] = collections.deque()
        self.dropped = 0
        self._descriptor: int | None = None
        self._size = 0  # of the whole records
        self._torn = False  # part of a record may follow them

    @property
    def was_removed(self) -> bool:
        """True if its file has another name or none; the next flush reopens it."""
        if self._descriptor is None:
            return False
        try:
            status = os.lstat(self.path)
        except FileNotFoundError:
            return True
        return not os.path.samestat(status, os.fstat(self._descriptor))

    def add(self, record: bytes) -> None:
        """Add a record to the pending ones."""
        if len(self.pending) == _MAX_PENDING:
            self.pending.popleft()
            self.dropped += 1
        self.pending.append(record)

    def flush(self) -> None:
        """Write the pending records to the operating system.

        Raises:
            OSError: the file ends with a whole record; the others are still pending.
        """
        if self.pending and self.was_removed:
            self.close()
        while self.pending:
            if self._descriptor is None:
                self._open()
            try:
                self._write(self.pending[0])
            except OSError:
                with contextlib.suppress(OSError):  # the next attempt tries again
                    self._truncate()
                raise
            self.pending.popleft()

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | (os.O_EXCL if self._mode == "x" else 0)
        self._descriptor = open_own(self.path, flags)
        self._size, self._torn = os.fstat(self._descriptor).st_size, False

    def _write(self, record: bytes) -> None:
        assert self._descriptor is not None
        self._truncate()
        self._torn, unwritten = True, memoryview(record)
        while unwritten:
            unwritten = unwritten[os.write(self._descriptor, unwritten) :]
        self._size, self._torn = self._size + len(record), False

    def _truncate(self) -> None:
        """Remove part of a record that a failed write has left."""
        if not self._torn or self._descriptor is None:
            return
        if os.fstat(self._descriptor).st_size > self._size:
            os.ftruncate(self._descriptor, self._size)
        self._torn = False

    def sync(self) -> None:
        """Wait until the written records are on the disk."""
        if self._descriptor is not None:
            sync(self._descriptor)

    def close(self) -> None:
        """Close the file; pending records are not written."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
