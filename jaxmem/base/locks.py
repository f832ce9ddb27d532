"""An advisory lock on a run or an output file, which the kernel releases on exit."""

import contextlib
import datetime
import errno
import json
import os
import socket
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxmem.base import files, messages, processes

try:
    import fcntl
except ModuleNotFoundError:  # not a POSIX system
    fcntl = None

_HELD = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
_SHOWN = 240  # characters of a directory in a message
_LONGEST = 4096  # bytes of a lock file


class Busy(ValueError):
    """Another process holds the lock."""


class _Unsupported(Exception):
    """The file system has no locks."""


@contextlib.contextmanager
def exclusive(
    path: Path, resource: str, log: Callable[[str], None]
) -> Iterator["Lock"]:
    """Hold a lock that no other process can hold at the same time.

    In a distributed run the first process holds the lock for all of them. The lock
    belongs to the process, not to the file: the kernel releases it when the process
    ends in any way, so that a file left by a killed process blocks nobody. Children
    that are forked do not hold it.

    Args:
        path: of the lock file, which holds the holder's host, pid and start time.
        resource: what is locked, for messages, as in "run.out_dir='runs/sft'".
        log: called with one line where the file system has no locks; the run goes on.

    Raises:
        Busy: another process holds the lock; the message says which, since when.
        OSError: the lock file or its directory cannot be created.
    """
    lock = Lock(path, resource)
    try:
        message = processes.by_first(lock.acquire)
        if message:
            log(message)
        yield lock
    finally:
        lock.release()


class Lock:
    """The lock of one process."""

    def __init__(self, path: Path, resource: str):
        self._path, self._resource = path, resource
        self._descriptor: int | None = None
        self._created: list[Path] = []  # directories, innermost first
        _LOCKS.add(self)

    def acquire(self) -> str:
        """Take the lock; returns a message, "" if there is none."""
        directory, resource = self._path.parent, self._resource
        try:
            directories = directory, *directory.parents
            self._created += [path for path in directories if not path.exists()]
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            named = messages.cut(str(directory), _SHOWN)
            raise files.WriteError(
                f"{resource}: the directory {named} cannot be created: {error.strerror}"
            ) from error
        try:
            self._descriptor = _open_locked(self._path)
        except _Unsupported as error:
            self._path.unlink(missing_ok=True)
            return (
                f"{directory}: the file system has no locks ({error}); do not start a "
                f"second process with {resource}"
            )
        except BlockingIOError as error:
            holder = _describe_holder(self._path)
            raise Busy(
                f"{resource} is in use by another process ({holder}); wait until it "
                "ends, end it, or name another"
            ) from error
        if not _is_lock(self._descriptor):
            self.forget()
            raise files.WriteError(
                f"{self._path} was not written as the lock of {resource}; move it, or "
                "name another"
            )
        _write_holder(self._descriptor)
        return ""

    def renew(self) -> str:
        """Take the lock again if its file was removed; returns a message, or "".

        Raises:
            Busy: another process has taken it.
        """
        held = self._descriptor
        if held is None or _is_at(self._path, held):
            return ""
        self.acquire()
        os.close(held)
        return (
            f"{self._resource}: {self._path} was removed, possibly with the rest of "
            "its directory; jaxmem creates it again"
        )

    def forget(self) -> None:
        """Close the file without a word; the lock is that of another process."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor, self._created = None, []

    def release(self) -> None:
        """Remove the lock file, and directories created for it that are still empty."""
        if self._descriptor is not None:
            try:
                if _is_at(self._path, self._descriptor):  # and not another's
                    with contextlib.suppress(OSError):
                        self._path.unlink()
            finally:
                os.close(self._descriptor)
                self._descriptor = None
        for directory in self._created:
            with contextlib.suppress(OSError):
                directory.rmdir()


_LOCKS: weakref.WeakSet[Lock] = weakref.WeakSet()

if hasattr(os, "register_at_fork"):
    # A descriptor keeps what `flock` has locked, in whichever process it is open.
    os.register_at_fork(after_in_child=lambda: [lock.forget() for lock in [*_LOCKS]])


def _open_locked(path: Path) -> int:
    """Return a locked descriptor of the file that the path names now."""
    while True:
        with files.write_errors(path):
            descriptor = files.open_own(path, os.O_RDWR)
        try:
            _lock_file(descriptor)
            # The last holder may have removed the file between open and flock.
            if _is_at(path, descriptor):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _lock_file(descriptor: int) -> None:
    if fcntl is None:
        raise _Unsupported("this system has no fcntl")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD:
            raise BlockingIOError from error
        raise _Unsupported(error.strerror) from error


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _is_lock(descriptor: int) -> bool:
    """True if a file is empty or zeros, or says who holds or has held a lock."""
    content = os.pread(descriptor, _LONGEST, 0).strip(b"\0")
    try:
        return not content or {"host", "pid"} <= set(json.loads(content))
    except (ValueError, TypeError, RecursionError):
        return False


def _write_holder(descriptor: int) -> None:
    since = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
    holder = {"host": socket.gethostname(), "pid": os.getpid(), "since": since}
    with contextlib.suppress(OSError):  # on a full disk the lock is held as well
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(holder).encode(), 0)


def _describe_holder(path: Path) -> str:
    try:
        holder = json.loads(path.read_text("utf-8"))
        return f"host {holder['host']}, pid {holder['pid']}, since {holder['since']}"
    except (OSError, ValueError, LookupError, TypeError):
        return "unknown"
