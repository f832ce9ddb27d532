"""One program of a job, and what else is in device memory while it runs."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Phase:
    """One program, traced for the devices of a plan.

    Attributes:
        name: name of the program, such as "update".
        traced: the program, traced with shapes inside `jaxmem.devices.target`.
        arguments: shapes of its arguments by name, such as "moments"; other arguments
            count as "inputs".
        held: shapes of what else is on the device while it runs.
        parts: known parts of its temporaries by name, in bytes per device.
        tokens: tokens that one run reads or generates, on all devices.
        runs: runs in one step of the job.
        turns: maximum iterations of a loop whose length is not static.
        head: traces the head alone; None if the program has none.
    """

    name: str
    traced: jax.stages.Traced
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    held: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    parts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    tokens: int = 0
    runs: float = 1
    turns: int = 1
    head: Callable[[], jax.stages.Traced] | None = None


def device_bytes(tree: Any) -> int:
    """Bytes on one device of arrays or shapes with shardings; none for host memory."""
    return sum(map(_bytes, filter(_is_on_device, jax.tree.leaves(tree))))


def host_bytes(tree: Any) -> int:
    """Bytes that one device's shards take on the host."""
    leaves = jax.tree.leaves(tree)
    return sum(_bytes(leaf) for leaf in leaves if not _is_on_device(leaf))


def _is_on_device(leaf):
    sharding = getattr(leaf, "sharding", None)
    return getattr(sharding, "memory_kind", None) not in (
        "pinned_host",
        "unpinned_host",
    )


def _bytes(leaf):
    sharding = getattr(leaf, "sharding", None)
    shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
    return math.prod(shape) * leaf.dtype.itemsize
