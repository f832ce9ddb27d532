"""A program of a job, with what is on the device while it runs."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Phase:
    """One program, traced for the devices of a plan.

    Attributes:
        name: such as "update".
        traced: of shapes, in `jaxmem.devices.target`.
        arguments: shapes of its arguments by what they are, such as "moments"; what is
            not named counts as "inputs".
        held: shapes of what else is on the device meanwhile.
        parts: bytes a device of what it makes on the way, by name, as far as known.
        tokens: that one run of it reads or makes, on all devices.
        runs: in one step of the job.
        turns: of a loop without a known end, at most.
        compiler_options: over those of the plan.
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
    """Bytes of one device, of arrays or shapes with their places; none on the host."""
    return sum(map(_bytes, filter(_is_on_device, jax.tree.leaves(tree))))


def host_bytes(tree: Any) -> int:
    """Bytes that one device's part takes on the host."""
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
