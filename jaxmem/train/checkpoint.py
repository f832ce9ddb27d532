"""Crash-safe checkpoints that refuse to continue another run."""

import contextlib
import itertools
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxmem.core import processes
from jaxmem.train import checksums, files


class CheckpointError(OSError):
    """A checkpoint cannot be written or read; the message says what to do."""


class Checkpoints:
    """The newest `keep` checkpoints of a run, each complete or absent.

    Orbax writes a checkpoint under a temporary name and renames it when it is complete,
    so an incomplete one is never mistaken for a checkpoint.  Saving is synchronous:
    when `save` returns, the step can be resumed.  Later damage is found by checksums;
    see `set_aside_damaged`.

    Args:
        directory: of the checkpoints; created if missing, removed on exit if empty.
        keep: number of newest checkpoints to keep.
    """

    def __init__(self, directory: Path, keep: int):
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            enable_async_checkpointing=False,
            cleanup_tmp_directories=True,
        )
        self.directory = directory
        with files.write_errors(directory):
            self._manager = ocp.CheckpointManager(directory.resolve(), options=options)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()
        if processes.is_first():
            with contextlib.suppress(OSError):  # it is not empty
                self.directory.rmdir()

    def latest(self) -> int | None:
        """The newest step that can be resumed, None in a new run."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any, data_state: Mapping, config: Mapping) -> None:
        """Save everything that the next step depends on.

        Args:
            step: number of finished steps.
            state: pytree of arrays: parameters, optimizer, rng.
            data_state: what the data iterator's `get_state` returned; JSON.
            config: settings of the run, by section and field; JSON.

        Raises:
            CheckpointError: it cannot be written; earlier checkpoints are unchanged.
        """
        latest = self.latest()
        path = self.directory / str(step)
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state),
            data=ocp.args.JsonSave(dict(data_state)),
            config=ocp.args.JsonSave(dict(config)),
        )
        try:
            with _orbax_logs_silenced():
                self._manager.save(step, args=items)
            checksums.write(path)
        except (OSError, ValueError, RuntimeError) as error:
            self._remove_partial(step)
            size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
            raise CheckpointError(
                f"{files.describe_failure(path, _as_os_error(error))}; the checkpoint "
                f"needs about {size:,}; {_resume_hint(latest)}"
            ) from error

    def _remove_partial(self, step: int) -> None:
        """Free the space of a checkpoint that could not be written completely."""
        # asyncio logs other failed tasks of orbax when they are garbage-collected.
        logging.getLogger("asyncio").addFilter(_is_not_from_orbax)
        if processes.is_first():
            for path in self.directory.glob(f"{step}.orbax-checkpoint-tmp*"):
                shutil.rmtree(path, ignore_errors=True)

    def saved_config(self, step: int) -> dict[str, dict[str, Any]]:
        """The `config` that was passed to `save`."""
        items = ocp.args.Composite(config=ocp.args.JsonRestore())
        with self._naming(step):
            return self._manager.restore(step, args=items)["config"]

    def saved_shapes(self, step: int) -> Any:
        """Orbax's metadata of each array of the saved `state`, which have its shape.

        They are nested by name in dicts and lists.
        """
        path = self._manager.directory / str(step) / "state"
        with self._naming(step), ocp.StandardCheckpointer() as checkpointer:
            metadata = checkpointer.metadata(path)
        return metadata.item_metadata.tree

    def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """Load a checkpoint.

        Args:
            step: a step that was saved.
            like: pytree of `jax.ShapeDtypeStruct`: the shapes of the saved state, and
                the shardings to restore to, whatever devices it was on.

        Returns:
            The state, on the default device where `like` has no sharding, and the data
            iterator's state.

        Raises:
            CheckpointError: it cannot be read.
        """
        device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        placed = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=leaf.sharding or device
            ),
            like,
        )
        items = ocp.args.Composite(
            state=ocp.args.StandardRestore(placed), data=ocp.args.JsonRestore()
        )
        with self._naming(step):
            restored = self._manager.restore(step, args=items)
        return restored["state"], restored["data"]

    @contextlib.contextmanager
    def _naming(self, step: int) -> Iterator[None]:
        """Convert errors raised inside to a CheckpointError that names the step."""
        try:
            with _orbax_logs_silenced():
                yield
        except (OSError, ValueError, LookupError, TypeError) as error:
            reason = str(error).partition("\n")[0][:200]
            raise CheckpointError(
                f"checkpoint {self.directory / str(step)} cannot be read "
                f"({type(error).__name__}: {reason}); move it to another directory to "
                "resume from an older one, or name another run.out_dir"
            ) from error


def newest(directory: Path) -> int | None:
    """The newest step in a directory of checkpoints that a run may be writing to."""
    return max(_steps(directory), default=None)


def read_params(directory: Path, step: int, like: Any) -> Any:
    """Read the weights of a checkpoint, without the optimizer's state.

    Nothing in the directory is changed, so that the run may still be going on.

    Args:
        directory: of the checkpoints.
        step: a step that was saved.
        like: pytree of `jax.ShapeDtypeStruct`, as in `Checkpoints.restore`.

    Raises:
        CheckpointError: it cannot be read, or holds other weights.
    """
    path = directory / str(step)
    fault = checksums.find_fault(path)
    if fault is not None:
        raise CheckpointError(f"checkpoint {path} cannot be read ({fault})")
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    places = jax.tree.map(lambda _: ocp.ArrayRestoreArgs(sharding=device), like)
    restore = ocp.args.PyTreeRestore(
        {"params": like}, restore_args={"params": places}, partial_restore=True
    )
    try:
        with _orbax_logs_silenced(), ocp.PyTreeCheckpointer() as checkpointer:
            saved = checkpointer.restore((path / "state").resolve(), args=restore)
    except (OSError, ValueError, LookupError, TypeError) as error:
        reason = str(error).partition("\n")[0][:200]
        raise CheckpointError(
            f"checkpoint {path} cannot be read ({type(error).__name__}: {reason})"
        ) from error
    return saved["params"]


def set_aside_damaged(directory: Path) -> list[str]:
    """Rename damaged checkpoints that are newer than the newest good one.

    Args:
        directory: of the checkpoints; it need not exist.

    Returns:
        A message about each, and one if the newest good one has no checksums.

    Raises:
        CheckpointError: all are damaged; none was renamed.
    """
    steps = processes.by_first(lambda: _steps(directory))
    faults: dict[int, str] = {}
    for step in reversed(steps):
        fault = checksums.find_fault(directory / str(step))
        if fault is None:
            break
        faults[step] = fault
    if steps and len(faults) == len(steps):
        listed = "; ".join(f"{step} ({fault})" for step, fault in faults.items())
        raise CheckpointError(
            f"{directory}: none of the checkpoints can be read: {listed}; restore one "
            "from a copy, or name another run.out_dir to start anew"
        )
    messages = processes.by_first(
        lambda: [_set_aside(directory / str(step), faults[step]) for step in faults]
    )
    good = directory / str(max(set(steps) - faults.keys(), default=0))
    if steps and not checksums.exist(good):
        messages.append(f"checkpoint {good} has no checksums and is not verified")
    return messages


def _steps(directory: Path) -> list[int]:
    if not directory.is_dir():
        return []
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdigit())


def _set_aside(path: Path, fault: str) -> str:
    """Rename to the first free name; return a message."""
    names = (path.with_name(f"{path.name}.damaged{i or ''}") for i in itertools.count())
    moved = path.rename(next(name for name in names if not name.exists()))
    return f"checkpoint {path} cannot be read ({fault}); it is renamed to {moved.name}"


def _resume_hint(latest: int | None) -> str:
    if latest is None:
        return "no checkpoint has been saved yet"
    return f"free some space; the same command resumes the run after step {latest}"


def _as_os_error(error: Exception) -> Exception:
    """Return the operating system's error that a tensorstore error quotes."""
    match = re.search(r"os_error_code='(\d+)'", str(error))
    if match:
        return OSError(int(match[1]), os.strerror(int(match[1])))
    if isinstance(error, OSError):
        return error
    return ValueError(str(error).partition("\n")[0][:200])


def _is_not_from_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in record.getMessage()


@contextlib.contextmanager
def _orbax_logs_silenced() -> Iterator[None]:
    """Silence tracebacks of errors that orbax both logs and raises."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)


def check_same_config(
    saved: Mapping[str, Mapping], current: Mapping[str, Mapping], directory: Path
) -> None:
    """Raise if the model or data of a run to resume has changed.

    Args:
        saved: section to field to value, as `Checkpoints.saved_config` returns it.
        current: the same of the run that is to be resumed.
        directory: the run's directory, for the message.

    Raises:
        ValueError: some fields differ; the message names each, with both values.
    """
    differing = differences(saved, current)
    if differing:
        raise ValueError(
            f"run.out_dir={str(directory)!r} holds checkpoints of another run: "
            f"{'; '.join(differing)}. Give the old values back to resume it, or name "
            "another run.out_dir to start anew."
        )


def differences(
    saved: Mapping[str, Mapping], current: Mapping[str, Mapping], common: bool = False
) -> list[str]:
    """Return a message for each field that differs, with both values.

    Args:
        saved: section to field to value.
        current: section to field to value.
        common: whether to ignore fields that only one of them has.

    Returns:
        The messages.
    """
    was, now = _flat(saved), _flat(current)
    keys = was.keys() & now.keys() if common else was.keys() | now.keys()
    return [
        f"{key} was {was.get(key, 'absent')}, is {now.get(key, 'absent')}"
        for key in sorted(keys)
        if was.get(key) != now.get(key)
    ]


def _flat(config: Mapping[str, Mapping]) -> dict[str, str]:
    """Section.field to JSON text, which a JSON round trip does not change."""
    return {
        f"{section}.{field}": json.dumps(value)
        for section, fields in config.items()
        for field, value in fields.items()
    }
