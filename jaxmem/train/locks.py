"""One process at a time: an advisory lock that the kernel releases with its holder."""

import contextlib
import datetime
import errno
import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxmem.train import files, processes

try:
    import fcntl
except ModuleNotFoundError:  # not a POSIX system
    fcntl = None

_HELD = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)


class Busy(ValueError):
    """Another process holds the lock."""


class _NoLocks(Exception):
    """The file system has none."""


@contextlib.contextmanager
def held(path: Path, what: str, say: Callable[[str], None]) -> Iterator[None]:
    """Keep other processes out, where the file system has locks.

    Of several processes of one run, the first holds the lock for all of them.

    Args:
      path: of the lock's file, which is there while the lock is held, and after a kill:
        what counts is the kernel's lock, which ends with the process.
      what: is locked, for messages; "run.out_dir='runs/sft'".
      say: takes a line where there are no locks.

    Raises:
      ValueError: another process holds it; the message says which, and since when.
      OSError: the file cannot be made.
    """
    lock = _Lock(path)
    try:
        message = processes.by_first(lambda: lock.acquire(what))
        if message:
            say(message)
        yield
    finally:
        lock.release()


class _Lock:
    """The lock of one process; released, it leaves nothing behind."""

    def __init__(self, path: Path):
        self._path = path
        self._descriptor: int | None = None
        self._made: list[Path] = []  # directories, the innermost first

    def acquire(self, what: str) -> str:
        """Take the lock; returns what there is to say."""
        directory = self._path.parent
        self._made = [d for d in (directory, *directory.parents) if not d.exists()]
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._descriptor = _locked(self._path)
        except _NoLocks as error:
            self._path.unlink(missing_ok=True)
            return (
                f"{directory}: its file system has no locks ({error}); nothing keeps "
                f"another process out of {what}"
            )
        except BlockingIOError as error:
            raise Busy(
                f"{what} is in use by another process ({_holder(self._path)}); wait "
                "until it ends, end it, or name another"
            ) from error
        _write_holder(self._descriptor)
        return ""

    def release(self) -> None:
        """Remove the file and what was made for it, if it is still empty."""
        if self._descriptor is not None:
            try:
                with contextlib.suppress(OSError):
                    self._path.unlink()
            finally:
                os.close(self._descriptor)
                self._descriptor = None
        for directory in self._made:
            with contextlib.suppress(OSError):
                directory.rmdir()


def _locked(path: Path) -> int:
    """Descriptor of the file of that name, locked."""
    while True:
        with files.naming(path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _lock(descriptor)
            # Whoever held it before has removed the file: the lock is of no name.
            if _is_at(path, descriptor):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    if fcntl is None:
        raise _NoLocks("this system has no fcntl")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD:
            raise BlockingIOError from error
        raise _NoLocks(error.strerror) from error


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _write_holder(descriptor: int) -> None:
    since = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
    holder = {"host": socket.gethostname(), "pid": os.getpid(), "since": since}
    with contextlib.suppress(OSError):  # a full disk; the lock is held all the same
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(holder).encode(), 0)


def _holder(path: Path) -> str:
    try:
        holder = json.loads(path.read_text("utf-8"))
        return f"host {holder['host']}, pid {holder['pid']}, since {holder['since']}"
    except (OSError, ValueError, LookupError, TypeError):
        return "it has not said which"
