"""Facts of a run for its report: devices, sizes, data, versions and command."""

import contextlib
import os
import shlex
import subprocess
import sys
from typing import Any

import jax

from jaxmem._version import __version__
from jaxmem.models.partitioning import AXES
from jaxmem.train import precision
from jaxmem.train.jobs.job import Job

_GIT_SECONDS = 5.0  # a file system that hangs delays a run no longer


def facts(job: Job) -> dict[str, Any]:
    """The content of about.json; a fact that is not known is None."""
    devices, program = jax.devices(), job.program
    trained = precision.count_weights(program.state_shapes.params)
    frozen = precision.count_weights(program.frozen_shapes)
    mesh = {name: getattr(job.mesh, name) for name in AXES}
    size = job.reads.size
    return {
        "jaxmem": __version__,
        "jax": jax.__version__,
        "devices": f"{len(devices)} x {devices[0].device_kind}",
        "processes": jax.process_count(),
        "mesh": {name: count for name, count in mesh.items() if count > 1},
        "parameters": trained + frozen,
        "trained": trained,
        "data": None if size is None else size._asdict(),
        "command": command(),
        "commit": commit(),
    }


def command() -> str | None:
    """The command that started the process; None in an interactive session."""
    program, *arguments = sys.argv
    if program in ("", "-c") or "ipykernel" in program:
        return None
    is_own = os.path.basename(program) in ("jaxmem", "__main__.py")
    return shlex.join([*(["jaxmem"] if is_own else ["python", program]), *arguments])


def commit() -> str | None:
    """The git commit of the current directory; None outside of a repository."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        head = _git("rev-parse", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no")
        return head + (" with uncommitted changes" if changed else "")
    return None


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", "--no-optional-locks", *arguments],
        capture_output=True, check=True, text=True, timeout=_GIT_SECONDS,
    )  # fmt: skip
    return done.stdout.strip()
