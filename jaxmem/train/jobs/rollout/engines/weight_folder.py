"""The folder through which a trainer hands versions of its weights to engines."""

import re
import shutil
import urllib.parse
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxmem.base import files, locks, processes
from jaxmem.train.jobs.rollout.engines.patience import EngineError

_VERSION = re.compile(r"v(?P<number>\d{6,})")
_SHARED_MEMORY = Path("/dev/shm")
_LOCAL = "localhost", "127.0.0.1", "::1"


class WeightFolder:
    """Versions of a run's weights, each in a directory of its own, v000007.

    All processes make one and call its methods; the first of them touches files. A
    lock keeps other runs out, and what a killed run has left is removed.

    Args:
        root: the folder that trainer and engines share; the run's is below it. None:
            shared memory, where all engines are on this host.
        run: the run's name.
        urls: addresses of the engines, for `root=None`.
        say: called with one line if the file system has no locks.

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
        name = re.sub(r"[^\w.-]+", "-", run)
        if root is None:
            self.path = _default_root(urls) / f"jaxmem-{name}"
        else:
            self.path = root.absolute() / name
        self._lock = locks.Lock(self.path / "lock", f"rollouts.weights: {self.path}")
        message = processes.by_first(self._lock.acquire)
        if message:
            say(message)
        self._remove_below(None)

    def directory(self, version: int) -> Path:
        """The directory of a version, which is written once."""
        return self.path / f"v{version:06d}"

    def keep(self, version: int) -> None:
        """Remove all that is older than the version before this one.

        Engines that restart load the version before until they have this one. Called
        before this one is written, it leaves room for it: no third takes memory.
        """
        self._remove_below(version - 1)

    def clear(self) -> None:
        """Remove all versions and, if nothing else is in it, the folder."""
        self._remove_below(None)
        self._lock.release()

    def _remove_below(self, version: int | None) -> None:
        """Remove versions below a number; None: all."""

        def remove() -> None:
            for path in self.path.iterdir():
                match = _VERSION.fullmatch(path.name)
                if match and (version is None or int(match["number"]) < version):
                    with files.write_errors(path):
                        shutil.rmtree(path)

        processes.by_first(remove)


def _default_root(urls: Sequence[str]) -> Path:
    remedy = "set rollouts.weights to a folder that trainer and engines share"
    for url in urls:
        if urllib.parse.urlsplit(url).hostname not in _LOCAL:
            raise EngineError(f"rollouts.weights: {url} is not on this host; {remedy}")
    if not _SHARED_MEMORY.is_dir():
        raise EngineError(f"rollouts.weights: there is no {_SHARED_MEMORY}; {remedy}")
    return _SHARED_MEMORY
