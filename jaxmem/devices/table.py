"""What devices have, by name: memory, peak rates, and what XLA compiles for."""

import dataclasses
import difflib
import functools
import tomllib
from collections.abc import Mapping
from pathlib import Path

_FOLDER = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Device:
    """One row of devices.toml, which explains the fields and names their sources."""

    name: str
    platform: str  # "cuda" or "tpu"
    memory: int  # bytes
    products: float  # bfloat16 operations a second
    bandwidth: float  # bytes a second, as all that follow
    link: float
    network: float
    host: float
    per_host: int
    topology: str = ""  # of TPUs, the first part of libtpu's names
    axes: int = 0  # of TPUs, dimensions of the torus
    cores: int = 1  # devices of a chip
    kinds: tuple[str, ...] = ()  # names that jax has for it

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
    """The device that jax calls so (`jax.Device.device_kind`); None if none is here."""
    return next((device for device in known().values() if kind in device.kinds), None)


def find(name: str) -> Device:
    """The device of that name.

    Raises:
        ValueError: there is none; the message lists them.
    """
    if name not in known():
        close = difflib.get_close_matches(name, known(), n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(
            f"device must be one of {', '.join(known())}, got {name!r}{hint}"
        )
    return known()[name]
