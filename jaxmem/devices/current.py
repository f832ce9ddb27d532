"""The current devices: this process's, or an enclosing `target`'s."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxmem.devices import targets
from jaxmem.devices.table import Device, find


class Planned(NamedTuple):
    """The devices that programs are compiled for inside of `target`."""

    device: Device
    devices: tuple[Any, ...]
    hosts: int
    is_stand_in: bool = False  # True: `devices` are CPUs, and nothing is compiled


_planned: contextvars.ContextVar[Planned | None] = contextvars.ContextVar(
    "jaxmem_planned", default=None
)


@contextlib.contextmanager
def target(device: str, count: int = 1, *, hosts: int = 1) -> Iterator[list[Any]]:
    """Compile what is traced and lowered inside for other devices.

    Nothing can run on them: pass shapes to `jax.jit(...).trace` and `.lower`. jax's
    caches of traced functions are cleared at both ends, because a trace may depend on
    the devices. Its persistent compilation cache is off inside: programs for absent
    devices can be written to it, but not read back.

    Args:
        device: a name in devices.toml, such as "h200".
        count: number of devices.
        hosts: number of hosts, which have equally many devices.

    Yields:
        The devices, for a `jax.sharding.Mesh`.

    Raises:
        CompilerMissing: XLA's compiler for them is not installed; the message has the
            pip command.
        ValueError: the name is unknown, or the count is impossible.

    >>> import jax, jax.numpy as jnp
    >>> from jaxmem import devices
    >>> with devices.target("h200"):  # doctest: +SKIP
    ...     lowered = jax.jit(jnp.sum).lower(jax.ShapeDtypeStruct((8,), jnp.float32))
    ...     lowered.compile().memory_analysis().output_size_in_bytes
    4
    """
    described = find(device)
    absent = targets.of(described, count, hosts)
    with _planned_for(Planned(described, tuple(absent), hosts)):
        yield absent


@contextlib.contextmanager
def stand_in(device: str, count: int = 1) -> Iterator[list[Any]]:
    """Trace for other devices without their compiler: CPUs stand for them.

    As in `target`, but what is traced inside cannot be compiled: kernels are traced for
    the device, and attention by cuDNN has its shapes alone.

    Raises:
        ValueError: the name is unknown.
    """
    cpus = jax.devices("cpu")[:count]
    with _planned_for(Planned(find(device), tuple(cpus), 1, is_stand_in=True)):
        yield cpus


@contextlib.contextmanager
def _planned_for(target: Planned) -> Iterator[None]:
    token = _planned.set(target)
    jax.clear_caches()
    try:
        with jax.default_device(target.devices[0]), _no_persistent_cache():
            yield
    finally:
        _planned.reset(token)
        jax.clear_caches()


@contextlib.contextmanager
def _no_persistent_cache():
    enabled = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # jax asks only once whether the cache is enabled
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()


def planned() -> Planned | None:
    """The devices of the enclosing `target`; None if programs are for this machine."""
    return _planned.get()


def is_stand_in() -> bool:
    """True inside of `stand_in`, where nothing can be compiled."""
    around = _planned.get()
    return around is not None and around.is_stand_in


def current() -> list[Any]:
    """The devices that programs are compiled for."""
    around = _planned.get()
    return jax.devices() if around is None else list(around.devices)


def count() -> int:
    """The number of devices that programs are compiled for."""
    around = _planned.get()
    return jax.device_count() if around is None else len(around.devices)


def backend() -> str:
    """Platform of these devices: "cpu", "gpu" or "tpu", as in `jax.default_backend`."""
    around = _planned.get()
    if around is None:
        return jax.default_backend()
    return "gpu" if around.device.platform == "cuda" else "tpu"


def has_mosaic() -> bool:
    """True if Pallas's Mosaic GPU backend has kernels for the current GPU.

    It has them for NVIDIA GPUs of compute capability 9.0 (Hopper) and later, from jax
    0.11 on.
    """
    return jax.__version_info__ >= (0, 11) and _major_capability("9.0") >= 9


def has_wgmma() -> bool:
    """True if that backend multiplies by Hopper's instructions on the current GPU."""
    return has_mosaic() and _major_capability("9.0") == 9


def _major_capability(unknown):
    """Capability of the current GPU; 0 of AMD's, whose are "gfx90a" and such."""
    around = _planned.get()
    if around is not None:
        capability = around.device.capability or unknown
    else:
        capability = str(getattr(current()[0], "compute_capability", unknown))
    major = capability.split(".")[0]
    return int(major) if major.isdigit() else 0
