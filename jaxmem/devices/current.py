"""The devices in force: those of this process, or those of a plan."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from jaxmem.devices import targets
from jaxmem.devices.table import Device, find


class Planned(NamedTuple):
    """What is compiled for inside of `target`."""

    device: Device
    devices: tuple[Any, ...]
    hosts: int


_planned: contextvars.ContextVar[Planned | None] = contextvars.ContextVar(
    "jaxmem_planned", default=None
)


@contextlib.contextmanager
def target(device: str, count: int = 1, *, hosts: int = 1) -> Iterator[list[Any]]:
    """Devices that what is traced and lowered inside is compiled for.

    Nothing can run on them: give `jax.jit(...).trace` and `.lower` shapes. What jax has
    traced before is forgotten at both ends, as it may depend on the devices.

    Args:
        device: a name of devices.toml, such as "h200".
        count: how many.
        hosts: that they are on, evenly.

    Yields:
        The devices, for a `jax.sharding.Mesh`.

    Raises:
        CompilerMissing: XLA's compiler for them is not installed; the message has the
            pip command.
        ValueError: an unknown name, or a count that there cannot be.

    >>> import jax, jax.numpy as jnp
    >>> from jaxmem import devices
    >>> with devices.target("h200"):  # doctest: +SKIP
    ...     lowered = jax.jit(jnp.sum).lower(jax.ShapeDtypeStruct((8,), jnp.float32))
    ...     lowered.compile().memory_analysis().output_size_in_bytes
    4
    """
    described = find(device)
    made = targets.of(described, count, hosts)
    token = _planned.set(Planned(described, tuple(made), hosts))
    jax.clear_caches()
    try:
        with jax.default_device(made[0]):
            yield list(made)
    finally:
        _planned.reset(token)
        jax.clear_caches()


def planned() -> Planned | None:
    """What `target` around says; None where programs are for this machine."""
    return _planned.get()


def current() -> list[Any]:
    """Devices that programs are compiled for."""
    around = _planned.get()
    return jax.devices() if around is None else list(around.devices)


def count() -> int:
    """How many they are."""
    around = _planned.get()
    return jax.device_count() if around is None else len(around.devices)


def backend() -> str:
    """ "cpu", "gpu" or "tpu", as `jax.default_backend` says it."""
    around = _planned.get()
    if around is None:
        return jax.default_backend()
    return "gpu" if around.device.platform == "cuda" else "tpu"
