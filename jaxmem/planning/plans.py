"""A plan: memory and time of a job's programs on absent devices."""

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from jaxmem import devices
from jaxmem.devices import MOST_FRACTION
from jaxmem.planning import accounts, roofline, table
from jaxmem.planning.accounts import Account
from jaxmem.planning.roofline import Estimate
from jaxmem.train.phases import Phase, device_bytes

USUAL_FRACTION = 0.75  # of GPU memory that jax's allocator takes by default


@dataclasses.dataclass(frozen=True)
class PlannedPhase:
    """One program of a plan: bytes on one device, and seconds of one run."""

    name: str  # name of the program, such as "update"
    # bytes by name that are on the device while it runs, arguments first
    resident: dict[str, int]
    # known temporaries by name; they need not be alive at the same time
    parts: dict[str, int]
    account: Account  # by the compiler
    total: int  # all bytes, including the runtime's
    estimate: Estimate  # seconds, operations, bytes
    tokens: int  # tokens of one run, on all devices
    runs: float  # runs in a step of the job


@dataclasses.dataclass(frozen=True)
class Plan:
    """The result of `jaxmem plan`; `str` returns the printed table.

    Attributes:
        device: name, as in `jaxmem.devices.known()`.
        count: number of devices.
        hosts: number of hosts.
        memory: bytes of one device.
        phases: programs, in the order of a step.
        restored: bytes that a checkpoint restores to one device.
        on_host: bytes of state on the host, for one device.
        notes: further sentences for the reader.
    """

    device: str
    count: int
    hosts: int
    memory: int
    phases: tuple[PlannedPhase, ...]
    restored: int = 0
    on_host: int = 0
    notes: tuple[str, ...] = ()

    @property
    def peak(self) -> int:
        """The largest number of bytes on a device."""
        return max(phase.total for phase in self.phases)

    @property
    def limit(self) -> int:
        """Bytes that jax takes of the device by default."""
        return int(self.memory * (USUAL_FRACTION if self._is_gpu else 1))

    @property
    def _is_gpu(self) -> bool:
        return devices.find(self.device).platform == "cuda"

    @property
    def fits(self) -> bool:
        """True if all programs fit, if necessary with more than jax's default."""
        most = self.memory * (MOST_FRACTION if self._is_gpu else 1)
        return self.peak <= most and not any(p.account.refused for p in self.phases)

    @property
    def verdict(self) -> str:
        """A sentence that says if the job fits."""
        takes = f"{table.gib(self.peak)} of {table.gib(self.memory)} GiB"
        if not self.fits:
            return f"does not fit: {takes} per device"
        if self.peak <= self.limit:
            return f"fits: {takes} per device"
        return (
            f"fits: {takes} per device, more than the "
            f"{table.gib(self.limit)} that jax takes by default; set "
            f"XLA_PYTHON_CLIENT_MEM_FRACTION={MOST_FRACTION}"
        )

    @property
    def seconds(self) -> tuple[float, float]:
        """The estimated range of the time of a step of the job."""
        low = sum(p.runs * p.estimate.low for p in self.phases)
        return low, sum(p.runs * p.estimate.high for p in self.phases)

    @property
    def tokens(self) -> int:
        """Tokens of a step, in the program that reads the most."""
        return int(max(p.tokens * p.runs for p in self.phases))

    def __str__(self) -> str:
        return table.text(self)

    def as_json(self) -> dict[str, Any]:
        """All numbers, for `json.dumps`."""
        low, high = self.seconds
        derived = {
            "peak": self.peak, "limit": self.limit, "fits": self.fits,
            "verdict": self.verdict, "tokens": self.tokens,
            "seconds_estimate": [low, high],
        }  # fmt: skip
        return dataclasses.asdict(self) | derived


def plan(
    step: Callable | jax.stages.Traced,
    *args: Any,
    device: str | None = None,
    count: int = 1,
    hosts: int = 1,
) -> Plan:
    """Compile a function for devices that may be absent, and count its memory.

        total = arguments + results - donated + temporaries + workspaces + runtime

    Nothing is allocated.

    Args:
        step: a function, or `jax.jit` of one with its donations and shardings.
        args: `jax.ShapeDtypeStruct`s, arrays, or trees of them; for several devices
            with their shardings.
        device: a name of `jaxmem.devices.known()`; None inside of
            `jaxmem.devices.target`, whose devices the shardings need.
        count: number of devices, if device is given.
        hosts: number of hosts, if device is given.

    Returns:
        A `Plan`; `print` it.

    Raises:
        CompilerMissing: XLA's compiler for the device is not installed; the message has
            the pip command.
        ValueError: the device is unknown or not given.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> x = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    >>> print(jaxmem.plan(jnp.matmul, x, x, device="h200"))  # doctest: +SKIP

    Reference: Williams et al., "Roofline", 2009, doi:10.1145/1498765.1498785.
    """
    with _enter_target(device, count, hosts):
        traced = step
        if not isinstance(traced, jax.stages.Traced):
            jitted = step if hasattr(step, "trace") else jax.jit(step)
            traced = jitted.trace(*args)  # pyright: ignore
        arguments = dict(zip(_argument_names(step, len(args)), args, strict=True))
        phase = Phase("step", lambda: traced, arguments)
        return of_phases([phase])


def _enter_target(device, count, hosts):
    if device is not None:
        return devices.target(device, count, hosts=hosts)
    if devices.planned() is None:
        raise ValueError(
            "device must be given, as in device='h200', outside of "
            f"jaxmem.devices.target; known devices are {', '.join(devices.known())}"
        )
    return contextlib.nullcontext()


def _argument_names(step, count) -> list[str]:
    """Names of a function's arguments, or numbers where it has no names."""
    try:
        parameters = list(inspect.signature(step).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    plain = [p.name for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD]
    known = plain[:count]
    return known + [f"argument {i}" for i in range(len(known), count)]


def of_phases(
    phases: Iterable[Phase],
    restored: int = 0,
    on_host: int = 0,
    notes: Sequence[str] = (),
) -> Plan:
    """Compile phases for the devices of the enclosing target; count their memory."""
    target = devices.planned()
    assert target is not None, "inside devices.target"
    planned = tuple(_plan_phase(phase, target) for phase in phases)
    return Plan(
        target.device.name, len(target.devices), target.hosts, target.device.memory,
        planned, restored, on_host, tuple(notes),
    )  # fmt: skip


def _plan_phase(phase: Phase, target: Any) -> PlannedPhase:
    account = accounts.of(phase)
    resident = {name: device_bytes(tree) for name, tree in phase.arguments.items()}
    rest = account.arguments - sum(resident.values())
    if rest > 0:
        resident["inputs"] = rest
    if account.results > account.donated:
        resident["results"] = account.results - account.donated
    held = {name: device_bytes(tree) for name, tree in phase.held.items()}
    total = account.program + sum(held.values())
    return PlannedPhase(
        phase.name,
        resident | held,
        _known_temporaries(phase, account),
        account,
        total + accounts.RUNTIME[target.device.platform],
        roofline.of(phase, account, target.hosts),
        phase.tokens,
        phase.runs,
    )


def _known_temporaries(phase: Phase, account: Account) -> dict[str, int]:
    """Known temporaries: those of shapes, the head's, the largest collective's."""
    sizes = dict(phase.parts)
    if phase.head is not None and not account.refused:
        head = accounts.compile_for(phase.head()).memory_analysis()
        sizes["the head alone"] = getattr(head, "temp_size_in_bytes", 0)
    if account.collectives:
        sizes["largest that is sent"] = max(c.payload for c in account.collectives)
    return sizes
