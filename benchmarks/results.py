"""Rows of measurements as CSV, each with where and when it was measured."""

import csv
import datetime
import importlib.metadata
import pathlib
import platform
from collections.abc import Mapping, Sequence

import jax

FOLDER = pathlib.Path(__file__).parent / "results"


def provenance() -> dict[str, str]:
    """Device, versions and date: what makes a number a measurement."""
    device = jax.devices()[0]
    kind = device.device_kind if device.platform != "cpu" else cpu_name()
    return {
        "device": kind,
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "date": datetime.date.today().isoformat(),
    }


def cpu_name() -> str:
    """Model name and number of cores."""
    names = [
        line.split(":", 1)[1].strip()
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return f"{len(names)} cores {names[0]}" if names else platform.processor()


def write(path: str | pathlib.Path, rows: Sequence[Mapping]) -> pathlib.Path:
    """Writes rows, provenance after their own columns; a bare name is in results/."""
    path = pathlib.Path(path)
    path = FOLDER / path if path.parent == pathlib.Path() else path
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{**row, **provenance()} for row in rows]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def read(name: str) -> list[dict[str, str]]:
    """Rows of a committed result."""
    with (FOLDER / name).open(newline="") as file:
        return list(csv.DictReader(file))
