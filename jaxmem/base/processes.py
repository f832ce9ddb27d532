"""Runs of several processes: initialisation, and values shared between processes.

Every process runs the same program on its own devices. If one process dies, the others
end with an error: at once where they have met at --coordinator, and otherwise when a
collective on the dead process fails, at the latest a few seconds after the heartbeat
timeout. The same command then resumes from the last checkpoint.
"""

import atexit
import contextlib
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmem.base import meeting

HEARTBEAT_SECONDS = 30
_FLAGS = "--coordinator", "--processes", "--process-id"
_SHOWN = 3  # differences in a message
_met: list[meeting.Meeting] = []  # with the other processes, if they have met

_Value = TypeVar("_Value")


def start(
    coordinator: str | None,
    processes: int | None,
    process_id: int | None,
    heartbeat: int = HEARTBEAT_SECONDS,
) -> None:
    """Join the other processes of this run; call it before jax lists its devices.

    Args:
        coordinator: host and port of process 0, as in "10.0.0.1:1234".
        processes: the number of processes.
        process_id: the index of this process, from 0. If all three are None, jax reads
            them from the cluster's environment: SLURM, Open MPI, Kubernetes.
        heartbeat: seconds without a heartbeat after which a process counts as dead.

    Raises:
        ValueError: only some of the three are given, a value is impossible, or jax
            finds no cluster environment.
    """
    arguments = coordinator, processes, process_id
    missing = [flag for flag, x in zip(_FLAGS, arguments, strict=True) if x is None]
    if 0 < len(missing) < 3:
        raise ValueError(
            f"{', '.join(missing)} must be given too: pass all three: coordinator "
            "address, number of processes, process id"
        )
    if heartbeat < 1:
        raise ValueError(f"--heartbeat must be at least 1 second, got {heartbeat}")
    if coordinator is not None and processes is not None and process_id is not None:
        _check_flags(coordinator, processes, process_id)
        if processes > 1:
            _met.append(meeting.meet(coordinator, processes, process_id))
    try:
        jax.distributed.initialize(
            coordinator_address=coordinator,
            num_processes=processes,
            process_id=process_id,
            heartbeat_timeout_seconds=heartbeat,
        )
    except ValueError as error:
        if len(missing) < 3:
            raise
        raise ValueError(
            f"--cluster found no cluster that jax knows ({error}); give --coordinator, "
            "--processes and --process-id instead"
        ) from error


def _check_flags(coordinator: str, processes: int, process_id: int) -> None:
    """Raise a ValueError that names the flag of an impossible value."""
    host, _, port = coordinator.rpartition(":")
    if not (host and port.isdecimal() and int(port) < 2**16):
        raise ValueError(
            f"--coordinator must be HOST:PORT, as in 10.0.0.1:1234, got {coordinator!r}"
        )
    if processes < 1:
        raise ValueError(f"--processes must be at least 1, got {processes}")
    if not 0 <= process_id < processes:
        raise ValueError(
            f"--process-id must be from 0 to --processes - 1 = {processes - 1}, got "
            f"{process_id}"
        )


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Within it, what ends this process ends all: the others say which one has ended.

    Processes that stop after a signal or at the end of their work leave each for
    itself. One that has failed does not wait for the others in jax's
    shutdown barrier.
    """
    try:
        yield
    except Exception as error:
        if not _met:
            raise
        if not isinstance(error, (ValueError, OSError)):
            time.sleep(1)  # in which another's end, if it is the cause, ends this one
        _met[-1].fail()
        atexit.register(_exit_without_barrier)
        raise
    finally:
        for met in _met:
            met.leave()
        _met.clear()


def _exit_without_barrier() -> None:
    """Exit with the status of a reported error, without jax's shutdown barrier."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if getattr(sys, "last_value", None) is not None else 2)


def is_first() -> bool:
    """True if this process is the one that writes files and prints."""
    return jax.process_index() == 0


def by_first(
    action: Callable[[], _Value], error: type[ValueError] = ValueError
) -> _Value:
    """Run a function in the first process and return its result, which is JSON-able.

    Args:
        action: the function; it must not communicate with other processes.
        error: a type whose exceptions keep it in every process.

    Raises:
        ValueError: the function raised an OSError or ValueError, or its result is no
            JSON; the first process reraises the original exception, the others raise
            `error` for one of its instances and a ValueError otherwise, with the same
            message.
    """
    if jax.process_count() == 1:
        return action()
    outcome: dict[str, Any] = {}
    raised = None
    if is_first():
        try:
            outcome["result"] = action()
            json.dumps(outcome)
        except (OSError, ValueError) as e:
            outcome, raised = {"error": str(e), "keeps": isinstance(e, error)}, e
        except TypeError as e:
            if "result" not in outcome:
                raise
            raised = ValueError(f"several processes share values as JSON: {e}")
            outcome = {"error": str(raised), "keeps": False}
    outcome = share(outcome)
    if raised is not None:
        raise raised
    if "error" in outcome:
        raise (error if outcome["keeps"] else ValueError)(outcome["error"])
    return outcome["result"]


def largest(number: int) -> int:
    """Return the maximum over all processes, each of which must call this."""
    if jax.process_count() == 1:
        return number
    return int(_gather_arrays(np.array([number], np.int32)).max())


def agree(facts: Mapping[str, str]) -> None:
    """Raise in every process if a fact is not the same in all of them.

    Raises:
        ValueError: with the names and values that differ.
    """
    if jax.process_count() == 1:
        return
    mappings = _gather_mappings(dict(facts))
    names = dict.fromkeys(name for facts in mappings for name in facts)
    different = []
    for name in names:
        values = [facts.get(name, "absent") for facts in mappings]
        i = next((i for i, value in enumerate(values) if value != values[0]), None)
        if i is not None:
            different.append(
                f"{name} is {values[0]} in process 0, {values[i]} in process {i}"
            )
    if different:
        more = len(different) - _SHOWN
        named = "; ".join(different[:_SHOWN]) + (f"; {more} more" if more > 0 else "")
        raise ValueError(
            f"the processes of a run must have the same settings, versions and files: "
            f"{named}"
        )


def share(mapping: dict[str, Any]) -> dict[str, Any]:
    """Return the merged entries of all processes' mappings, which are JSON-able."""
    if jax.process_count() == 1:
        return mapping
    merged: dict[str, Any] = {}
    for part in _gather_mappings(mapping):
        merged |= part
    return merged


def _gather_mappings(mapping: dict[str, Any]) -> list[dict[str, Any]]:
    """The mappings of all processes, by their index."""
    text = np.frombuffer(json.dumps(mapping).encode(), np.uint8)
    sizes = _gather_arrays(np.array([len(text)], np.int32))[:, 0]
    padded = np.zeros(max(sizes), np.uint8)
    padded[: len(text)] = text
    rows = zip(sizes, _gather_arrays(padded), strict=True)
    return [json.loads(row[:size].tobytes()) for size, row in rows]


def _gather_arrays(own: np.ndarray) -> np.ndarray:
    """All-gather an array that has one shape in all processes: [processes, ...]."""
    parts, replicate = _make_gather()
    if jax.default_backend() == "cpu":
        # XLA's CPU runtime runs this beside programs that are in flight, and mixes up
        # the messages of both: gloo has one connection for a pair of devices.
        jax.block_until_ready(jax.live_arrays())
    rows = jax.make_array_from_process_local_data(parts, own[None])
    return np.asarray(replicate(rows))


@functools.cache
def _make_gather() -> tuple[NamedSharding, Callable[[jax.Array], jax.Array]]:
    """Return the sharding of one row per process, and a jitted all-gather of the rows.

    Cached, since `largest` is called once per step.
    """
    first = {device.process_index: device for device in reversed(jax.devices())}
    mesh = Mesh(np.array([first[i] for i in range(jax.process_count())]), "process")
    whole = NamedSharding(mesh, PartitionSpec())
    return (
        NamedSharding(mesh, PartitionSpec("process")),
        jax.jit(lambda rows: rows, out_shardings=whole),
    )
