"""Crash-safe checkpoints that refuse to continue another run."""

import contextlib
import functools
import logging
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxmem.base import checksums, files, messages, processes
from jaxmem.train.state import finite

FINITE = "finite"  # key in orbax's own metadata of a checkpoint
_STEP = re.compile("0|[1-9][0-9]{0,17}")  # name of a checkpoint
_LEFT = re.compile(r"[0-9]+\.(unfinished|deleted|orbax-checkpoint-tmp).*")


class RunCheckpointError(OSError):
    """A checkpoint cannot be written or read; the message says what to do."""


class Checkpoints:
    """The newest `keep` checkpoints of a run, each complete or absent.

    A checkpoint is written under a temporary name, and renamed once its numbers are
    known to be finite, it has every array and its checksums are on the disk. One more
    than `keep` is left until `prune` or the exit, when the newest has proved usable.
    """

    def __init__(self, directory: Path, keep: int):
        self.directory, self._keep = directory.absolute(), keep
        with files.write_errors(directory):
            processes.by_first(lambda: _prepare_directory(directory))
        self._orbax = ocp.Checkpointer(ocp.CompositeCheckpointHandler())

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is not FloatingPointError:
            self.prune()
        self._orbax.close()
        if processes.is_first():
            with contextlib.suppress(OSError):  # it is not empty
                self.directory.rmdir()

    def latest(self) -> int | None:
        """The newest step that can be resumed, None in a new run."""
        return processes.by_first(lambda: newest(self.directory))

    def check_storage(self) -> None:
        """Write a small checkpoint, open it and remove it; raise if that fails."""
        try:
            self._write_unfinished(0, {"probe": np.zeros((), np.float32)}, {}, {})
        except RunCheckpointError as error:
            signs = [sign for sign in "[]*?" if sign in str(self.directory)]
            because = f" (its path has {signs[0]!r})" if signs else ""
            raise RunCheckpointError(
                f"{error}; no checkpoint can be saved there{because}: free some space, "
                "or name another run.out_dir"
            ) from error
        finally:
            self._discard_unfinished(0)

    def save(self, step: int, state: Any, data_state: Mapping, config: Mapping) -> None:
        """Save a state, with the data's position and the config as JSON.

        Raises a FloatingPointError if a number of the state is not finite. After any
        error, earlier checkpoints are unchanged.
        """
        names = finite.not_finite(state)
        if names:
            raise FloatingPointError(
                f"after step {step} {checksums.first(names)} is not finite, so jaxmem "
                "does not save this step"
            )
        try:
            self._write_unfinished(step, state, data_state, config)
        except RunCheckpointError as error:
            size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
            raise RunCheckpointError(
                f"{error}; the checkpoint needs about {size:,}"
            ) from error
        processes.by_first(lambda: self._publish_step(step))

    def _write_unfinished(
        self, step: int, state: Any, data: Mapping, config: Mapping
    ) -> None:
        """Write a checkpoint under its temporary name, and open it again."""
        path = self._unfinished_path(step)
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state),
            data=ocp.args.JsonSave(dict(data)),
            config=ocp.args.JsonSave(dict(config)),
        )
        self._discard_unfinished(step)
        try:
            with silenced():
                mark = {FINITE: True}
                self._orbax.save(path, args=items, custom_metadata=mark)
                _check_arrays(path, state)
            checksums.write(path)
        except Exception as error:  # of orbax, tensorstore or their threads
            self._discard_unfinished(step)
            named = self.directory / str(step)
            raise RunCheckpointError(
                files.describe_failure(named, as_os_error(error))
            ) from error

    def _unfinished_path(self, step: int) -> Path:
        return self.directory / f"{step}.unfinished"

    def _discard_unfinished(self, step: int) -> None:
        """Free the space of a checkpoint that was not written completely."""
        processes.by_first(
            lambda: _remove_incomplete(self.directory, f"{step}.unfinished")
        )

    def _publish_step(self, step: int) -> None:
        path = self.directory / str(step)
        try:
            if os.path.lexists(path):  # of a run that was resumed before it
                path.rename(self.directory / f"{step}.deleted")
            self._unfinished_path(step).rename(path)
            files.sync_directory(self.directory)
        except OSError as error:
            raise RunCheckpointError(files.describe_failure(path, error)) from error
        _delete_old(self.directory, self._keep + 1)

    def prune(self) -> None:
        """Delete all but the newest `keep` checkpoints, which are known to be good."""
        processes.by_first(lambda: _delete_old(self.directory, self._keep))

    def reject(self, step: int) -> str:
        """Rename a checkpoint that allows no finite step; return its new name."""

        def rename() -> str:
            path = self.directory / str(step)
            moved = path.with_name(f"{step}.damaged")
            shutil.rmtree(moved, ignore_errors=True)  # of the last time
            return path.rename(moved).name

        return processes.by_first(rename)

    def saved_config(self, step: int) -> dict[str, dict[str, Any]]:
        """The `config` that was passed to `save`."""
        items = ocp.args.Composite(config=ocp.args.JsonRestore())
        with self._raising_read_errors(step):
            restored = self._orbax.restore(self.directory / str(step), args=items)
            return settings_of(restored["config"])

    def saved_shapes(self, step: int) -> Any:
        """Orbax's metadata of each array of the saved state, nested by name."""
        with self._raising_read_errors(step):
            return shapes(self.directory / str(step))

    def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """Load the state of the run and the state of its data iterator.

        `like` has the shapes of the saved state and the shardings to restore to,
        whatever devices it was on; without one, arrays are on the default device.
        """
        device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        targets = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=leaf.sharding or device
            ),
            like,
        )
        items = ocp.args.Composite(
            state=ocp.args.StandardRestore(targets), data=ocp.args.JsonRestore()
        )
        with self._raising_read_errors(step):
            _check_arrays(self.directory / str(step), like)
            restored = self._orbax.restore(self.directory / str(step), args=items)
        return restored["state"], restored["data"]

    @contextlib.contextmanager
    def _raising_read_errors(self, step: int) -> Iterator[None]:
        """Raise a RunCheckpointError that names the step for any error inside."""
        try:
            with silenced():
                yield
        except Exception as error:
            raise RunCheckpointError(
                f"checkpoint {self.directory / str(step)} cannot be read "
                f"({reason(error)}); move it to another directory to "
                "resume from an older one, or name another run.out_dir"
            ) from error


def newest(directory: Path) -> int | None:
    """The newest step in a directory of checkpoints that a run may be writing to."""
    return max(steps_in(directory), default=None)


def read_params(directory: Path, step: int, like: Any) -> Any:
    """Read the weights of a checkpoint alone, with shapes and types as `like` has them.

    Nothing in the directory is changed, so that the run may still be going on.
    """
    path = directory / str(step)
    fault = checksums.find_fault(path)
    if fault is not None:
        raise RunCheckpointError(
            f"checkpoint {path} cannot be used ({fault}); a resumed run sets it aside"
        )
    with silenced():
        saved, expected = _shapes_by_name(path), finite.by_name({"params": like})
    names = {*expected, *(name for name in saved if name.startswith("params/"))}
    shape = {name: leaf.shape for name, leaf in expected.items()}
    if differ := sorted(n for n in names if saved.get(n) != shape.get(n)):
        raise RunCheckpointError(
            f"checkpoint {path} and the model differ in {checksums.first(differ)}; "
            "name a run that trained all weights of the same model"
        )
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    restore_args = jax.tree.map(
        lambda leaf: ocp.ArrayRestoreArgs(sharding=device, dtype=leaf.dtype), like
    )
    restore = ocp.args.PyTreeRestore(
        {"params": like}, restore_args={"params": restore_args}, partial_restore=True
    )
    try:
        with silenced(), ocp.PyTreeCheckpointer() as checkpointer:
            saved = checkpointer.restore((path / "state").resolve(), args=restore)
    except Exception as error:
        raise RunCheckpointError(
            f"checkpoint {path} cannot be read ({reason(error)})"
        ) from error
    return saved["params"]


def _check_arrays(path: Path, state: Any) -> None:
    """Raise a ValueError unless a checkpoint has each array of the state."""
    saved = _shapes_by_name(path)
    missing = [n for n, x in finite.by_name(state).items() if saved.get(n) != x.shape]
    if missing:
        raise ValueError(f"{checksums.first(missing)} is not found in it")


def _shapes_by_name(path: Path) -> dict[str, tuple[int, ...]]:
    leaves = finite.by_name(shapes(path))
    return {name: tuple(x.shape) for name, x in leaves.items() if hasattr(x, "shape")}


def _prepare_directory(directory: Path) -> None:
    """Make the directory, and remove checkpoints that a killed process left half."""
    directory.mkdir(parents=True, exist_ok=True)
    _remove_incomplete(directory, "")


def _delete_old(directory: Path, keep: int) -> None:
    for step in steps_in(directory)[:-keep]:
        path = directory / str(step)
        with contextlib.suppress(OSError):  # the next process tries again
            path.rename(path.with_suffix(".deleted"))
    _remove_incomplete(directory, "")


def is_unfinished(path: Path) -> bool:
    """True if a path names a checkpoint that is being written or deleted."""
    return _LEFT.fullmatch(path.name) is not None


def _remove_incomplete(directory: Path, prefix: str) -> None:
    """Remove checkpoints that are not complete and whose names start with `prefix`."""
    for path in directory.iterdir() if directory.is_dir() else ():
        if is_unfinished(path) and path.name.startswith(prefix):
            shutil.rmtree(path, ignore_errors=True)
            with contextlib.suppress(OSError):  # a link, which `rmtree` refuses
                path.unlink()


def steps_in(directory: Path) -> list[int]:
    """Numbers of the checkpoints in a directory, which need not exist."""
    if not directory.is_dir():
        return []
    names = (path.name for path in directory.iterdir())
    return sorted(int(name) for name in names if _STEP.fullmatch(name))


def shapes(path: Path) -> Any:
    """Metadata of each array of a checkpoint, nested by name in dicts and lists."""
    with ocp.StandardCheckpointer() as checkpointer:
        metadata = checkpointer.metadata((path / "state").resolve())
    if metadata.item_metadata is None:
        raise ValueError("no array is found in it")
    return metadata.item_metadata.tree


def settings_of(config: Any) -> dict[str, dict[str, Any]]:
    """The saved settings by section.

    Raises:
        ValueError: `config` is no mapping of sections to mappings.
    """
    if isinstance(config, dict) and all(isinstance(x, dict) for x in config.values()):
        return config
    raise ValueError(
        f"config is not a config that a run saves: {messages.short(config)}"
    )


def reason(error: Exception) -> str:
    """An error of another library on one line."""
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {messages.cut(first, 200)}"


def as_os_error(error: Exception) -> Exception:
    """Return the operating system's error that a tensorstore error quotes."""
    match = re.search(r"os_error_code='(\d+)'", str(error))
    if match:
        return OSError(int(match[1]), os.strerror(int(match[1])))
    if isinstance(error, OSError):
        return error
    return ValueError(messages.cut(str(error).partition("\n")[0], 200))


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Within it, orbax does not log the errors that it raises as well."""
    _silence_late_tasks()
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)


@functools.cache
def _silence_late_tasks() -> None:
    """Silence the tasks of orbax that end after one of them has failed.

    asyncio logs them when they are garbage-collected; threads of tensorstore find that
    the event loop, to which they want to report, is closed.
    """
    logging.getLogger("asyncio").addFilter(lambda x: "orbax" not in x.getMessage())
    before = sys.unraisablehook

    def hook(raised: Any) -> None:
        known = "Event loop is closed"
        if raised.exc_type is not RuntimeError or str(raised.exc_value) != known:
            before(raised)

    sys.unraisablehook = hook
