"""Finds checkpoints that cannot be used, and sets them aside."""

import itertools
import json
import os
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxmem.base import checksums, processes
from jaxmem.train.state import checkpoint, finite
from jaxmem.train.state.checkpoint import RunCheckpointError


def set_aside_damaged(directory: Path, needed: bool = True) -> list[str]:
    """Rename unusable checkpoints newer than the newest good one; a message for each.

    A checkpoint is unusable if it is incomplete, if a file differs from its checksum,
    or if a number of its state is not finite. A checkpoint without checksums, or of a
    version that did not check that numbers are finite, is read whole.

    Raises:
        RunCheckpointError: there are checkpoints, none is good and one is `needed`;
            then none is renamed.
    """
    steps = processes.by_first(lambda: checkpoint.steps_in(directory))
    faults: dict[int, str] = {}
    good = None
    for step in reversed(steps):
        fault = _find_fault(directory / str(step))
        if fault is None:
            good = directory / str(step)
            break
        faults[step] = fault
    if needed and steps and good is None:
        listed = "; ".join(f"{step} ({fault})" for step, fault in faults.items())
        raise RunCheckpointError(
            f"{directory}: none of the checkpoints can be used: {listed}; restore one "
            "from a copy, or name another run.out_dir to start anew"
        )
    lines = processes.by_first(
        lambda: [_set_aside(directory / str(step), faults[step]) for step in faults]
    )
    if good is not None and not checksums.exist(good):
        lines.append(
            f"checkpoint {good} has no {checksums.NAME}: its arrays can be read and "
            "are finite, but other changes cannot be detected"
        )
    return lines


def _find_fault(path: Path) -> str | None:
    """The reason why a checkpoint is unusable; None for a good one."""
    fault = checksums.find_fault(path)
    if fault is not None or processes.by_first(lambda: _is_trusted(path)):
        return fault
    fault = _find_fault_in_content(path)
    return processes.by_first(lambda: fault)


def _is_trusted(path: Path) -> bool:
    """True if a checkpoint has checksums and was saved after a check of its numbers."""
    try:
        saved = json.loads((path / "_CHECKPOINT_METADATA").read_text("utf-8"))
        marked = bool(saved["custom_metadata"].get(checkpoint.FINITE))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False
    return marked and (path / checksums.NAME).exists()


def _find_fault_in_content(path: Path) -> str | None:
    """Read a whole checkpoint; the reason why it is unusable, None for a good one."""
    sections = ("data", "config")
    items = {name: ocp.args.JsonRestore() for name in sections}
    try:
        with (
            checkpoint.silenced(),
            ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as c,
        ):
            saved = c.restore(path.resolve(), args=ocp.args.Composite(**items))
            for name in sections:
                if not isinstance(saved[name], dict):
                    return f"{name} is not an object"
            checkpoint.settings_of(saved["config"])
        with checkpoint.silenced(), ocp.PyTreeCheckpointer() as c:
            arrays = jax.tree.map(
                lambda _: ocp.RestoreArgs(restore_type=np.ndarray),
                checkpoint.shapes(path),
            )
            restore = ocp.args.PyTreeRestore(restore_args=arrays)
            names = finite.not_finite(
                c.restore((path / "state").resolve(), args=restore)
            )
    except Exception as error:
        return checkpoint.reason(error)
    return f"{checksums.first(names)} is not finite" if names else None


def _set_aside(path: Path, fault: str) -> str:
    """Rename a checkpoint to the first free name; return a message."""
    names = (path.with_name(f"{path.name}.damaged{i or ''}") for i in itertools.count())
    free = (name for name in names if not os.path.lexists(name))
    moved = path.rename(next(free))
    return f"checkpoint {path} cannot be used ({fault}); it is renamed to {moved.name}"
