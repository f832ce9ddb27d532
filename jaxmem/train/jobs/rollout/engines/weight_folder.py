"""The folder through which a trainer hands versions of its weights to engines."""

import contextlib
import ipaddress
import math
import os
import re
import shutil
import urllib.parse
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxmem.base import files, locks, processes
from jaxmem.train.jobs.rollout.engines.patience import EngineError

# A version, or one that was being written when its run was killed.
_VERSION = re.compile(r"(?P<dot>\.)?v(?P<number>\d{6,})(?(dot)-.+)")
_LOCK = "lock"
_SHARED_MEMORY = Path("/dev/shm")
_REMEDY = "set rollouts.weights to a folder that trainer and engines share"
_GIB = 2**30


class WeightFolder:
    """Versions of a run's weights, each in a directory of its own, v000007.

    All processes of a run make one; the first of them touches files. Methods do not
    communicate. A lock keeps other runs out, and what a killed run has left is removed.

    Args:
        root: the folder that trainer and engines share; the run's is below it. None:
            the user's folder in shared memory, where all engines are on this host.
        run: the run's name.
        urls: addresses of the engines, for `root=None`.
        say: called with one line if the file system has no locks, and for each other
            killed run whose weights are removed from shared memory.

    Raises:
        EngineError: there is no default for root.
        locks.Busy: another run has the folder.
        OSError: it cannot be made.
    """

    def __init__(
        self,
        root: Path | None,
        run: str,
        urls: Sequence[str] = (),
        say: Callable[[str], None] = print,
    ):
        is_default = root is None
        if root is None:
            root = own = _default_root(urls)
            processes.by_first(lambda: _check_owner(own), EngineError)
        name = re.sub(r"[^\w.-]+", "-", run).lstrip(".") or "run"
        self.path = root.absolute() / name
        self._lock = _lock(self.path)
        self._say = say
        processes.by_first(self._open)
        if is_default:
            processes.by_first(self._remove_other_runs)

    def _open(self) -> None:
        message = self._lock.acquire()
        if message:
            self._say(message)
        _remove_versions(self.path, math.inf)

    def directory(self, version: int) -> Path:
        """The directory of a version, which is written once."""
        return self.path / f"v{version:06d}"

    def keep(self, version: int, size: int = 0, before: int = 1) -> None:
        """Make room for a version: remove all but some versions before it.

        Engines that restart load the version before until they have this one.

        Args:
            version: the next one.
            size: its bytes, which must be free.
            before: how many versions before it stay.

        Raises:
            EngineError: fewer bytes are free.
        """
        if processes.is_first():
            _remove_versions(self.path, version - before)
            self._check_free(version, size)

    def clear(self) -> None:
        """Remove all versions and, if nothing else is in it, the folder."""
        try:
            if processes.is_first():
                _remove_versions(self.path, math.inf)
        except OSError as error:  # it must not hide the error that ends a run
            self._say(f"rollouts.weights: {error}")
        self._lock.release()
        if processes.is_first():  # the lock leaves what a killed run has created
            with contextlib.suppress(OSError):  # it is gone, or something is in it
                self.path.rmdir()

    def _check_free(self, version: int, size: int) -> None:
        free = files.free_bytes(self.path)
        if size <= free:
            return
        remedy = "set rollouts.weights to a folder with more"
        if self.path.is_relative_to(_SHARED_MEMORY):
            remedy = (
                "free memory, raise the limit of /dev/shm (docker: --shm-size), or "
                f"{remedy}"
            )
        raise EngineError(
            f"rollouts.weights: version {version} needs {size / _GIB:.2f} GiB in "
            f"{self.path}, and {free / _GIB:.2f} GiB are free; {remedy}"
        )

    def _remove_other_runs(self) -> None:
        """Remove what other runs of the user have left that were killed.

        Shared memory keeps it until the host restarts.
        """
        for path in sorted(self.path.parent.iterdir()):
            if path.is_symlink() or not _has_versions(path):
                continue
            lock = _lock(path)
            with contextlib.suppress(locks.Busy, OSError):
                if lock.acquire():  # without locks, the run may go on
                    continue
                try:
                    _remove_versions(path, math.inf)
                finally:
                    lock.release()
                self._say(f"rollouts.weights: removed {path} of a killed run")
                path.rmdir()


def _lock(path: Path) -> locks.Lock:
    return locks.Lock(path / _LOCK, f"rollouts.weights: {path}")


def _has_versions(path: Path) -> bool:
    return path.is_dir() and any(_VERSION.fullmatch(p.name) for p in path.iterdir())


def _remove_versions(folder: Path, below: float) -> None:
    """Remove versions below a number, and unfinished ones."""
    for path in [*folder.iterdir()] if folder.is_dir() else []:
        match = _VERSION.fullmatch(path.name)
        if match is None or (not match["dot"] and int(match["number"]) >= below):
            continue
        with files.write_errors(path):
            if path.is_symlink() or not path.is_dir():
                path.unlink()  # and not what a link names
            else:
                shutil.rmtree(path)


def _default_root(urls: Sequence[str]) -> Path:
    for url in urls:
        if not _is_local(urllib.parse.urlsplit(url).hostname or ""):
            raise EngineError(f"rollouts.weights: {url} is not on this host; {_REMEDY}")
    if not _SHARED_MEMORY.is_dir():
        raise EngineError(f"rollouts.weights: there is no {_SHARED_MEMORY}; {_REMEDY}")
    return _SHARED_MEMORY / f"jaxmem-{os.getuid()}"


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_owner(root: Path) -> None:
    """Refuse a folder in shared memory that another user has made."""
    if os.path.lexists(root):
        status = root.lstat()
        if root.is_symlink() or not root.is_dir() or status.st_uid != os.getuid():
            raise EngineError(
                f"rollouts.weights: {root} is not a directory of this user; {_REMEDY}"
            )
