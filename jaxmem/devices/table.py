"""Properties of devices by name: memory, peak rates, compilation targets."""

import dataclasses
import difflib
import functools
import tomllib
from collections.abc import Mapping
from pathlib import Path

_FOLDER = Path(__file__).parent
# The largest fraction of GPU memory that XLA_PYTHON_CLIENT_MEM_FRACTION should be.
MOST_FRACTION = 0.95


@dataclasses.dataclass(frozen=True)
class Device:
    """One row of devices.toml, which explains the fields and names their sources."""

    name: str
    platform: str  # "cuda" or "tpu"
    memory: int  # bytes
    products: float  # bfloat16 operations per second
    bandwidth: float  # bytes per second, like the next three
    link: float
    network: float
    host: float
    per_host: int
    topology: str = ""  # for TPUs, the first part of libtpu's names
    axes: int = 0  # for TPUs, dimensions of the torus
    cores: int = 1  # devices per chip
    kinds: tuple[str, ...] = ()  # jax's names for it
    capability: str = ""  # of GPUs, NVIDIA's version of their instructions
    described: bool = True  # False: XLA's compiler has no target config of it

    @property
    def usable(self) -> float:
        """Bytes that programs may take: of a GPU `MOST_FRACTION` of its memory."""
        return self.memory * (MOST_FRACTION if self.platform == "cuda" else 1)

    @property
    def target(self) -> str:
        """The target config that XLA for GPUs reads, as text."""
        return (_FOLDER / "targets" / f"{self.name}.txtpb").read_text("utf-8")


@functools.cache
def known() -> Mapping[str, Device]:
    """All devices by name."""
    rows = tomllib.loads((_FOLDER / "devices.toml").read_text("utf-8"))
    return {name: Device(name, **row) for name, row in rows.items()}


def of_kind(kind: str) -> Device | None:
    """The device with jax's name `jax.Device.device_kind`; None if it is unknown."""
    return next((device for device in known().values() if kind in device.kinds), None)


def find(name: str) -> Device:
    """The device of that name.

    Raises:
        ValueError: the name is unknown; the message lists all names.
    """
    if name not in known():
        close = difflib.get_close_matches(name, known(), n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(
            f"device must be one of {', '.join(known())}, got {name!r}{hint}"
        )
    return known()[name]
